"""Measure OpenVINO GenAI's continuous batching on the shared workloads.

    PEER_PYTHON -m benchmarks.peers.openvino_genai MODEL_IR --workloads W1,W2

MODEL_IR is the checkpoint converted by optimum-intel (`optimum-cli export openvino
--weight-format int4 --group-size 128 --sym --ratio 1.0`), with a converted tokenizer beside it.
Its head and embedding are int8.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks import runner
from benchmarks.workloads import Request

BLOCK_SIZE = 32  # of the CPU plugin


class OpenVinoGenAI:
    """The pipeline that batches continuously, with prefix caching."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = runner.cache_tokens(arguments, BLOCK_SIZE) // BLOCK_SIZE
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = arguments.prefix_caching
        options = {"INFERENCE_NUM_THREADS": arguments.threads}
        self._pipeline = genai.ContinuousBatchingPipeline(
            arguments.model, scheduler, "CPU", options
        )
        self._numbers = 0

    def run(self, requests: Sequence[Request]) -> runner.Times:
        """See `runner.Runner`."""
        watch = runner.Stopwatch(len(requests))
        handles = [self._add(request) for request in requests]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        watch.note(index, len(output.generated_ids))
        return watch.times

    def _add(self, request: Request) -> genai.GenerationHandle:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request.new_tokens
        config.ignore_eos = True
        config.eos_token_id = 0  # never read, but random checkpoints have none and it must be valid
        config.stop_token_ids = {0}
        ids = openvino.Tensor(np.array([request.prompt], np.int64))
        self._numbers += 1
        return self._pipeline.add_request(self._numbers, ids, config)


def main() -> None:
    parser = runner.parser(__doc__)
    parser.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    runner.main(arguments, lambda: OpenVinoGenAI(arguments))


if __name__ == "__main__":
    main()
