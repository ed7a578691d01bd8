"""Options of the engine: batching, queue, prefix cache, speculation and embeddings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from onnxport.cli.values import dimensions, positive, size
from onnxport.errors import CapacityError
from onnxport.graphs.embedding_spec import POOLINGS
from onnxport.serving.config import EngineConfig, Preemption, SchedulingPolicy
from onnxport.serving.speculation.config import SpeculationConfig

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


def add_score_template(parser: argparse.ArgumentParser) -> None:
    """Add how pairs are written."""
    parser.add_argument(
        "--score-template",
        type=Path,
        metavar="FILE",
        help="how pairs of texts are written for a model that judges them, in Jinja (as the "
        "artifact has it)",
    )


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
