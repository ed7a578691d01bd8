"""Measure onnxport on the shared workloads; see `benchmarks/runner.py` for what it prints.

python -m benchmarks.run_onnxport ARTIFACT --workloads W1,W2 --threads 2
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import runner
from benchmarks.workloads import Request
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import HOSTS
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.loading import open_engine
from onnxport.serving.params import SamplingParams

HOST_BLOCK = 64  # tokens of a KV block, at most
DEVICE_BLOCK = 256


class Onnxport:
    """The engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = 0

    def run(self, requests: Sequence[Request]) -> runner.Times:
        """See `runner.Runner`."""
        watch = runner.Stopwatch(len(requests))
        place = {}
        for index, request in enumerate(requests):
            params = SamplingParams(temperature=0, max_tokens=request.new_tokens, ignore_eos=True)
            self._numbers += 1
            place[str(self._numbers)] = index
            self._engine.submit(self._engine.prepare(str(self._numbers), request.prompt, params))
        while self._engine.has_work:
            for delta in self._engine.step():
                assert delta.finish_reason in (None, "length"), delta.error
                watch.note(place[delta.request_id], len(delta.token_ids))
        return watch.times


def load(arguments: argparse.Namespace) -> Onnxport:
    block_tokens = HOST_BLOCK if arguments.provider in HOSTS else DEVICE_BLOCK
    tokens = arguments.kv_cache_tokens or runner.cache_tokens(arguments, block_tokens)
    engine = open_engine(
        Path(arguments.model),
        arguments.provider,
        LoadOptions(
            threads=arguments.threads,
            kv_cache_tokens=tokens,
            max_model_len=max(arguments.max_model_len, runner.longest(arguments)),
            kv_cache_dtype=arguments.kv_cache_dtype,
            graph_cache=arguments.graph_cache,
            coarse_head=not arguments.no_coarse_head,
            hybrid_kv_cache=not arguments.no_hybrid_kv_cache,
        ),
        EngineConfig(
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            enable_prefix_caching=arguments.enable_prefix_caching,
            preemption=arguments.preemption,
            kv_host_memory=arguments.kv_host_memory,
            kv_disk=arguments.kv_disk,
        ),
        needs_tokenizer=False,
    )
    return Onnxport(engine)


def main() -> None:
    parser = runner.parser(__doc__)
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-cache-tokens", type=int, help="what the workloads need")
    parser.add_argument("--max-model-len", type=int, default=0, help="at least; what they need")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--kv-host-memory", type=int, default=0, help="bytes")
    parser.add_argument("--kv-disk", type=Path)
    parser.add_argument(
        "--graph-cache",
        type=Path,
        default=Path.home() / ".cache" / "onnxport" / "graphs",
        help="lowered graphs of earlier starts; the commands keep them there, too",
    )
    parser.add_argument(
        "--no-coarse-head", action="store_true", help="read all of the head in every step"
    )
    parser.add_argument(
        "--no-hybrid-kv-cache", action="store_true", help="keep all K/V behind sliding windows"
    )
    parser.add_argument("--preemption", choices=("auto", "recompute", "swap"), default="auto")
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    arguments = parser.parse_args()
    own = Artifact.read(Path(arguments.model)).manifest.model.context_length
    arguments.context_tokens = min(own, arguments.context_tokens or own)
    runner.main(arguments, lambda: load(arguments))


if __name__ == "__main__":
    main()
