"""A source on its way to worker processes.

Flow:   errors -> packing -> [shipping] -> ring -> worker_main -> processes -> workers -> ...
Owns:   pickling a source once for all workers, saying which part of it cannot be pickled.
Leaves: passing it on (processes), rebuilding it (worker_main).
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import pickletools
import sys
import types
import weakref
from collections.abc import Iterator
from multiprocessing import process
from typing import Any

from .errors import SourceError
from .packing import Packed, new_memory


def headline(error: BaseException) -> str:
    """The class and the message of an exception."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__  # Its __str__ fails.


class ShippedSource:
    """A source on its way to workers: pickled once, its arrays in memory that all workers share.

    Args:
        source: The source.
        needs_main: True if the workers do not have the objects of this process's script.

    Raises:
        SourceError: If it cannot be pickled, or not found where it is unpickled.
        WorkerError: If there is not enough memory.
    """

    def __init__(self, source: Any, needs_main: bool) -> None:
        try:
            packed = Packed(source, reopen_maps=True)
        except Exception as error:
            path, part = find_unpicklable(source, "source")
            raise SourceError(
                f"Worker processes get the source by pickling, and {path}, a {type(part).__qualname__}, "
                f"cannot be pickled ({headline(error)}). {_repair(part)}"
            ) from error
        self.main = _main_module() if needs_main and _mentions_main(packed.pickled) else {}
        self.pickle_bytes = packed.pickle_bytes
        self.memory = new_memory(packed.num_bytes)
        self.close = weakref.finalize(self, os.close, self.memory)  # Workers that have it keep their maps.
        with mmap.mmap(self.memory, packed.num_bytes) as mapped:
            packed.write(mapped)


def _repair(part: Any) -> str:
    if isinstance(part, types.FunctionType):
        return f"Define {part.__qualname__} with `def` at the top level of a file."
    if isinstance(part, types.GeneratorType):
        return "Keep the function that makes the generator, and call it in the worker."
    return "Leave it out of what __getstate__ returns and make it on first use in the worker, or use workers=0."


def _mentions_main(pickled: bytes) -> bool:
    return b"__main__" in pickled and any(word == "__main__" for _, word, _ in pickletools.genops(pickled))


def _main_module() -> dict[str, str]:
    """How another interpreter can import this one's script, as `multiprocessing.spawn.prepare` takes it."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name:
        return {"init_main_from_name": name}
    path = getattr(main, "__file__", None)
    if path:
        return {
            "init_main_from_path": os.path.normpath(os.path.join(getattr(process, "ORIGINAL_DIR", None) or "", path))
        }
    raise SourceError(
        "The source is defined in a notebook or an interactive session, which workers cannot import. "
        "Move its class or function into a file and import it from there, or use workers=0. "
        'On Linux, start_method="fork" takes a source as it is, at the risk of a deadlock.'
    )


def find_unpicklable(value: Any, path: str) -> tuple[str, Any]:
    """Follows attributes and containers to the part of a value that pickle refuses.

    Args:
        value: A value that cannot be pickled.
        path: What the value is called.

    Returns:
        The path to the deepest part that cannot be pickled, and that part.

    Example:
        >>> find_unpicklable({"a": 1, "b": [2, iter, (x for x in "c")]}, "source")[0]
        "source['b'][2]"
    """
    return _search(value, path, set()) or (path, value)


def _search(value: Any, path: str, seen: set[int]) -> tuple[str, Any] | None:
    """The culprit in a value that cannot be pickled; None if there is none but in what has been seen."""
    seen.add(id(value))
    is_culprit = True
    for step, part in _parts(value):
        if not _is_picklable(part):
            is_culprit = False
            found = None if id(part) in seen else _search(part, path + step, seen)
            if found:
                return found
    return (path, value) if is_culprit else None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What pickle would go on to from a value, with the Python expression that leads there."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif not isinstance(value, (types.FunctionType, type)):
        try:
            state = value.__reduce_ex__(4)[2]  # Honours __getstate__.
        except Exception:
            state = getattr(value, "__dict__", None)
        for attributes in state if isinstance(state, tuple) else (state,):
            if isinstance(attributes, dict):
                yield from ((f".{name}", part) for name, part in attributes.items())


def _is_picklable(value: Any) -> bool:
    try:
        pickle.dumps(value, protocol=5, buffer_callback=lambda buffer: None)  # Leaves the data of arrays out.
    except Exception:
        return False
    return True
