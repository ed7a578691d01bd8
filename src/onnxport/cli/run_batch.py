"""`onnxport run-batch`: answer the requests of a file, without a server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from onnxport.cli.application import add_api_options, add_model_options, check_choices, open_app
from onnxport.cli.arguments import Commands, command
from onnxport.cli.cache import add_source, find_artifact
from onnxport.cli.values import positive
from onnxport.errors import RequestError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from onnxport.serving.http.batch_file import Line
    from onnxport.serving.worker import AsyncEngine

STANDARD = "-"
SOME_FAILED = 1


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands, "run-batch", "Answer requests of a file, as OpenAI's Batch API has them.", run
    )
    add_source(parser)
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests, a line of JSON each: custom_id, method, url and body; - is stdin",
    )
    group.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="where answers go, a line each, in the order of the requests; - is stdout",
    )
    group.add_argument(
        "--max-inflight",
        type=positive,
        metavar="N",
        help="requests that run and wait at once (twice --max-num-seqs)",
    )
    add_api_options(group)
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Answer all of them; what can be wrong without the model is told before it is loaded."""
    import asyncio

    chosen = check_choices(options)
    lines = _lines(options.input_file)
    _check_output(options.input_file, options.output_file)
    with (
        open_app(find_artifact(options), chosen, options) as (app, engine),
        _writing(options.output_file) as file,
    ):
        inflight = options.max_inflight or 2 * engine.max_num_seqs
        failed = asyncio.run(_answer(app, engine, lines, file, inflight))
    done = len(lines) - failed
    print(f"{done} of {len(lines)} requests were answered, {failed} failed.", file=sys.stderr)
    return SOME_FAILED if failed else 0


async def _answer(
    app: ASGIApp, engine: AsyncEngine, lines: Sequence[Line], file: BinaryIO, max_inflight: int
) -> int:
    """Write a line for each request, and return how many failed."""
    from onnxport.serving.http.batch_file import answers

    failed = 0
    try:
        async for answer in answers(app, lines, max_inflight):
            failed += answer.failed
            file.write(answer.written())
            file.flush()
    finally:
        await engine.close()
    return failed


def _lines(path: str) -> list[Line]:
    """Return the requests of a file.

    Raises:
        RequestError: there is no such file, or it has something else.
    """
    from onnxport.serving.http.batch_file import read_lines

    _check_local("--input-file", path)
    try:
        if path == STANDARD:
            return read_lines(sys.stdin.buffer)
        with Path(path).open("rb") as file:
            return read_lines(file)
    except FileNotFoundError as error:
        raise RequestError(f"--input-file {path} is not there") from error


def _check_local(option: str, path: str) -> None:
    """Refuse a URL, which vLLM's command reads from and writes to."""
    if "://" in path:
        raise RequestError(
            f"{option} {path} is a URL; give a file of this machine, or - for a pipe"
        )


def _check_output(source: str, target: str) -> None:
    """Refuse to write where the requests are read from, or where there is no folder."""
    if target == STANDARD:
        return
    _check_local("--output-file", target)
    path = Path(target)
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(
            f"--output-file {target} cannot be written: it is a folder, or has none to be in"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"--output-file {target} may not be written by this user")
    if source != STANDARD and path.exists() and path.samefile(source):
        raise RequestError("--output-file is --input-file, which would be lost; give another one")


@contextmanager
def _writing(target: str) -> Iterator[BinaryIO]:
    """Give the file that answers go to."""
    if target == STANDARD:
        yield sys.stdout.buffer
        return
    with Path(target).open("wb") as file:
        yield file
