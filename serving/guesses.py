"""What the engine asks of whoever guesses tokens ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from onnxport.serving.request import Request
from onnxport.serving.stats import SpeculationCounters


class Guesses(Protocol):
    """Guesses what the model is going to say; the model checks it, so a guess changes no output.

    Belongs to the engine's thread. Nothing here may raise because of a device.
    """

    @property
    def counters(self) -> SpeculationCounters:
        """What was guessed so far, and how much of it was right."""
        ...

    def propose(self, requests: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        """Return tokens that may follow those of some requests; none where it does not pay.

        Args:
            requests: those that decode in the next step.
            budget: most tokens that can be checked in it, over all of them.
        """
        ...

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """So many guessed tokens were checked, and the first `num_accepted` of them were right."""
        ...

    def note_step(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """A step without prompts took so long, the guessing left out."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...
