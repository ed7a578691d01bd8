"""What a step costs, and the clock that it moves."""

from __future__ import annotations

from dataclasses import dataclass


class VirtualClock:
    """The time in seconds, which passes only when somebody moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes: linear in what it does.

    The defaults fit Qwen2.5-0.5B's shape in int4 on the 2 cores of `benchmarks/RESULTS.md` (float32
    cache, 24 layers), as measured on 2026-11-21 with ONNX Runtime's own matrix product; ours has
    made decoding 1.2 to 1.8 and prompts 3 to 4 times faster since:

    * one row decodes in 17.7 ms (56.5 tok/s) and eight in 41.9 ms (191 tok/s), both at about 192
      tokens of context: a row and its token take 3.46 ms, and a step 14.2 ms before them;
    * a prompt of 128 tokens takes 288 ms (444 tok/s), which makes 2.13 ms a token;
    * one of 2,048 takes 5.09 s (402 tok/s) in four steps, 0.67 s more than its tokens and steps
      alone: 0.32 µs for each pair of a token and one before it;
    * the attention kernel reads 8,192 tokens in 283 µs a layer: 0.83 µs a token in 24 layers, of
      which 0.32 are the pair's.

    Moving a block of 16 tokens (384 KiB) was measured with `providers.blocks.HostBlocks` on a
    machine of the same kind: 0.43 ms out, 0.12 ms in.
    """

    step_s: float = 14.2e-3
    token_s: float = 2.13e-3  # each token computed
    row_s: float = 1.33e-3  # each sequence
    context_s: float = 0.51e-6  # each token of a sequence's context, read once a step
    pair_s: float = 0.32e-6  # each computed token times each token it attends to
    save_block_s: float = 0.43e-3
    load_block_s: float = 0.12e-3

    def seconds(self, tokens: int, rows: int, context: int, pairs: int) -> float:
        """How long a step takes.

        Args:
            tokens: computed in it.
            rows: sequences in it.
            context: sum of their lengths at the end of the step.
            pairs: sum over computed tokens of the tokens that they attend to.
        """
        return (
            self.step_s
            + self.token_s * tokens
            + self.row_s * rows
            + self.context_s * context
            + self.pair_s * pairs
        )

    def most_seconds(self, tokens: int, rows: int, longest: int) -> float:
        """What no step of so many tokens and rows exceeds, if no sequence is over `longest`."""
        return self.seconds(tokens, rows, rows * longest, tokens * longest)
