"""Measure transformers in bfloat16 on the shared workloads, on the CPU or a GPU.

    PEER_PYTHON -m benchmarks.peers.transformers_peer CHECKPOINT --workloads W1,W2 [--device cuda]

It batches statically: prompts are padded on the left to the longest, and the batch decodes until
its longest answer is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from benchmarks import runner
from benchmarks.workloads import Request


class Transformers:
    """A greedy loop over the model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(arguments.threads)
        self._model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
        self._device = torch.device(arguments.device)
        self._model.to(self._device).eval()

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> runner.Times:
        """See `runner.Runner`."""
        watch = runner.Stopwatch(len(requests))
        longest = max(len(request.prompt) for request in requests)
        pads = [longest - len(request.prompt) for request in requests]
        ids = torch.tensor(
            [[0] * pad + request.prompt for pad, request in zip(pads, requests, strict=True)],
            device=self._device,
        )
        mask = torch.tensor(
            [[0] * pad + [1] * (longest - pad) for pad in pads], device=self._device
        )
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = None
        for step in range(max(request.new_tokens for request in requests)):
            found = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = found.past_key_values
            ids = found.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            positions = positions[:, -1:] + 1
            if self._device.type != "cpu":
                torch.accelerator.synchronize()  # the tokens are there when the clock is read
            for index, request in enumerate(requests):
                if step < request.new_tokens:
                    watch.note(index)
        return watch.times


def main() -> None:
    parser = runner.parser(__doc__)
    parser.add_argument("--device", default="cpu", help="as PyTorch calls it")
    arguments = parser.parse_args()
    runner.main(arguments, lambda: Transformers(arguments))


if __name__ == "__main__":
    main()
