"""What is told of options that a command lacks: what it has instead of other servers' ones."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

OPTION: Final = re.compile(r"--?[A-Za-z][\w-]*")
ONE_DEVICE: Final = "leave it out; a server has one device, so start one for each"
ALWAYS: Final = "leave it out; it is always so"
OF_REQUESTS: Final = "leave it out; give --access-log to have a line for each request"
NO_IMAGES: Final = "leave it out; models read text alone"

# vLLM's, and llama-server's, by what they would be here.
INSTEAD: Final[Mapping[str, str]] = {
    name: told
    for names, told in (
        (
            ("--gpu-memory-utilization", "--kv-cache-memory-bytes"),
            "give --kv-memory, the size of the KV cache alone or its share of what is free",
        ),
        (("--num-gpu-blocks-override",), "give --kv-cache-tokens, which counts tokens"),
        (
            ("--swap-space", "--kv-offloading-size"),
            "give --kv-host-memory, with a unit, such as 8GiB",
        ),
        (
            (
                *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"),
                *("--data-parallel-size", "-dp", "--enable-expert-parallel", "-ep"),
                *("--distributed-executor-backend", "--split-mode", "--tensor-split"),
            ),
            ONE_DEVICE,
        ),
        (
            (
                *("--enable-auto-tool-choice", "--enable-chunked-prefill", "--jinja"),
                *("--enable-prompt-tokens-details", "--enable-server-load-tracking"),
                *("--enable-tokenizer-info-endpoint", "--enable-request-id-headers"),
                *("--cont-batching", "-cb", "--metrics", "--slots"),
            ),
            ALWAYS,
        ),
        (
            (
                *("--enable-log-requests", "--no-enable-log-requests", "--disable-log-requests"),
                "--disable-uvicorn-access-log",
            ),
            OF_REQUESTS,
        ),
        (
            ("--uvicorn-log-level", "--disable-log-stats"),
            "leave it out; GET /metrics has the numbers, and --verbose tells more",
        ),
        (("--limit-mm-per-prompt", "--mm-processor-kwargs", "--mmproj"), NO_IMAGES),
        (
            ("--trust-remote-code",),
            "leave it out; no code of a checkpoint is run, only architectures that are known here",
        ),
        (
            ("--chat-template-content-format",),
            "leave it out; the chat template shows what it reads",
        ),
        (("--model", "-m", "-hf"), "give the model as the first argument, without an option"),
        (("--quantization", "-q"), "give --precision, or a checkpoint that is quantized"),
        (("--hf-token",), "give --token"),
        (("--enforce-eager",), "give --no-capture-graphs"),
        (("--max-num-queued-reqs",), "give --max-queued-requests"),
        (("--sse-keep-alive-interval",), "give --sse-ping-interval"),
        (("--disable-hybrid-kv-cache-manager", "--swa-full"), "give --no-hybrid-kv-cache"),
        (("--device", "-dev"), "give --provider"),
        (
            ("--pooler-config", "--override-pooler-config"),
            "give --pooling, or --matryoshka-dimensions",
        ),
        (("--task", "--runner"), "give --embeddings where texts are embedded, or leave it out"),
        (
            ("--ctx-size", "-c"),
            "give --max-model-len for the longest sequence, and --kv-cache-tokens for all together",
        ),
        (("--parallel", "-np"), "give --max-num-seqs"),
        (("--cache-type-k", "--cache-type-v", "-ctk", "-ctv"), "give --kv-cache-dtype"),
        (("--alias", "-a"), "give --served-model-name"),
        (("--n-gpu-layers", "--gpu-layers", "-ngl"), "give --provider; all layers run there"),
        (("--chat-template-file",), "give --chat-template"),
    )
    for name in names
}


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return options as `parse_args` does; what is unknown is told with what may be meant."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        lines = [f"unrecognized arguments: {' '.join(unknown)}"]
        known = options_of(parser, arguments)
        names = dict.fromkeys(
            match.group() for one in unknown if (match := OPTION.match(one)) is not None
        )
        lines += [f"{name}: {told}" for name in names if (told := instead_of(name, known))]
        parser.error("\n  ".join(lines))
    return options


def instead_of(name: str, known: Collection[str]) -> str | None:
    """Return what a command with the options `known` has instead of one that it lacks."""
    spelled = name.replace("_", "-")  # vLLM reads both
    if spelled in known:
        return f"give {spelled}"
    told = INSTEAD.get(spelled)
    if told is not None and {*OPTION.findall(told)} <= {*known}:
        return told
    close = get_close_matches(spelled, known, 1, 0.8)
    return f"did you mean {close[0]}?" if close else None


def options_of(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Return the options of the command that arguments name, and of one of its own commands."""
    known: list[str] = []
    for action in parser._actions:  # which argparse tells nobody otherwise
        known += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            name = next((one for one in arguments if one in action.choices), None)
            known += [] if name is None else options_of(action.choices[name], arguments)
    return known
