"""The draft that a step plan grows from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from onnxport.kv.pool import BlockPool
from onnxport.kv.table import NOTHING, Found, blocks_for
from onnxport.serving.request import Request
from onnxport.serving.shares import Turns
from onnxport.serving.step_plan import StepPlan

# Tokens of a prompt that a step computes where log probabilities of them are wanted: each needs a
# row of logits, which are 0.6 MB for a vocabulary of 152k.
MOST_SCORED = 128
# Of the logits of guessed tokens in a step, a row each: 440 rows of a vocabulary of 152k. No memory
# plan counts them; the rows of 256 sequences that decode take 156 MB anyway.
MOST_DRAFTED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a step may compute of a prompt: who parts from it there, two keys tell.

    Attributes:
        lead: the prompt.
        passed: the first block at whose end it may still stop.
        passed_key: of that block; None: there is none.
        behind: the first block that it does not come to the end of.
        behind_key: of that block; None: there is none.
    """

    lead: Request
    passed: int
    passed_key: bytes | None
    behind: int
    behind_key: bytes | None


def most_drafted(vocab_size: int) -> int:
    """How many guessed tokens a step may check, so that their logits find room, float32."""
    return max(1, MOST_DRAFTED_BYTES // (4 * vocab_size))


def fit_chunk(
    num_past: int, pending: int, budget: int, held: int, free: int, block_size: int
) -> int:
    """How many of `pending` tokens fit both the token budget and the columns, held and free."""
    room = (held + free) * block_size - num_past
    return min(pending, budget, room)


class Draft:
    """A plan being made: columns that grow and numbers that count down; no request is touched.

    Attributes:
        budget: tokens that are left.
        rows: rows that are left.
        free: blocks that are left; those that preempted requests give back are counted.
        claimed: blocks that prompts which have begun have still to take, of those left. Of a long
            chunk they may take more for a while, which is given up behind the window.
        closed: whether no waiting request may start in this step any more.
        drafts: row -> guessed tokens that are computed after its own.
        found: what is cached that prompts can go on from.
        stops: after how many tokens the states of prompts should be kept.
        ahead: prompts that were looked up, and wait for no state that another one comes by, by what
            they begin with; only where there are states.
        awaited: by what they begin with, keys of blocks at whose ends others stop for prompts that
            wait, and the blocks' numbers; only where there are states.
        leading: keys of the blocks that are being computed, and by whom.
        prompt_budget: tokens that prompts have in all, at least one.
        starting: waiting requests that have their rows and blocks, if not always tokens yet.
        upcoming: waiting requests that prompts may still be made to stop for, in order; None: not
            looked for yet.
    """

    __slots__ = (
        "_copies_of",
        "_dropped",
        "_groups",
        "_opened",
        "_pool",
        "_taken",
        "ahead",
        "awaited",
        "budget",
        "claimed",
        "closed",
        "copied",
        "drafts",
        "found",
        "free",
        "leading",
        "num_decodes",
        "num_new",
        "num_new_columns",
        "num_past",
        "preempted",
        "prompt_budget",
        "requests",
        "rows",
        "shared",
        "starting",
        "stops",
        "turns",
        "upcoming",
        "yielding",
    )

    def __init__(self, pool: BlockPool, budget_tokens: int, rows: int) -> None:
        self._pool = pool
        self._groups = pool.groups
        self._taken: set[int] = set()  # free blocks that rows go on from
        self._dropped: dict[int, int] = {}  # block -> owners that are preempted
        # Block of the first group -> rows that write to a copy of its column.
        self._copies_of: dict[int, int] = {}
        self.budget = budget_tokens
        self.rows = rows
        self.free = pool.num_free
        self.claimed = 0
        self.closed = False
        self.drafts: dict[int, tuple[int, ...]] = {}
        self.found: dict[Request, Found] = {}
        self.stops: dict[Request, tuple[int, ...]] = {}
        self.ahead: dict[bytes, list[Request]] = {}
        self.awaited: dict[bytes, dict[bytes, int]] = {}
        self.prompt_budget = max(1, budget_tokens)
        self.upcoming: deque[Request] | None = None
        self._opened: dict[Request, int] = {}  # prompt -> row
        self.leading: dict[bytes, Request] = {}
        self.starting: set[Request] = set()
        self.requests: list[Request] = []
        self.num_decodes = 0
        self.num_past: list[int] = []
        self.num_new: list[int] = []
        self.num_new_columns: list[int] = []
        self.shared: dict[int, Found] = {}
        self.copied: set[int] = set()
        self.preempted: list[Request] = []
        self.yielding: set[Request] = set()
        self.turns: dict[int, Turns] = {}

    def add_decode(
        self, request: Request, num_columns: int, *, copies: bool, num_new: int = 1
    ) -> None:
        """Add a row that goes on with its last token, behind those that it owes.

        Args:
            request: the one.
            num_columns: columns that it takes, with one for a copy.
            copies: whether it writes to a copy.
            num_new: tokens that it computes.
        """
        if copies:
            self.copied.add(len(self.requests))
            last = request.table.blocks[-1]
            self._copies_of[last] = self._copies_of.get(last, 0) + 1
        self.requests.append(request)
        self.num_past.append(request.num_computed_tokens)
        self.num_new.append(num_new)
        self.num_new_columns.append(num_columns - copies)
        self.num_decodes += 1
        self.budget -= num_new
        self.free -= num_columns * len(self._groups)

    def due(self) -> list[Request]:
        """The requests that decode and reach their last tokens."""
        rows = zip(self.requests[: self.num_decodes], self.num_past, self.num_new, strict=False)
        return [request for request, past, new in rows if past + new == len(request.tokens)]

    def add_draft(self, row: int, tokens: Sequence[int]) -> None:
        """Let a row that decodes compute guessed tokens too, as far as budget and blocks go.

        Blocks that prompts have still to take are not touched.
        """
        held = len(self.requests[row].table) + self.num_new_columns[row]
        end = self.num_past[row] + self.num_new[row]
        free = max(0, self.free - self.claimed) // len(self._groups)
        block_size = self._pool.block_size
        taken = fit_chunk(end, len(tokens), self.budget, held, free, block_size)
        if taken <= 0:
            return
        num_columns = max(0, blocks_for(end + taken, block_size) - held)
        self.drafts[row] = tuple(tokens[:taken])
        self.num_new[row] += taken
        self.num_new_columns[row] += num_columns
        self.budget -= taken
        self.free -= num_columns * len(self._groups)

    def must_copy(self, block: int, num_more: int = 0) -> bool:
        """Whether a row that writes to the column of `block` would write to somebody else's.

        A column that is not full has as many owners in every group as in the first one.

        Args:
            block: of the first group.
            num_more: owners that give it up besides.
        """
        given_up = num_more + self._copies_of.get(block, 0) + self._dropped.get(block, 0)
        return self._pool.ref_count(block) - given_up > 1

    def missing(self, request: Request, num_tokens: int) -> int:
        """How many columns a request lacks for so many tokens."""
        return blocks_for(num_tokens, self._pool.block_size) - len(request.table)

    def columns_for(self, requests: Sequence[Request]) -> int:
        """How many columns rows that decode take, copies included, one after the other."""
        total = 0
        copies: dict[int, int] = {}
        for request in requests:
            blocks = request.table.blocks
            total += self.missing(request, len(request.tokens))
            if request.num_computed_tokens == len(blocks) * self._pool.block_size:
                continue
            if request.forked and self.must_copy(blocks[-1], copies.get(blocks[-1], 0)):
                copies[blocks[-1]] = copies.get(blocks[-1], 0) + 1
                total += 1
        return total

    def open(self, request: Request, num_past: int, shared: Found) -> int:
        """Add a row that goes on after `num_past` tokens, by way of `shared`; returns its number.

        The blocks are taken already, and `extend` has to give it tokens.
        """
        row = len(self.requests)
        if shared:
            self.shared[row] = shared
        self._opened[request] = row
        self.requests.append(request)
        self.num_past.append(num_past)
        self.num_new.append(0)
        self.num_new_columns.append(0)
        return row

    def extend(self, row: int, budget: int) -> int:
        """Give a row up to `budget` more tokens and the blocks for them; returns how many.

        It ends where its state should be kept, or its adapter begins, and gets no more in this
        step then.
        """
        request = self.requests[row]
        block_size = self._pool.block_size
        num_past = self.num_past[row] + self.num_new[row]
        left = len(request.tokens) - num_past
        if request.scores_missing:
            left = min(left, MOST_SCORED - self.num_new[row])
        for stop in self._ends(request):
            if self.num_past[row] < stop and num_past <= stop:
                left = min(left, stop - num_past)
        shared = self.shared.get(row, NOTHING)
        held = len(request.table) + len(shared) + self.num_new_columns[row]
        claim = self.pending(request, shared, self.num_new_columns[row])
        free = self.free // len(self._groups)
        taken = fit_chunk(num_past, left, budget, held, free, block_size)
        num_columns = max(0, blocks_for(num_past + taken, block_size) - held)
        self.num_new[row] += taken
        self.num_new_columns[row] += num_columns
        self.budget -= taken
        self.free -= num_columns * len(self._groups)
        self.claimed += self.pending(request, shared, self.num_new_columns[row]) - claim
        return taken

    def start(self, request: Request) -> int:
        """How many tokens of a prompt that was looked up are in the cache."""
        return request.num_computed_tokens + len(self.found[request]) * self._pool.block_size

    def end(self, request: Request) -> int:
        """How many tokens of a prompt are in the cache after the step, as far as it is planned."""
        row = self._opened.get(request)
        return self.start(request) if row is None else self.num_past[row] + self.num_new[row]

    def reached(self, request: Request) -> int:
        """After how many tokens a prompt can stop no more, as far as the plan has grown.

        Where it ends by now it may still stop, if that is not where it has begun.
        """
        row = self._opened.get(request)
        return self.end(request) - (row is not None and self.num_new[row] > 0)

    def stretch(self, lead: Request) -> Stretch:
        """What a step may compute of a prompt, as far as the plan has grown."""
        keys, block_size = lead.keys, self._pool.block_size
        ends = (self.reached(lead), self.end(lead) + self.prompt_budget)
        passed, behind = (end // block_size for end in ends)
        assert keys is not None
        return Stretch(
            lead,
            passed,
            keys.key(passed) if passed < len(keys) else None,
            behind,
            keys.key(behind) if behind < len(keys) else None,
        )

    def chunk(self, request: Request) -> int:
        """How many tokens of a prompt a step may compute: up to its next stop."""
        start = self.start(request)
        stops = [stop for stop in self._ends(request) if stop > start]
        return min([len(request.tokens), *stops]) - start

    def _ends(self, request: Request) -> tuple[int, ...]:
        """After how many of its tokens a step of a prompt ends, whatever is left of the budget."""
        return *self.stops.get(request, ()), request.adapter_start

    def claim(self, request: Request) -> int:
        """How many blocks a running prompt has still to take; 0 for one that decodes."""
        num_left = len(request.tokens) - request.num_computed_tokens  # 0: it waits for other beams
        return self.pending(request) if num_left > 1 + request.num_owed_tokens else 0

    def needed(self, request: Request, shared: Found) -> int:
        """How many blocks must be left for a waiting request to start, beside those it shares.

        Beams that have yielded should not do so again as soon as they part.
        """
        needed = self.pending(request, shared)
        if request.beams is None or not request.beams.behind:
            return needed
        more = request.beams.blocks_behind(self._groups)
        most = self._pool.num_blocks - self.num_taken(shared)
        return max(needed, min(needed + more, most))

    def pending(self, request: Request, shared: Found = NOTHING, num_new: int = 0) -> int:
        """How many blocks a prompt has still to take, to be computed up to its end.

        Args:
            request: the prompt.
            shared: what it goes on from, beside the columns that it has.
            num_new: columns that it takes besides.
        """
        table = request.table
        total = blocks_for(len(request.tokens), self._pool.block_size)
        given_up = shared.given_up(table) if shared else table.given_up
        return self._groups.pending(total, len(table) + len(shared) + num_new, given_up)

    def take(self, shared: Found) -> None:
        """Keep these blocks, used or free, for a row that goes on from them."""
        taken = [block for block in shared.blocks() if self._is_free(block)]
        self._taken.update(taken)
        self.free -= len(taken)

    def num_taken(self, shared: Found) -> int:
        """How many of these blocks are free, so that going on from them uses them up."""
        return sum(self._is_free(block) for block in shared.blocks())

    def preempt(self, request: Request) -> None:
        """Let a running request yield."""
        self.preempted.append(request)
        self.yielding.add(request)
        self.rows += request.num_rows
        for block in request.table.held():
            self._dropped[block] = self._dropped.get(block, 0) + 1
            self.free += self._is_free(block)

    def freeze(self) -> StepPlan:
        """Return the plan."""
        sampled: list[int] = []
        stopped: set[int] = set()
        num_logits: list[int] = []
        ends = zip(self.requests, self.num_past, self.num_new, strict=True)
        for row, (request, past, new) in enumerate(ends):
            beyond = past + new - len(request.tokens)
            if request.pooler is not None:  # it gets no token
                beyond = -1
            if beyond >= 0:
                sampled.append(row)
            if past + new in self.stops.get(request, ()):
                stopped.add(row)
            num_logits.append(new if request.scores_missing else max(0, 1 + beyond))
        return StepPlan(
            requests=tuple(self.requests),
            num_decodes=self.num_decodes,
            num_past=tuple(self.num_past),
            num_new=tuple(self.num_new),
            num_logits=tuple(num_logits),
            num_new_columns=tuple(self.num_new_columns),
            shared=self.shared,
            copied=frozenset(self.copied),
            sampled=tuple(sampled),
            stopped=frozenset(stopped),
            drafts=self.drafts,
            preempted=tuple(self.preempted),
            turns=self.turns,
        )

    def _is_free(self, block: int) -> bool:
        """Whether a block is free once the preempted requests have given theirs back."""
        owners = self._pool.ref_count(block) - self._dropped.get(block, 0)
        return owners == 0 and block not in self._taken
