"""The command line: `python -m keras_gpufeed COMMAND`.

Flow:   ... -> doctor -> demo -> bench -> [__main__]
Owns:   commands and their arguments.
Leaves: doing them (demo, doctor, plan, plan_picture, bench).

Only commands that need TensorFlow import it: under `python -m` the package does so when it is asked for a public name
(`from . import DistributedFeeder`), which is also when it takes its places in Keras.
"""

from __future__ import annotations

import argparse
import os
import sys

from .errors import FeedError


def main(arguments: list[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: Words of the command line; None for those of the process.

    Returns:
        The exit code: 0, or 1 after an error that a person can repair, or if the doctor or a check finds one.
    """
    parser = argparse.ArgumentParser(prog="python -m keras_gpufeed", description="Trains Keras models on every GPU.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("demo", help="train a small model on every device and on one, and compare")
    command.set_defaults(run=_demo)
    command.add_argument("--replicas", type=_positive, help="how many (default: every GPU, or 4 virtual devices)")
    command.add_argument("--epochs", type=_positive, default=5, help="epochs of each training (default: 5)")
    command.add_argument("--save", metavar="FILE", help="where to save the trained model, such as model.keras")
    command = commands.add_parser("doctor", help="check versions, GPUs and the machine, and say how to repair them")
    command.set_defaults(run=_doctor)
    command.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser("plan", help="show who gets which samples, without any data")
    command.set_defaults(run=_plan)
    command.add_argument("--samples", type=_positive, required=True, help="samples of one pass")
    command.add_argument("--batch-size", type=_positive, default=32, help="global batch size (default: 32)")
    command.add_argument("--replicas", type=_positive, required=True, help="replicas, one for each GPU")
    command.add_argument("--plot", metavar="FILE", help="where to draw it, such as plan.png")
    description = "Times feeding alone, side by side with Keras, tf.data and PyTorch, each in a process of its own."
    command = commands.add_parser("bench", help="time feeding, side by side with other ways", description=description)
    command.set_defaults(run=_bench)
    if (sys.argv[1:] if arguments is None else arguments)[:1] == ["bench"]:
        from . import bench  # With TensorFlow, as its options name what only that knows.

        bench.add_arguments(command)
    options = parser.parse_args(arguments)
    try:
        exit_code = options.run(options)
        sys.stdout.flush()
    except FeedError as error:
        print(f"keras_gpufeed: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # Whoever read our output, such as `head`, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # So that flushing at exit does not fail again.
        return 1
    return exit_code


def _demo(options: argparse.Namespace) -> int:
    from . import demo

    demo.run(options.replicas, options.epochs, options.save)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run(as_json=options.json)


def _plan(options: argparse.Namespace) -> int:
    from .plan import BatchPlan, strategy_name

    plan = BatchPlan(options.samples, options.batch_size, options.replicas, strategy=strategy_name(options.replicas))
    print(plan)
    if options.plot:
        from .plan_picture import draw_plan

        draw_plan(plan, options.plot)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from . import bench

    return bench.run(options)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, in digits alone. Received {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
