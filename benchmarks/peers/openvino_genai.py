"""Measure OpenVINO GenAI's continuous batching on the shared workloads.

    PEER_PYTHON -m benchmarks.peers.openvino_genai MODEL_IR --workloads W1,W2

MODEL_IR is the checkpoint converted by optimum-intel (`optimum-cli export openvino
--weight-format int4 --group-size 128 --sym --ratio 1.0`), with a converted tokenizer beside it.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.workloads import WORKLOADS, Workload, summary


def measure(pipeline: genai.ContinuousBatchingPipeline, workload: Workload) -> dict[str, float]:
    config = genai.GenerationConfig()
    config.max_new_tokens = workload.new_tokens
    config.min_new_tokens = workload.new_tokens
    config.ignore_eos = True
    config.eos_token_id = 0  # never read, but random checkpoints have none and it must be valid
    config.stop_token_ids = {0}
    start = time.perf_counter()
    handles = [
        pipeline.add_request(index, openvino.Tensor(np.array([ids], np.int64)), config)
        for index, ids in enumerate(workload.prompts())
    ]
    first = [0.0] * len(handles)
    finished = [0.0] * len(handles)
    counts = [0] * len(handles)
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter() - start
        for index, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    counts[index] += len(output.generated_ids)
            if counts[index] and not first[index]:
                first[index] = now
            if counts[index] >= workload.new_tokens and not finished[index]:
                finished[index] = now
    assert all(count == workload.new_tokens for count in counts), counts
    return summary(workload, first, finished)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--workloads", default="W1,W2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--prefix-caching", action="store_true")
    arguments = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = arguments.prefix_caching
    pipeline = genai.ContinuousBatchingPipeline(
        arguments.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": arguments.threads}
    )
    measure(pipeline, Workload(streams=1, prompt_tokens=128, new_tokens=4))
    for _ in range(arguments.repeat):
        for name in arguments.workloads.split(","):
            figures = measure(pipeline, WORKLOADS[name])
            figures["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps({"workload": name, **figures}), flush=True)


if __name__ == "__main__":
    main()
