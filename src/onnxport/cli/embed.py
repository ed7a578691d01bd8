"""`onnxport embed`: make vectors of texts and print them, a line of JSON each."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from onnxport.cli.adapters import add_adapter_option, request_options
from onnxport.cli.arguments import (
    Commands,
    add_choice_options,
    add_export_options,
    add_load_options,
    add_texts,
    command,
)
from onnxport.cli.cache import add_source, find_artifact
from onnxport.cli.engine_arguments import (
    add_cache_options,
    add_embedding_options,
    add_engine_options,
)
from onnxport.cli.session import deltas, open_session
from onnxport.cli.values import positive, text_of
from onnxport.errors import RequestError

if TYPE_CHECKING:
    from onnxport.serving.request import Request


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(commands, "embed", "Make vectors of texts and print them as JSON.", run)
    add_source(parser)
    parser.usage = "%(prog)s [OPTION ...] MODEL [TEXT ...]"  # argparse would say TEXT is needed
    add_texts(
        parser, "TEXT", "a text to embed", "texts in a file, one a line; empty lines are left out"
    )
    parser.add_argument(
        "--dimensions", type=positive, metavar="N", help="cut vectors to N numbers (none)"
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="give vectors length 1 (as the checkpoint says; else on)",
    )
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="the model's prompt of this name goes ahead of each text, such as query; '' for none "
        "(as the checkpoint says)",
    )
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="leave out the ends of texts that are too long, which are an error else",
    )
    add_load_options(parser)
    add_embedding_options(parser, is_choice=False)
    add_choice_options(parser)
    add_engine_options(parser)
    add_cache_options(parser)
    add_adapter_option(parser)
    add_export_options(parser)


def run(options: argparse.Namespace) -> int:
    """Embed all texts at once; the lines are in their order."""
    from onnxport.serving.pooling import PoolingParams

    texts = texts_of(options)
    params = PoolingParams(
        options.dimensions,
        options.normalize,
        options.prompt_name,
        truncate_prompt_tokens=-1 if options.truncate else None,
        truncation_side="right",
    )
    with open_session(find_artifact(options), options) as engine:
        requests = [
            engine.prepare_embedding(str(index), text, params, request_options(options))
            for index, text in enumerate(texts)
        ]
        lines: dict[str, str] = {}
        told = 0
        for delta in deltas(engine, requests):
            assert delta.embedding is not None, "`deltas` raises what fails"
            request = requests[int(delta.request_id)]
            lines[delta.request_id] = _line(request, delta.embedding.tolist())
            while (line := lines.pop(str(told), None)) is not None:
                print(line, flush=True)
                told += 1
    return 0


def texts_of(options: argparse.Namespace) -> list[str]:
    """Return the texts, those in files behind the others.

    Raises:
        RequestError: there is none, or a file cannot be read.
    """
    lines = [line for path in options.files for line in text_of("--file", path).splitlines()]
    if not (texts := [*options.texts, *filter(None, lines)]):
        raise RequestError("there is no text; give one behind MODEL, or a file with --file")
    return texts


def _line(request: Request, vector: list[float]) -> str:
    told = {
        "index": int(request.request_id),
        "text": request.prompt,
        "num_tokens": request.num_prompt_tokens,
        "embedding": vector,
    }
    return json.dumps(told, ensure_ascii=False)
