"""Measure onnxruntime-genai's Generator on the shared workloads.

    PEER_PYTHON -m benchmarks.peers.onnxruntime_genai MODEL --workloads W1,W2

MODEL is what its own model builder makes of the checkpoint (`python -m
onnxruntime_genai.models.builder -m CHECKPOINT -o MODEL -p int4 -e cpu`), or an onnxport artifact.
It batches statically: all prompts of a batch have one length here, since it pads on the right of
none. Its engine that batches continuously has no CPU kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai

from benchmarks import runner
from benchmarks.workloads import Request

LARGEST_BATCH = 32  # a Generator refuses more


class OnnxRuntimeGenAI:
    """One generator a batch."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        decoder = {"session_options": {"intra_op_num_threads": arguments.threads}}
        # Random checkpoints may have no end token, and `min_length` keeps this one from coming.
        ends = {"eos_token_id": 0, "pad_token_id": 0}
        config = genai.Config(arguments.model)
        config.overlay(json.dumps({"model": {"decoder": decoder, **ends}}))
        self._model = genai.Model(config)
        text = (Path(arguments.model) / "genai_config.json").read_text()
        self._context = json.loads(text)["model"]["context_length"]

    def run(self, requests: Sequence[Request]) -> runner.Times:
        """See `runner.Runner`."""
        if len({(len(request.prompt), request.new_tokens) for request in requests}) > 1:
            raise runner.Unsupported("its batches have one length")
        total = requests[0].total_tokens
        if len(requests) > LARGEST_BATCH:
            raise runner.Unsupported(f"its batches have {LARGEST_BATCH} rows at most")
        if total > self._context:
            raise runner.Unsupported(f"its context is {self._context} tokens")
        watch = runner.Stopwatch(len(requests))
        parameters = genai.GeneratorParams(self._model)
        parameters.set_search_options(
            max_length=total, min_length=total, batch_size=len(requests), do_sample=False
        )
        generator = genai.Generator(self._model, parameters)
        generator.append_tokens(np.array([request.prompt for request in requests], np.int32))
        for _ in range(requests[0].new_tokens):
            generator.generate_next_token()
            for index in range(len(requests)):
                watch.note(index)
        return watch.times


def main() -> None:
    arguments = runner.parser(__doc__).parse_args()
    runner.main(arguments, lambda: OnnxRuntimeGenAI(arguments))


if __name__ == "__main__":
    main()
