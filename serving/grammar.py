"""What the engine asks of a grammar that the output of a sequence has to follow."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import OnnxportError
from onnxport.serving.outputs import Failure


class GrammarError(OnnxportError):
    """A grammar reached a limit in the middle of a text: it asks for too much."""


class ForbiddenTokenError(OnnxportError):
    """A grammar got a token that it forbids: its mask was not kept to, which is a fault of ours."""


def failure_of(error: Exception) -> Failure:
    """Return why a sequence ends that a step could not go on with."""
    if isinstance(error, GrammarError):
        message = f"the grammar of the request failed: {error}; make it simpler"
        return Failure(message, refused=True)
    if isinstance(error, ForbiddenTokenError):
        return Failure(f"internal error: {error}. The request is not to blame; please report this")
    return Failure.of(error)


class Grammar(Protocol):
    """Where one sequence stands in its grammar.

    It reads nothing but the tokens it is given, those of the output once each as they come, so
    preemption, batches and rejected drafts leave no trace in it. One thread at a time.
    """

    def fork(self) -> Grammar:
        """Return one that has read the same tokens, and goes on on its own."""
        ...

    def masks(self, tokens: array[int], draft: Sequence[int] = ()) -> NDArray[np.uint32]:
        """Return which tokens may come next, after `tokens` and after each token of `draft`.

        Args:
            tokens: the prompt and the output so far; those of the call before, and more.
            draft: tokens that may follow, all of them possible, see `num_possible`.

        Returns:
            uint32 [1 + len(draft), ceil(vocab / 32)], memory that the next call may overwrite: bit
            i % 32 of word i // 32 is set where token i may come.
        """
        ...

    def num_possible(self, tokens: array[int], draft: Sequence[int]) -> int:
        """Return how many of the first tokens of `draft` may follow `tokens`."""
        ...

    def forced(self, tokens: array[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that spell what has to follow `tokens`; none where it is open.

        They are possible, and seldom the only ones that are: the same text may be cut otherwise.
        """
        ...

    def is_complete(self, tokens: array[int]) -> bool:
        """Whether the output is whole and nothing may follow it but an end token."""
        ...
