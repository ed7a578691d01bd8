"""Measure llama.cpp through llama-cpp-python on the shared workloads.

    PEER_PYTHON -m benchmarks.peers.llama_cpp MODEL.gguf --workloads W1,W2

MODEL.gguf is what `benchmarks/make_gguf.py` makes of the checkpoint. All requests are batched
continuously here, as llama.cpp's server does: a token of each that decodes, and prompts beside
them up to 512 tokens a step. Each sequence computes the whole of its prompt, for llama.cpp's
server reuses a prefix within one slot alone.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp as llama
import numpy as np

from benchmarks import runner
from benchmarks.workloads import Request

BATCH_TOKENS = 512


@dataclass(slots=True)
class Stream:
    """A request while it runs."""

    number: int  # llama.cpp's name for it
    tokens: list[int]
    total_tokens: int
    computed: int = 0

    @property
    def done(self) -> bool:
        """Whether all its tokens are there."""
        return len(self.tokens) >= self.total_tokens


class LlamaCpp:
    """A context for as many sequences as the workload has."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._threads = arguments.threads
        self._quiet = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        options = llama.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(arguments.model.encode(), options)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {arguments.model}")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def run(self, requests: Sequence[Request]) -> runner.Times:
        """See `runner.Runner`."""
        context = self._context(requests)
        batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)
        watch = runner.Stopwatch(len(requests))
        running = [
            Stream(index, list(request.prompt), request.total_tokens)
            for index, request in enumerate(requests)
        ]
        try:
            while running:
                for sequence in self._step(context, batch, running):
                    watch.note(sequence.number)
                running = [sequence for sequence in running if not sequence.done]
        finally:
            llama.llama_batch_free(batch)
            llama.llama_free(context)
        return watch.times

    def _context(self, requests: Sequence[Request]) -> llama.llama_context_p:
        options = llama.llama_context_default_params()
        # Each sequence has a cache of its own: in one for all, each would look at the keys of all,
        # which takes a third longer with 32.
        longest = max(request.total_tokens for request in requests) + 32
        options.n_ctx = len(requests) * longest
        options.n_seq_max = len(requests)
        options.n_batch = options.n_ubatch = BATCH_TOKENS
        options.n_threads = options.n_threads_batch = self._threads
        options.kv_unified = False
        options.swa_full = False  # layers with a window keep that alone, as its server has it
        return llama.llama_init_from_model(self._model, options)

    def _step(
        self, context: llama.llama_context_p, batch: llama.llama_batch, running: list[Stream]
    ) -> list[Stream]:
        """Compute a batch; returns the sequences that got a token."""
        batch.n_tokens = 0
        sampled: list[tuple[Stream, int]] = []
        # Who decodes goes first, and prompts take what is left.
        for sequence in sorted(running, key=lambda one: len(one.tokens) - one.computed > 1):
            room = BATCH_TOKENS - batch.n_tokens
            end = min(len(sequence.tokens), sequence.computed + room)
            for position in range(sequence.computed, end):
                _add(batch, sequence, position)
            if end == len(sequence.tokens) and end > sequence.computed:
                sampled.append((sequence, batch.n_tokens - 1))
            sequence.computed = end
        if code := llama.llama_decode(context, batch):
            raise SystemExit(f"llama_decode returned {code}")
        for sequence, row in sampled:
            logits = llama.llama_get_logits_ith(context, row)
            found = np.ctypeslib.as_array(logits, (self._vocab_size,))
            sequence.tokens.append(int(found.argmax()))
        return [sequence for sequence, _ in sampled]


def _add(batch: llama.llama_batch, sequence: Stream, position: int) -> None:
    row = batch.n_tokens
    batch.token[row] = sequence.tokens[position]
    batch.pos[row] = position
    batch.n_seq_id[row] = 1
    batch.seq_id[row][0] = sequence.number
    batch.logits[row] = position == len(sequence.tokens) - 1
    batch.n_tokens += 1


def main() -> None:
    arguments = runner.parser(__doc__).parse_args()
    runner.main(arguments, lambda: LlamaCpp(arguments))


if __name__ == "__main__":
    main()
