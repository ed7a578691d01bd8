"""Measure onnxport on the shared workloads; prints one JSON object a repetition.

python -m benchmarks.run_onnxport ARTIFACT --workloads W1,W2 --threads 2
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

from benchmarks.workloads import WORKLOADS, summary
from onnxport import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact")
    parser.add_argument("--workloads", default="W1,W2")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-cache-tokens", type=int, default=24_576)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--kv-host-memory", type=int, default=0, help="bytes")
    parser.add_argument("--kv-disk", type=Path)
    parser.add_argument("--preemption", choices=("auto", "recompute", "swap"), default="auto")
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True
    )
    arguments = parser.parse_args()
    with LLM(
        arguments.artifact,
        provider=arguments.provider,
        threads=arguments.threads,
        kv_cache_tokens=arguments.kv_cache_tokens,
        max_model_len=4096,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        kv_cache_dtype=arguments.kv_cache_dtype,
        enable_prefix_caching=arguments.enable_prefix_caching,
        preemption=arguments.preemption,
        kv_host_memory=arguments.kv_host_memory,
        kv_disk=arguments.kv_disk,
    ) as llm:
        warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([{"prompt_token_ids": WORKLOADS["W1"].prompts(9)[0]}], warm)
        for _ in range(arguments.repeat):
            for name in arguments.workloads.split(","):
                workload = WORKLOADS[name]
                params = SamplingParams(
                    temperature=0, max_tokens=workload.new_tokens, ignore_eos=True
                )
                prompts = [{"prompt_token_ids": ids} for ids in workload.prompts()]
                outputs = llm.generate(prompts, params)
                start = min(output.metrics.arrival_time_s for output in outputs)
                figures = summary(
                    workload,
                    [(output.metrics.first_token_time_s or 0) - start for output in outputs],
                    [(output.metrics.finished_time_s or 0) - start for output in outputs],
                )
                stats = llm.stats()
                figures["cached_tokens"] = sum(output.num_cached_tokens for output in outputs)
                figures["preemptions"] = stats.num_preemptions
                figures["blocks_loaded"] = stats.num_blocks_loaded
                figures["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(json.dumps({"workload": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
