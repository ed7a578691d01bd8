"""What one step does: frozen data, which everything between planning and committing reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from onnxport.kv.table import Found
from onnxport.serving.request import Request
from onnxport.serving.shares import Turns

# Returns tokens that may follow some of the requests that decode, so many in all.
Guess = Callable[[Sequence[Request], int], Mapping[Request, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does; row `i` of the batch is `requests[i]`."""

    requests: tuple[Request, ...]
    # The first rows, which go on with one token, what they owe and drafts; prompts follow, which
    # alone start, or go on from what others have computed.
    num_decodes: int
    num_past: tuple[int, ...]  # tokens of each row that are in the cache, shared ones included
    num_new: tuple[int, ...]  # tokens of each row to compute, >= 1, drafts included
    num_logits: tuple[int, ...]  # last tokens of each row that logits are needed after
    num_new_columns: tuple[int, ...]  # blank columns of blocks that each row takes for them
    shared: Mapping[int, Found]  # row -> what is cached, that it goes on from
    copied: frozenset[int]  # rows that write to blocks which others own too, hence to copies
    sampled: tuple[int, ...]  # rows that reach their last token, and so sample the next one
    stopped: frozenset[int]  # rows that end where their state should be kept
    drafts: Mapping[int, tuple[int, ...]]  # row -> guessed tokens that are computed after its own
    preempted: tuple[Request, ...]  # running requests that give their blocks back
    turns: Mapping[int, Turns]  # priority -> how its tenants took turns

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_new)

    @property
    def num_drafted(self) -> int:
        """Those of them that are guessed."""
        return sum(map(len, self.drafts.values()))
