"""The command line: `python -m keras_gpufeed COMMAND`.

Flow:   ... -> demo -> [__main__]
Owns:   commands and their arguments.
Leaves: doing them (demo).
"""

from __future__ import annotations

import argparse
import sys

from . import demo
from .errors import FeedError


def main(arguments: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: Words of the command line; None for those of the process.

    Returns:
        The exit code: 0, or 1 after an error that a person can repair.
    """
    parser = argparse.ArgumentParser(prog="python -m keras_gpufeed", description="Trains Keras models on every GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("demo", help="train a small model on every device and on one, and compare")
    command.add_argument("--replicas", type=_positive, help="how many (default: every GPU, or 4 virtual devices)")
    command.add_argument("--epochs", type=_positive, default=5, help="epochs of each training (default: 5)")
    command.add_argument("--save", metavar="FILE", help="where to save the trained model, such as model.keras")
    options = parser.parse_args(arguments)
    try:
        demo.run(options.replicas, options.epochs, options.save)
    except FeedError as error:
        print(f"keras_gpufeed: {error}", file=sys.stderr)
        return 1
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
