"""`onnxport generate`: complete prompts and print the text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
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
    add_engine_options,
    add_speculation_options,
)
from onnxport.cli.sampling import add_sampling_options, sampling_params
from onnxport.cli.session import deltas, open_session
from onnxport.cli.structure_arguments import add_structure_options, structured_outputs
from onnxport.cli.values import positive, text_of
from onnxport.errors import RequestError

if TYPE_CHECKING:
    from onnxport.serving.engine import Engine
    from onnxport.serving.infill import Infill
    from onnxport.serving.request import Request


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(commands, "generate", "Complete prompts and print the text.", run)
    add_source(parser)
    parser.usage = "%(prog)s [OPTION ...] MODEL [PROMPT ...]"  # argparse would say PROMPT is needed
    add_texts(
        parser,
        "PROMPT",
        "a text to complete",
        "a prompt in a file, without an end of line at its end",
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=128, help="most tokens to generate (128)"
    )
    parser.add_argument(
        "--suffix",
        type=some_text,
        metavar="TEXT",
        help="fill in what stands between each prompt and this text, with a model that was trained "
        "to (none)",
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

    prompts = prompts_of(options)
    params = replace(
        sampling_params(options, SamplingDefaults(temperature=0.0)),
        ignore_eos=options.ignore_eos,
        structured_outputs=structured_outputs(options),
    )
    with open_session(find_artifact(options), options) as engine:
        given: Sequence[str | list[int]] = prompts
        if options.suffix is not None:
            fills = filling(engine)
            params = fills.ended(params)
            given = [fills.around(prompt, options.suffix).token_ids for prompt in prompts]
        requests = [
            engine.prepare(str(index), prompt, params, request_options(options))
            for index, prompt in enumerate(given)
        ]
        if len(requests) == 1 and not options.json:
            _stream(engine, requests[0])
        else:
            _print_all(engine, prompts, requests, as_json=options.json)
    return 0


def some_text(text: str) -> str:
    """Return a text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text has nothing before it; leave it out")
    return text


def filling(engine: Engine) -> Infill:
    """Return how the model fills in.

    Raises:
        RequestError: it has no tokens for that.
    """
    from onnxport.serving.infill import Infill

    found = None if engine.tokenizer is None else Infill.find(engine.tokenizer)
    if found is None:
        raise RequestError(
            "--suffix was given, and the model's vocabulary has no tokens to fill in by; leave it "
            "out, or take a model that was trained to"
        )
    return found


def prompts_of(options: argparse.Namespace) -> list[str]:
    """Return the prompts, those in files behind the others.

    Raises:
        RequestError: there is none, or a file cannot be read.
    """
    texts = [text_of("--file", path).removesuffix("\n") for path in options.files]
    if not (prompts := [*options.prompts, *texts]):
        raise RequestError("there is no prompt; give one behind MODEL, or a file with --file")
    return prompts


def _stream(engine: Engine, request: Request) -> None:
    """Print the text of one request as it comes."""
    for delta in deltas(engine, [request]):
        print(delta.text, end="", flush=True)
    print()


def _print_all(
    engine: Engine, prompts: Sequence[str], requests: Sequence[Request], *, as_json: bool
) -> None:
    """Print prompts and texts once all are there."""
    texts = {request.request_id: "" for request in requests}
    for delta in deltas(engine, requests):
        texts[delta.request_id] += delta.text
    if as_json:
        results = [
            {
                "prompt": prompt,
                "text": texts[request.request_id],
                "finish_reason": request.finish_reason,
                "prompt_tokens": request.num_prompt_tokens,
                "completion_tokens": request.num_output_tokens,
            }
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        print(json.dumps(results, indent=2, ensure_ascii=False))
        return
    told = zip(prompts, requests, strict=True)
    print("\n\n".join(f"> {prompt}\n{texts[one.request_id]}" for prompt, one in told))
