"""What of a request is in the cache already, so that it need not be computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from onnxport.kv.pool import BlockPool
from onnxport.kv.prefix import KeyChain
from onnxport.kv.states import StatePool
from onnxport.kv.table import NOTHING, Found
from onnxport.serving.draft import Draft
from onnxport.serving.request import Request

# Tokens that a request must not have to compute because it waits for a state that another one makes
# on its way: that one stops there, which costs a step, and the state takes a slot.
LEAST_SHARED: Final = 64
# Tokens that have to be spared for each one by which the step of a prompt gets shorter because it
# stops for others: it ends later by that, and not always there is somebody to use the rest.
COST_OF_SHORT_STEP: Final = 2


class HitCounts:
    """What the prefix cache was asked for and found, of requests at their first attempts.

    Attributes:
        looked_up: tokens of started requests.
        found: those of them that were in the cache.
    """

    __slots__ = ("found", "looked_up")

    def __init__(self) -> None:
        """Begin at nothing."""
        self.looked_up = self.found = 0

    def note(self, request: Request, num_past: int) -> None:
        """Count a row of a step that shares blocks or starts a request, before it is that far.

        Args:
            request: of the row.
            num_past: its tokens that need not be computed.
        """
        if request.num_preemptions or request.keys is None:
            return
        if request.params.skip_reading_prefix_cache:
            return
        if not request.running:
            self.looked_up += len(request.tokens)
        found = num_past - request.num_computed_tokens
        self.found += found
        for one in (request, *request.siblings):
            one.num_cached_tokens += found


class Hits:
    """Looks up the blocks of requests in a pool that somebody else changes."""

    __slots__ = ("_pool", "_states")

    def __init__(self, pool: BlockPool, states: StatePool | None = None) -> None:
        """Look at the blocks, and at the states if the model has any."""
        self._pool = pool
        self._states = states

    def of(self, request: Request) -> Found:
        """The cached blocks that hold the next tokens of `request`.

        At least one token is left to compute: the next one is sampled from its logits. Where the
        model has states, the one behind the last of these blocks is there too, and a request that
        has one of its own goes on from that.
        """
        keys, groups, find = request.keys, self._pool.groups, self._pool.find
        if keys is None:
            return NOTHING
        columns = self.columns_ahead(request)
        end = groups.reach(columns, lambda column, group: find(keys.key(column), group) is not None)
        if self._states is not None:
            has_state = self._states.find
            ends = range(end, columns.start, -1) if not request.num_computed_tokens else ()
            end = next((one for one in ends if has_state(keys.key(one - 1))), columns.start)
        if end == columns.start:
            return NOTHING
        found = []
        for group in range(len(groups)):
            needed = groups.needed(group, columns.start, end)
            blocks = [find(keys.key(column), group) for column in needed]
            found.append(tuple([block for block in blocks if block is not None]))
        return Found(end - columns.start, tuple(found))

    def columns_ahead(self, request: Request) -> range:
        """The columns of a request that it would go on from if they were cached."""
        block_size = self._pool.block_size
        start, partial = divmod(request.num_computed_tokens, block_size)
        if request.keys is None or partial or request.params.skip_reading_prefix_cache:
            return range(start, start)
        return range(start, min(len(request.keys), (len(request.tokens) - 1) // block_size))

    def stops(self, request: Request) -> tuple[int, ...]:
        """After how many tokens the state of a prompt should be kept.

        That is behind the last whole block, and where it parts from one that was computed before:
        if two have begun so, a third one may. And behind the last one before its adapter begins,
        which others have in common with it where adapters take turns. None where there is nothing
        to keep, nor of a prompt that is embedded and has to be computed as a whole: those like it
        would not read it either.
        """
        keys = request.keys
        if self._states is None or keys is None:
            return ()
        if _reads_all(request):
            return ()
        block_size, find = self._pool.block_size, self._pool.find
        start = request.num_computed_tokens // block_size
        last = min(len(keys), (len(request.tokens) - 1) // block_size)
        parts = next((one for one in range(start, last) if find(keys.key(one)) is None), last)
        before = request.adapter_start // block_size
        return parts * block_size, last * block_size, before * block_size

    def look_up(self, draft: Draft, request: Request) -> bool:
        """Find what is cached of a prompt; False if another row computes its next block already.

        Where the model has states: if another prompt computes what this one begins with, and stops
        where the two part.
        """
        if draft.awaited and self._waits_too(draft, request):
            draft.found[request] = NOTHING
            return False
        shared = self.of(request)
        draft.found[request] = shared
        draft.stops[request] = self.stops(request)
        if self._states is not None:
            if self._waits(draft, request, len(shared)):
                return False
            if (first := self._beginning(request)) is not None and not _reads_all(request):
                draft.ahead.setdefault(first, []).append(request)
            return True
        key = self.key_at(
            request, request.num_computed_tokens + len(shared) * self._pool.block_size
        )
        return key is None or draft.leading.setdefault(key, request) is request

    def withdraw(self, draft: Draft, request: Request) -> None:
        """Let others compute the next block of a prompt that was looked up and has to wait."""
        if self._states is not None:
            if (first := self._beginning(request)) is not None and not _reads_all(request):
                draft.ahead[first].remove(request)
            return
        num_past = request.num_computed_tokens + len(draft.found[request]) * self._pool.block_size
        key = self.key_at(request, num_past)
        if key is not None and draft.leading.get(key) is request:
            del draft.leading[key]

    def key_at(self, request: Request, num_past: int) -> bytes | None:
        """The key of the block that token number `num_past` goes to, if it is going to be full.

        None of a request that would not read it either: it has no reason to wait for it. Nor where
        there are states: a block is of no use without the one behind it.
        """
        if self._states is not None:
            return None
        if request.params.skip_reading_prefix_cache:
            return None
        index = num_past // self._pool.block_size
        keys = request.keys
        return keys.key(index) if keys is not None and index < len(keys) else None

    def foresee(self, draft: Draft, waiting: Iterable[Request]) -> None:
        """Let prompts stop where those part from them that no row or token is left for yet.

        These would find K/V and no state when their turn comes. Where they part behind what a step
        can reach, a later plan sees to it.
        """
        ahead = {first: list(map(draft.stretch, leads)) for first, leads in draft.ahead.items()}
        least = self._least
        for request in waiting:
            keys = request.keys
            if keys is None or len(keys) < least:
                continue
            for stretch in ahead.get(keys.key(least - 1), ()):
                passed = not _has_key(keys, stretch.passed, stretch.passed_key)
                if passed or _has_key(keys, stretch.behind, stretch.behind_key):
                    continue
                if not request.num_computed_tokens:
                    last = self.columns_ahead(request).stop
                    self._stop(draft, request, stretch.lead, 0, last)

    @property
    def _least(self) -> int:
        """Blocks that have to be shared, beside those whose state is there already."""
        return -(-LEAST_SHARED // self._pool.block_size)

    def _beginning(self, request: Request) -> bytes | None:
        """What requests have in common that may wait for one another; None: it is too short."""
        keys, least = request.keys, self._least
        return keys.key(least - 1) if keys is not None and len(keys) >= least else None

    def _waits(self, draft: Draft, request: Request, have: int) -> bool:
        """Whether a prompt waits for a state that another one comes by, and stops for.

        Of several the one that stops last. Who has a state of its own goes on from that.

        Args:
            draft: where those are that go on.
            request: the prompt.
            have: its blocks that are cached, with a state behind them.
        """
        first = self._beginning(request)
        if first is None or request.num_computed_tokens:
            return False
        last = self.columns_ahead(request).stop
        leads = draft.ahead.get(first, ())
        found = [self._stop(draft, request, one, have, last) for one in leads]
        stops = [stop for stop in found if stop is not None]
        if stops and request.keys is not None:
            index = min(stops) - 1
            draft.awaited.setdefault(first, {})[request.keys.key(index)] = index
        return bool(stops)

    def _waits_too(self, draft: Draft, request: Request) -> bool:
        """Whether another one waits for a state that this one would wait for, too.

        It begins as that one does up to there, and has nothing in the cache behind.
        """
        first, keys = self._beginning(request), request.keys
        awaited = None if first is None else draft.awaited.get(first)
        if not awaited or keys is None or request.running or request.num_computed_tokens:
            return False
        last = self.columns_ahead(request).stop
        return any(
            index < last
            and keys.key(index) == key
            and (index + 1 == last or self._pool.find(keys.key(index + 1)) is None)
            for key, index in awaited.items()
        )

    def _stop(
        self, draft: Draft, request: Request, lead: Request, have: int, last: int
    ) -> int | None:
        """Behind which block `lead` stops for a prompt, where that is worth it; None: nowhere.

        A stop for others is worth it if it spares more tokens than it takes from the lead's step.
        Otherwise the prompt may go on from an earlier stop, or compute by itself what they share;
        then others wait for that one, which is to end soon.

        Args:
            draft: where the lead is.
            request: the prompt.
            lead: one that begins as it does.
            have: blocks of the prompt that are cached, with a state behind them.
            last: blocks that it may have in common with others.
        """
        keys, others, block_size = request.keys, lead.keys, self._pool.block_size
        assert keys is not None
        assert others is not None
        first = max(have, draft.reached(lead) // block_size) + 1
        last = min(last, len(others))
        if first > last or keys.key(first - 1) != others.key(first - 1):
            return None
        common = _num_common(keys, others, first, last)
        there = [one // block_size for one in draft.stops[lead]]
        stop = max([one for one in there if first <= one <= common], default=None)
        kept = self._kept(draft, keys, min(have, common) or common)
        start = max(draft.end(lead), (stop or 0) * block_size)
        cost = min(
            COST_OF_SHORT_STEP * (-(common * block_size - start) % draft.prompt_budget),
            len(lead.tokens) - common * block_size,
        )
        more = common - max(kept, stop or 0)
        if more >= self._least and more * block_size > cost:
            draft.stops[lead] += (common * block_size,)
            return common
        return stop if stop is not None and stop - kept >= self._least else None

    def _kept(self, draft: Draft, keys: KeyChain, end: int) -> int:
        """After how many of the first `end` blocks there is a state that stays, at the latest.

        Those on others' way are gone in the next step, maybe before this one starts. It is not
        looked for farther back than a stop has to spare.
        """
        assert self._states is not None
        back = max(self._least, draft.prompt_budget // self._pool.block_size + 1)
        stays = self._states.stays
        low = max(0, end - back)
        return next((one for one in range(end, low, -1) if stays(keys.key(one - 1))), low)


def _reads_all(request: Request) -> bool:
    """Whether a prompt is embedded and has to be computed as a whole: it stops for nobody."""
    return request.pooler is not None and request.params.skip_reading_prefix_cache


def _has_key(keys: KeyChain, index: int, key: bytes | None) -> bool:
    """Whether a chain has this key as number `index`, and so all keys before it in common."""
    return key is not None and index < len(keys) and keys.key(index) == key


def _num_common(keys: KeyChain, others: KeyChain, low: int, high: int) -> int:
    """Return how many blocks two chains have in common, which is at least `low`, at most `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        if keys.key(middle - 1) == others.key(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
