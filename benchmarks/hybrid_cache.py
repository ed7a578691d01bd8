"""How many sequences a KV cache holds when layers with a window give up what is behind it.

    python -m benchmarks.hybrid_cache ARTIFACT --kv-memory 256MiB --prompt 2048 --new 128

Requests that arrive at once run in a cache of one size, by turns with block tables of their own
for the layers with a window, and without; each time in a process of its own, for both would share
its memory. Tokens must be the same. With one request, and `--max-model-len` beyond the window, it
shows what more tables cost a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from onnxport.cli.values import size
from onnxport.providers import memory
from onnxport.providers.base import LoadOptions
from onnxport.serving.config import EngineConfig
from onnxport.serving.events import RequestEvent, StepRecord
from onnxport.serving.loading import open_engine
from onnxport.serving.params import SamplingParams


class Watch:
    """Counts what the steps do."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_request(self, event: RequestEvent) -> None:
        """See `serving.events`."""

    def on_step(self, record: StepRecord) -> None:
        """See `serving.events`."""
        self.steps.append(record)


def measure(arguments: argparse.Namespace, *, hybrid: bool) -> dict[str, Any]:
    """Run the requests once; figures and all tokens."""
    longest = arguments.max_model_len or arguments.prompt + arguments.new
    engine = open_engine(
        arguments.artifact,
        "cpu",
        LoadOptions(
            threads=arguments.threads,
            kv_memory=arguments.kv_memory,
            max_model_len=longest,
            hybrid_kv_cache=hybrid,
        ),
        EngineConfig(max_num_seqs=arguments.requests, enable_prefix_caching=False),
        needs_tokenizer=False,
    )
    watch = Watch()
    engine.add_listener(watch)
    params = SamplingParams(temperature=0, max_tokens=arguments.new, ignore_eos=True)
    for number in range(arguments.requests):
        prompt = [(position * 31 + number * 977) % 1000 for position in range(arguments.prompt)]
        engine.submit(engine.prepare(str(number), prompt, params))
    tokens: dict[str, list[int]] = {}
    start_s = time.perf_counter()
    while engine.has_work:
        for delta in engine.step():
            assert delta.finish_reason in (None, "length"), delta.error
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    wall_s = time.perf_counter() - start_s
    decodes = [one.end_s - one.start_s for one in watch.steps if one.num_tokens == one.num_rows]
    found = {
        "blocks": engine.capabilities.num_blocks,
        "preemptions": engine.stats().num_preemptions,
        "rows": max(one.num_rows for one in watch.steps),
        "output_tok_s": arguments.requests * arguments.new / wall_s,
        "decode_step_ms": 1e3 * median(decodes),
        "peak_rss_mib": (memory.peak_bytes() or 0) / 1024**2,
        "tokens": tokens,
    }
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--kv-memory", type=size, default=256 << 20)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each")
    parser.add_argument("--new", type=int, default=128, help="tokens of each")
    parser.add_argument("--max-model-len", type=int, help="what the requests need")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--side", choices=("hybrid", "plain"), help="run one, and print JSON")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(measure(arguments, hybrid=arguments.side == "hybrid")))
        return
    tokens = None
    for number in range(arguments.rounds):
        runs = {}
        for side in ("hybrid", "plain") if number % 2 == 0 else ("plain", "hybrid"):
            command = [sys.executable, "-m", "benchmarks.hybrid_cache", *sys.argv[1:]]
            done = subprocess.run([*command, "--side", side], stdout=subprocess.PIPE, check=True)
            runs[side] = json.loads(done.stdout)
            found = runs[side].pop("tokens")
            tokens = tokens or found
            assert found == tokens, "the tokens depend on the cache"
        for figure, value in runs["hybrid"].items():
            print(f"{figure:>16} {value:10.5g} {runs['plain'][figure]:10.5g}")
        print(flush=True)


if __name__ == "__main__":
    main()
