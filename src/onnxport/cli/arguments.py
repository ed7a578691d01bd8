"""Options that several commands share, and the objects they become."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxport.providers.base import LoadOptions
    from onnxport.serving.config import EngineConfig
    from onnxport.serving.params import SamplingParams

Commands = argparse._SubParsersAction  # what `add_subparsers` returns; it has no public name
PRECISIONS = ("int4", "int8", "fp16", "fp32")
EXPORT_OPTIONS = (
    "precision",
    "group_size",
    "head_precision",
    "context_length",
    "revision",
    "token",
)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def port(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 65535")
    return value


def command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Add a command and return its parser."""
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    return parser


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides the content of an artifact."""
    group = parser.add_argument_group("export")
    group.add_argument("--precision", choices=PRECISIONS, help="of the weights (int4)")
    group.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        help="input features that share a scale in int4 and int8 (128)",
    )
    group.add_argument(
        "--head-precision",
        choices=("same", *PRECISIONS),
        help="of output head and embedding (int8 for an int4 model, else the same)",
    )
    group.add_argument(
        "--context-length", type=positive, metavar="TOKENS", help="shorten the model's context"
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument("--token", help="hub token; by default the one `hf auth login` stored")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides how an artifact is loaded."""
    group = parser.add_argument_group("device")
    group.add_argument("--provider", default="auto", help="auto (default), cpu, …; see `devices`")
    group.add_argument("--threads", type=positive, help="compute threads (the physical cores)")
    group.add_argument(
        "--kv-cache-tokens",
        type=positive,
        metavar="TOKENS",
        help="size of the KV cache (from the free memory)",
    )
    group.add_argument(
        "--verbose", action="store_true", help="say which provider was chosen and what it changed"
    )
    group.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="auto (default)")
    group.add_argument(
        "--max-model-len",
        type=positive,
        metavar="TOKENS",
        help="longest sequence, prompt and answer together (the model's context)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the limits of continuous batching."""
    group = parser.add_argument_group("batching")
    group.add_argument(
        "--max-num-seqs", type=positive, metavar="N", help="most requests that run at once"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=positive, metavar="N", help="most tokens in one step"
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add how tokens are chosen."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token"
    )
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int)
    group.add_argument("--seed", type=int, help="makes sampled text reproducible")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable"
    )


def load_options(options: argparse.Namespace) -> LoadOptions:
    """Return the provider's options."""
    from onnxport.providers.base import LoadOptions

    return LoadOptions(
        threads=options.threads,
        kv_cache_tokens=options.kv_cache_tokens,
        kv_cache_dtype=options.kv_cache_dtype,
        max_model_len=options.max_model_len,
    )


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine's limits: what was given, and its own defaults for the rest."""
    from onnxport.serving.config import EngineConfig

    names = ("max_num_seqs", "max_num_batched_tokens")
    given = {name: getattr(options, name, None) for name in names}
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Return the decoding parameters."""
    from onnxport.serving.params import SamplingParams

    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        stop=tuple(options.stop),
        max_tokens=options.max_tokens,
    )
