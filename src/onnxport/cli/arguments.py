"""Options that several commands share, and the objects they become."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from onnxport.cli.values import memory, positive, reasoning_parser, token_list

if TYPE_CHECKING:
    from onnxport.providers.base import LoadOptions

Commands = argparse._SubParsersAction  # what `add_subparsers` returns; it has no public name
PRECISIONS = ("int4", "int8", "fp16", "fp32")
DTYPES = ("auto", "float32", "float16", "bfloat16")
EXPORT_OPTIONS = (
    "precision",
    "group_size",
    "asymmetric",
    "head_precision",
    "expert_precision",
    "context_length",
    "revision",
    "token",
    "tokenizer",
    "classifier_from_token",
    "mtp",
)


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
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of the weights (int4; int8 for a GGUF file of more than five bits a weight)",
    )
    group.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        help="input features that share a scale in int4 and int8 (the checkpoint's, or 128)",
    )
    group.add_argument(
        "--asymmetric",
        action="store_true",
        default=None,
        help="zero points for weights in int4, which change them less and take some time",
    )
    group.add_argument(
        "--head-precision",
        choices=("same", *PRECISIONS),
        help="of output head and embedding (int8 for an int4 model, else the same)",
    )
    group.add_argument(
        "--expert-precision",
        choices=("same", "mxfp4"),
        help="of experts; mxfp4 keeps those of a checkpoint that has them so (same)",
    )
    group.add_argument(
        "--context-length", type=positive, metavar="TOKENS", help="shorten the model's context"
    )
    group.add_argument("--revision", help="branch, tag or commit of a hub id")
    group.add_argument("--token", help="hub token; by default the one `hf auth login` stored")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="take tokenizer, chat template and generation settings from there",
    )
    group.add_argument(
        "--classifier-from-token",
        type=token_list,
        metavar="NO,YES",
        help="judge texts by the logits of these tokens, as Qwen3-Reranker does by no,yes (as the "
        "checkpoint says)",
    )
    group.add_argument(
        "--mtp",
        action="store_true",
        default=None,
        help="export the model's layer of multi-token prediction, too, which guesses tokens ahead "
        """('{"method": "mtp"}')""",
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add what decides how an artifact is loaded, for nothing but texts that are generated."""
    parser.set_defaults(embeddings=False)  # `add_embedding_options` changes that
    group = parser.add_argument_group("device")
    group.add_argument("--provider", default="auto", help="auto (default), cpu, …; see `devices`")
    group.add_argument(
        "--threads",
        type=positive,
        help="compute threads (the physical cores, no more than a container's quota)",
    )
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--kv-memory",
        type=memory,
        metavar="SIZE",
        help="memory of the KV cache: 8GiB, 512MiB, or a share of what is free, 60%% or 0.6 (40%%)",
    )
    cache.add_argument(
        "--kv-cache-tokens",
        type=positive,
        metavar="TOKENS",
        help="size of the KV cache in tokens, instead of --kv-memory",
    )
    group.add_argument(
        "--verbose", action="store_true", help="say which provider was chosen and what it changed"
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="TYPE",
        help="of the KV cache: auto (default), fp32, fp16, bf16, int8 or int4, as far as the "
        "provider has it; `onnxport devices` lists what it has, `onnxport verify` what each one "
        "costs",
    )
    group.add_argument(
        "--max-model-len",
        type=positive,
        metavar="TOKENS",
        help="longest sequence, prompt and answer together (the model's context)",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of activations: the device's best (auto)"
    )
    group.add_argument(
        "--allow-on-host",
        action="append",
        default=[],
        metavar="OP",
        help="let this operator run on the host if the device does not take it; repeatable",
    )
    group.add_argument(
        "--capture-graphs",
        action=argparse.BooleanOptionalAction,
        help="record decode steps and replay them (CUDA graphs; by default where it can be done, "
        "which is on cuda with its own attention)",
    )
    group.add_argument(
        "--no-graph-cache",
        action="store_true",
        help="lower the model's graph anew, and do not keep it for the next start",
    )
    group.add_argument(
        "--no-coarse-head",
        action="store_true",
        help="read all of the output head in every step; otherwise cpu keeps half a byte more for "
        "each of its weights and reads less for most sampling (docs/providers.md), with the same "
        "tokens but for a chance below 2.3e-11 each",
    )
    group.add_argument(
        "--no-hybrid-kv-cache",
        action="store_true",
        help="keep K/V of all tokens in all layers; otherwise cpu, cuda and webgpu use blocks "
        "again that layers with a sliding window no longer see, with the same tokens",
    )


def add_choice_options(parser: argparse.ArgumentParser) -> None:
    """Add how providers are chosen and replaced."""
    group = parser.add_argument_group("choice of the provider")
    group.add_argument(
        "--fallback",
        action="append",
        default=[],
        metavar="PROVIDER",
        help="may take over when the provider cannot load or its device is lost; repeatable, in "
        "order (none)",
    )
    group.add_argument(
        "--no-trial",
        action="store_true",
        help="let `--provider auto` choose without measuring",
    )


def add_texts(parser: argparse.ArgumentParser, metavar: str, text: str, file: str) -> None:
    """Add texts, as arguments and in files; `text` and `file` say what one is."""
    texts = parser.add_argument(
        f"{metavar.lower()}s",
        metavar=metavar,
        nargs="+",
        default=[],
        help=f"{text}; one is needed, here or with --file",
    )
    texts.required = False  # "*" would take none where options stand before them
    parser.add_argument(
        "-f",
        "--file",
        action="append",
        type=Path,
        default=[],
        dest="files",
        metavar="FILE",
        help=f"{file}; repeatable",
    )


def add_reasoning_option(parser: argparse._ActionsContainer) -> None:
    """Add how reasoning is told from the answer."""
    parser.add_argument(
        "--reasoning-parser",
        type=reasoning_parser,
        default="auto",
        metavar="NAME",
        help="how reasoning is told from the answer: auto (as the chat template has it), none, or "
        "one of vLLM's names, such as qwen3, deepseek_r1, seed_oss, openai_gptoss (auto)",
    )


def load_options(options: argparse.Namespace) -> LoadOptions:
    """Return the provider's options."""
    from onnxport.providers.base import LoadOptions

    return LoadOptions(
        threads=options.threads,
        kv_cache_tokens=options.kv_cache_tokens,
        kv_memory=options.kv_memory,
        kv_cache_dtype=options.kv_cache_dtype,
        max_model_len=options.max_model_len,
        dtype=options.dtype,
        allowed_on_host=tuple(options.allow_on_host),
        capture_graphs=options.capture_graphs,
        graph_cache=graph_cache_folder(options),
        coarse_head=not options.no_coarse_head,
        hybrid_kv_cache=not options.no_hybrid_kv_cache,
    )


def graph_cache_folder(options: argparse.Namespace) -> Path | None:
    """Return where lowered graphs are kept; None where there are to be none."""
    return None if options.no_graph_cache else _cached("graphs")


def trials_folder(options: argparse.Namespace) -> Path | None:
    """Return where measured trials are kept; None where there are to be none."""
    return None if options.no_trial else _cached("trials")


def _cached(name: str) -> Path | None:
    """Return a folder of the cache; None where a user has no place for any."""
    from onnxport.cli.cache import cache_folder_if_any

    folder = cache_folder_if_any()
    return folder and folder / name
