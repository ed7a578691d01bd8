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
        """After how many tokens the state of a prompt should be kept, ascending.

        That is behind the last whole block, and where it parts from one that was computed before:
        if two have begun so, a third one may. None where there is nothing to keep, nor of a prompt
        that is embedded and has to be computed as a whole: those like it would not read it either.
        """
        keys = request.keys
        if self._states is None or keys is None:
            return ()
        if request.pooler is not None and request.params.skip_reading_prefix_cache:
            return ()
        block_size, find = self._pool.block_size, self._pool.find
        start = request.num_computed_tokens // block_size
        last = min(len(keys), (len(request.tokens) - 1) // block_size)
        parts = next((one for one in range(start, last) if find(keys.key(one)) is None), last)
        return parts * block_size, last * block_size

    def look_up(self, draft: Draft, request: Request) -> bool:
        """Find what is cached of a prompt; False if another row computes its next block already.

        Where the model has states: if another prompt computes what this one begins with, and stops
        where the two part.
        """
        shared = self.of(request)
        draft.found[request] = shared
        draft.stops[request] = self.stops(request)
        if self._states is not None:
            if self._waits(draft, request, len(shared)):
                return False
            draft.ahead.append(request)
            return True
        key = self.key_at(
            request, request.num_computed_tokens + len(shared) * self._pool.block_size
        )
        return key is None or draft.leading.setdefault(key, request) is request

    def withdraw(self, draft: Draft, request: Request) -> None:
        """Let others compute the next block of a prompt that was looked up and has to wait."""
        if self._states is not None:
            draft.ahead.remove(request)
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

        These would find K/V and no state when their turn comes.
        """
        least = self._least
        for request in waiting if draft.ahead else ():
            keys = request.keys
            if request in draft.found or keys is None or len(keys) < least:
                continue
            first = keys.key(least - 1)
            if any(_has_key(one.keys, least - 1, first) for one in draft.ahead):
                self._waits(draft, request, len(self.of(request)))

    @property
    def _least(self) -> int:
        """Blocks that have to be shared, beside those whose state is there already."""
        return -(-LEAST_SHARED // self._pool.block_size)

    def _waits(self, draft: Draft, request: Request, have: int) -> bool:
        """Whether a prompt waits for a state that another one comes by, and stops for.

        Of several the one with the most in common. Who has a state of its own goes on from that. As
        one that has been stopped for once has a state there, no two stops are near each other.

        Args:
            draft: where those are that go on.
            request: the prompt.
            have: its blocks that are cached, with a state behind them.
        """
        keys, block_size = request.keys, self._pool.block_size
        if not draft.ahead or keys is None or request.num_computed_tokens:
            return False
        assert self._states is not None
        last, stays = self.columns_ahead(request).stop, self._states.stays
        # Those on others' way are gone in the next step, maybe before this one starts.
        lasting = next((one for one in range(have, 0, -1) if stays(keys.key(one - 1))), 0)
        first = max(have + 1, lasting + self._least)
        if first > last:
            return False
        probe = keys.key(first - 1)
        best: tuple[int, Request] | None = None
        for one in draft.ahead:
            if one.keys is None or not _has_key(one.keys, first - 1, probe):
                continue
            common = _num_common(keys, one.keys, first, min(last, len(one.keys)))
            comes_by = common * block_size > draft.reached(one, block_size)
            if comes_by and (best is None or common > best[0]):
                best = common, one
        if best is None:
            return False
        stop = best[0] * block_size
        if stop not in draft.stops[best[1]]:
            draft.stops[best[1]] += (stop,)
        return True


def _has_key(keys: KeyChain | None, index: int, key: bytes) -> bool:
    """Whether a chain has this key as number `index`, and so all keys before it in common."""
    return keys is not None and index < len(keys) and keys.key(index) == key


def _num_common(keys: KeyChain, others: KeyChain, low: int, high: int) -> int:
    """Return how many blocks two chains have in common, which is at least `low`, at most `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        if keys.key(middle - 1) == others.key(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
