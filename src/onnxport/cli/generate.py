"""`onnxport generate`: complete prompts and print the text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnxport.cli.adapters import add_adapter_option, request_options
from onnxport.cli.arguments import (
    Commands,
    add_cache_options,
    add_choice_options,
    add_engine_options,
    add_export_options,
    add_load_options,
    add_speculation_options,
    add_structure_options,
    command,
    structured_outputs,
)
from onnxport.cli.cache import add_source, find_artifact
from onnxport.cli.sampling import add_sampling_options, sampling_params
from onnxport.cli.session import deltas, open_session
from onnxport.cli.values import positive

if TYPE_CHECKING:
    from onnxport.serving.engine import Engine
    from onnxport.serving.request import Request


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(commands, "generate", "Complete prompts and print the text.", run)
    add_source(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="+")
    parser.add_argument(
        "--max-tokens", type=positive, default=128, help="most tokens to generate (128)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end token")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_sampling_options(parser)
    add_structure_options(parser)
    add_load_options(parser)
    add_choice_options(parser)
    add_engine_options(parser)
    add_cache_options(parser)
    add_speculation_options(parser)
    add_adapter_option(parser)
    add_export_options(parser)


def run(options: argparse.Namespace) -> int:
    """Run all prompts at once; one prompt's text is printed as it comes.

    It is greedy unless told otherwise, whatever the model's own defaults are, so that the same
    prompt has the same text.
    """
    from dataclasses import replace

    from onnxport.serving.defaults import SamplingDefaults

    params = replace(
        sampling_params(options, SamplingDefaults(temperature=0.0)),
        ignore_eos=options.ignore_eos,
        structured_outputs=structured_outputs(options),
    )
    with open_session(find_artifact(options), options) as engine:
        requests = [
            engine.prepare(str(index), prompt, params, request_options(options))
            for index, prompt in enumerate(options.prompts)
        ]
        if len(requests) == 1 and not options.json:
            _stream(engine, requests[0])
        else:
            _print_all(engine, requests, as_json=options.json)
    return 0


def _stream(engine: Engine, request: Request) -> None:
    """Print the text of one request as it comes."""
    for delta in deltas(engine, [request]):
        print(delta.text, end="", flush=True)
    print()


def _print_all(engine: Engine, requests: Sequence[Request], *, as_json: bool) -> None:
    """Print prompts and texts once all are there."""
    texts = {request.request_id: "" for request in requests}
    for delta in deltas(engine, requests):
        texts[delta.request_id] += delta.text
    if as_json:
        results = [
            {
                "prompt": request.prompt,
                "text": texts[request.request_id],
                "finish_reason": request.finish_reason,
                "prompt_tokens": request.num_prompt_tokens,
                "completion_tokens": request.num_output_tokens,
            }
            for request in requests
        ]
        print(json.dumps(results, indent=2, ensure_ascii=False))
        return
    print("\n\n".join(f"> {request.prompt}\n{texts[request.request_id]}" for request in requests))
