#!/bin/sh
# Makes .venv with a Python that TensorFlow 2.15 supports and installs the package there, once.
#
#   PYTHON   the Python to use; when empty, the first on the PATH that runs and is supported
#
# .venv/made_of keeps the Python and the folder that .venv was made for, .venv/installed a checksum of
# the files that decide what is in it. While both hold, nothing is done.
#
# There is one environment, with every extra, for all targets: most of it is TensorFlow, and a second
# environment would install that again to spare the rest.
set -eu
cd "$(dirname "$0")/.."

names="python3.11 python3.10 python3.9 python3 python"
needs="keras_gpufeed needs Python 3.9, 3.10 or 3.11, the versions that TensorFlow 2.15 supports"

fail() {
    echo "$1." >&2
    exit 1
}

# Prints "3.11.7 /usr" for a Python that runs, and nothing for one that does not: a name on the PATH may
# be a shim with no Python behind it. A virtual environment answers for the Python it was made by.
identify() {
    "$1" -c 'import os, sys
home = os.path.realpath(getattr(sys, "base_prefix", sys.prefix))
print("%d.%d.%d %s" % (sys.version_info[:3] + (home,)))' 2>/dev/null || true
}

is_supported() {
    case $1 in
        3.9.* | 3.10.* | 3.11.*) return 0 ;;
        *) return 1 ;;
    esac
}

# The Python that was asked for.
python=${PYTHON:-}
asked=""
if [ -n "$python" ]; then
    asked=$(identify "$python")
    [ -n "$asked" ] || fail "$needs, but PYTHON=$python does not run: install one of them and name it"
    is_supported "$asked" ||
        fail "$needs, but PYTHON=$python is Python ${asked%% *}: install one of them and name it"
fi

# A new .venv, unless the one that is there will do.
present=$(identify .venv/bin/python)
if ! is_supported "$present" || [ "${asked:-$present}" != "$present" ] ||
    [ "$(cat .venv/made_of 2>/dev/null)" != "$present in $PWD" ]; then
    for name in $names; do
        [ -z "$python" ] || break
        ! is_supported "$(identify "$name")" || python=$name
    done
    [ -n "$python" ] || fail "$needs, but none of $names is one of them: install one of them, or name one with PYTHON=/path/to/python"
    rm -rf .venv
    "$python" -m venv .venv || fail "$needs, with its venv module, but $python could not make .venv"
    present=$(identify .venv/bin/python)
    echo "$present in $PWD" >.venv/made_of
fi

# What is in it.
settings=$(cat setup.cfg pyproject.toml constraints.txt | cksum)
[ "$(cat .venv/installed 2>/dev/null)" != "$settings" ] || exit 0
echo "Installing TensorFlow 2.15 and all that the demo, the tests and the checks need into .venv," \
    "with Python ${present%% *}; this takes a few minutes, once."
install() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt "$@"
}
install --upgrade pip setuptools wheel
install --no-build-isolation --editable ".[demo,test,check,docs]"
echo "$settings" >.venv/installed
