"""What a user may choose about the engine, apart from the model."""

from __future__ import annotations

from dataclasses import dataclass

from onnxport.errors import CapacityError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's limits, with vLLM's names.

    Attributes:
        max_num_seqs: most requests that run at once, that is rows of one step.
        max_num_batched_tokens: most tokens of one step, over all its rows. At least
            `max_num_seqs`: every running request decodes in every step, and a prefill beside
            them then gets `max_num_batched_tokens - max_num_seqs + 1` tokens or more.
        seed: makes the requests that bring no seed reproducible by order of arrival; None draws
            from the operating system.

    Raises:
        CapacityError: a limit is out of its range.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise CapacityError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise CapacityError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs "
                f"{self.max_num_seqs}: a step must have room for one token of every running "
                "request; raise the first or lower the second"
            )
