"""Options that several commands share, and the objects they become."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from onnxport.cli.values import memory, positive, reasoning_parser, size
from onnxport.errors import CapacityError, RequestError
from onnxport.graphs.embedding_spec import POOLINGS, Dimensions
from onnxport.serving.config import EngineConfig, Preemption, SchedulingPolicy
from onnxport.serving.speculation.config import SpeculationConfig

if TYPE_CHECKING:
    from onnxport.providers.base import LoadOptions
    from onnxport.serving.structured.spec import StructuredOutputs

Commands = argparse._SubParsersAction  # what `add_subparsers` returns; it has no public name
PRECISIONS = ("int4", "int8", "fp16", "fp32")
DEFINES = "::="  # in every grammar of GBNF
DTYPES = ("auto", "float32", "float16", "bfloat16")
ENGINE_OPTIONS = (  # named as the fields of EngineConfig
    "max_num_seqs",
    "max_num_batched_tokens",
    "seed",
    "max_queued_requests",
    "scheduling_policy",
    "enable_prefix_caching",
    "preemption",
    "kv_host_memory",
    "kv_disk",
    "kv_disk_bytes",
    "speculation",
    "max_host_adapters",
    "max_logprobs",
    "logprobs_mode",
    "embeddings",
    "pooling",
    "matryoshka_dimensions",
    "score_template",
)
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


def token_list(text: str) -> tuple[str, ...]:
    """Return tokens that are separated by commas."""
    found = tuple(text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of tokens, such as no,yes")
    return found


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


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the limits of continuous batching."""
    group = parser.add_argument_group("batching")
    group.add_argument(
        "--max-num-seqs", type=positive, metavar="N", help="most requests that run at once"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=positive, metavar="N", help="most tokens in one step"
    )
    group.add_argument(
        "--preemption",
        choices=get_args(Preemption),
        help="of a request that has to make room: compute its K/V again, swap it to host memory, "
        "or what is faster (auto)",
    )


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """Add what becomes of K/V that may be used again."""
    group = parser.add_argument_group("prefix cache")
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse the K/V of tokens that another request has computed (on)",
    )
    group.add_argument(
        "--kv-host-memory",
        type=size,
        metavar="SIZE",
        help="host memory for K/V that leaves the cache, such as 8GiB (0)",
    )
    group.add_argument(
        "--kv-disk", type=Path, metavar="DIR", help="folder for K/V, kept between runs (none)"
    )
    group.add_argument(
        "--kv-disk-size",
        type=size,
        metavar="SIZE",
        dest="kv_disk_bytes",
        help="most that the folder may hold (16GiB)",
    )


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Add how tokens are guessed ahead."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        dest="speculation",
        help="guess tokens ahead, for the model to check several at once, which changes none: "
        """'{"method": "ngram", "num_speculative_tokens": 5}', '{"method": "suffix"}' (also by """
        """earlier answers), '{"method": "grammar"}', """
        """'{"method": "draft_model", "model": "ARTIFACT"}', eagle3 with a head's, or """
        """'{"method": "mtp"}', of a model that was exported with --mtp (none)""",
    )


def add_embedding_options(parser: argparse.ArgumentParser, *, is_choice: bool = True) -> None:
    """Add how texts are embedded, and if that `is_choice` whether."""
    group = parser.add_argument_group("embeddings")
    if is_choice:
        group.add_argument(
            "--embeddings",
            action=argparse.BooleanOptionalAction,
            help="embed texts, too, for /v1/embeddings (on where the checkpoint is made for that)",
        )
    parser.set_defaults(embeddings=None if is_choice else True)
    group.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="what a vector is made of: what the model makes of the last token, or the mean of all "
        "(as the checkpoint says; else last)",
    )
    group.add_argument(
        "--matryoshka-dimensions",
        type=dimensions,
        metavar="N,N",
        help="vectors may be cut to so many numbers; any: to all (as the checkpoint says)",
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


def add_score_template(parser: argparse.ArgumentParser) -> None:
    """Add how pairs are written."""
    parser.add_argument(
        "--score-template",
        type=Path,
        metavar="FILE",
        help="how pairs of texts are written for a model that judges them, in Jinja (as the "
        "artifact has it)",
    )


def dimensions(text: str) -> Dimensions:
    """Return what vectors may be cut to."""
    if text == "any":
        return "any"
    with suppress(ValueError):
        found = tuple(int(part) for part in text.split(","))
        if min(found) > 0:
            return found
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a list of numbers above 0, such as 256,512, nor any"
    )


def add_queue_options(parser: argparse.ArgumentParser) -> None:
    """Add how requests wait."""
    group = parser.add_argument_group("queue")
    group.add_argument(
        "--max-queued-requests",
        type=positive,
        metavar="N",
        help="most requests that wait; one more is answered 429 (1024)",
    )
    group.add_argument(
        "--scheduling-policy",
        choices=get_args(SchedulingPolicy),
        help="by arrival (fcfs, default), by the field priority, or fair between the tenants",
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


def add_structure_options(parser: argparse.ArgumentParser) -> None:
    """Add what form the text has to have."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema",
        "--json-schema-file",
        metavar="FILE|JSON",
        help="the text is JSON that this schema describes",
    )
    group.add_argument("--regex", help="the text matches this regular expression")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="the text is one of these; repeatable"
    )
    group.add_argument(
        "--grammar",
        "--grammar-file",
        metavar="FILE|GBNF",
        help="the text follows this grammar, in Lark's form or GBNF, which may be given itself",
    )


def structured_outputs(options: argparse.Namespace) -> StructuredOutputs | None:
    """Return the form that the text has to have; None: any.

    Raises:
        RequestError: the form is not valid, or its file cannot be read.
    """
    from onnxport.serving.structured.spec import StructuredOutputs

    if (schema := options.json_schema) is not None:
        if not schema.lstrip().startswith("{"):
            schema = text_of("--json-schema", Path(schema))
        return StructuredOutputs(json=schema)
    if options.regex is not None:
        return StructuredOutputs(regex=options.regex)
    if options.choice is not None:
        return StructuredOutputs(choice=tuple(options.choice))
    if (grammar := options.grammar) is not None:
        if DEFINES not in grammar:
            grammar = text_of("--grammar", Path(grammar))
        return StructuredOutputs(grammar=grammar)
    return None


def text_of(option: str, path: Path) -> str:
    """Return the text of a file; raises RequestError if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} names {path}, which cannot be read: {error}") from error


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


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine's limits: what was given, and its own defaults for the rest.

    Raises:
        CapacityError: two options contradict each other.
    """
    given = {name: getattr(options, name, None) for name in ENGINE_OPTIONS}
    if given["seed"] == -1:  # any, as in SamplingParams
        given["seed"] = None
    if given["kv_disk_bytes"] is not None and given["kv_disk"] is None:
        raise CapacityError(
            "--kv-disk-size was given without --kv-disk; name the folder, or leave the size out"
        )
    if given["speculation"] is not None:
        given["speculation"] = SpeculationConfig.parse(given["speculation"])
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})
