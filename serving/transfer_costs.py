"""Whether a K/V block is moved in less time than it is computed."""

from __future__ import annotations

MEMORY = 0.8  # weight of the past in a moving average
MEASURED_TOKENS = 16  # a step of fewer prompt tokens says little about what computing a block costs


class Costs:
    """What it takes to compute a block again, and to save and load it: measured, in seconds."""

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._num_groups = num_groups  # of layers, whose blocks are computed together
        self.token_s: float | None = None  # to compute one of a prompt, in a step of many
        self.move_s: float | None = None  # to save and load one block

    def note_step(self, seconds: float, num_tokens: int, num_decodes: int = 0) -> None:
        """A step took so long. Tokens of requests that decode are dearer than those of prompts.

        Args:
            seconds: without what moved blocks meanwhile.
            num_tokens: of the step.
            num_decodes: of them, guessed ones included; half of them at most, or the step says
                nothing.
        """
        if num_tokens - num_decodes >= max(MEASURED_TOKENS, num_decodes):
            self.token_s = _average(self.token_s, seconds / num_tokens)

    def note_move(self, seconds: float, num_blocks: int) -> None:
        """Moving `num_blocks` one way took `seconds`."""
        self.move_s = _average(self.move_s, 2 * seconds / num_blocks)

    @property
    def moving_is_cheaper(self) -> bool:
        """Whether a block is moved in less time than it is computed; True until both are known."""
        if self.token_s is None or self.move_s is None:
            return True
        return self.move_s * self._num_groups < self.token_s * self._block_size


def _average(past: float | None, value: float) -> float:
    return value if past is None else MEMORY * past + (1 - MEMORY) * value
