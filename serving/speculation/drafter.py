"""What guesses tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from onnxport.serving.request import Request


class Drafter(Protocol):
    """Guesses what follows; belongs to the engine's thread.

    A guess changes how fast tokens come and never which: the model checks each of them.
    """

    @property
    def is_cheap(self) -> bool:
        """Whether a guess takes next to no time, so that it may be made and not used."""
        ...

    def num_behind(self, request: Request) -> int:
        """Return how many tokens it has to compute before it can guess; 0 where it is cheap."""
        ...

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """Guess up to `lengths[i]` tokens that follow `requests[i].tokens`; fewer are fine.

        Changes no request. Raises what a model raises when its device fails; `forget` the requests
        then, and it can be asked again, unless the device is lost.
        """
        ...

    def forget(self, request: Request) -> None:
        """Let go of what is known of a request. Idempotent; it may be asked about it again."""
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...
