"""The command line: the top layer, which puts exporter and serving together.

Commands import what they need when they run, so that `onnxport --help` answers at once. Environment
variables are read here and nowhere else.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

from onnxport.cli.unknown_options import parsed
from onnxport.errors import OnnxportError
from onnxport.version import __version__

COMMANDS = (
    *("export", "generate", "embed", "rerank", "chat", "serve", "run-batch"),
    *("verify", "perplexity", "bench", "devices"),
)
INTERRUPTED = 130  # what a shell reports for a process that Ctrl-C ended
BROKEN_PIPE = 141
BY_SIGNAL = 128  # likewise, and the signal's number


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="onnxport",
        description="Export an LLM once to ONNX, serve the same artifact on every vendor.",
        epilog="`onnxport COMMAND --help` tells more about each command.",
    )
    parser.add_argument("--version", action="version", version=f"onnxport {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        import_module(f"onnxport.cli.{name.replace('-', '_')}").add_parser(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=_version)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 is success, 1 an error that the message explains, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM,
    129 a terminal that was closed (SIGHUP), unless that is ignored, as `nohup` has it.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a text may have what a terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    given = sys.argv[1:] if arguments is None else arguments
    options = parsed(build_parser(), given)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    if getattr(options, "verbose", False):
        logging.getLogger("onnxport").setLevel(logging.INFO)
    previous = {number: signal.signal(number, _terminate) for number in _ending_signals()}
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except OnnxportError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return BROKEN_PIPE
    except OSError as error:  # a disk is full, a file may not be written
        print(f"error: {error}", file=sys.stderr)
        return OnnxportError.exit_code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code


def _open_closed_streams() -> None:
    """Give who closed a standard stream, such as a daemon, one that goes nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for good


def _ending_signals() -> list[signal.Signals]:
    """Signals that end a command, where Python would not unwind it."""
    numbers = [signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # Windows has none
    return numbers


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """End as by an exception, so that nothing half-done is left behind."""
    raise SystemExit(BY_SIGNAL + number)


def _version(options: argparse.Namespace) -> int:
    print(__version__)
    return 0
