"""What of a request is in the cache already, so that it need not be computed."""

from __future__ import annotations

from onnxport.kv.pool import BlockPool
from onnxport.kv.states import StatePool
from onnxport.kv.table import NOTHING, Found
from onnxport.serving.draft import Draft
from onnxport.serving.request import Request


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
        """Find what is cached of a prompt; False if another row computes its next block already."""
        shared = self.of(request)
        draft.found[request] = shared
        draft.stops[request] = self.stops(request)
        key = self.key_at(
            request, request.num_computed_tokens + len(shared) * self._pool.block_size
        )
        return key is None or draft.leading.setdefault(key, request) is request

    def withdraw(self, draft: Draft, request: Request) -> None:
        """Let others compute the next block of a prompt that was looked up and has to wait."""
        num_past = request.num_computed_tokens + len(draft.found[request]) * self._pool.block_size
        key = self.key_at(request, num_past)
        if key is not None and draft.leading.get(key) is request:
            del draft.leading[key]

    def key_at(self, request: Request, num_past: int) -> bytes | None:
        """The key of the block that token number `num_past` goes to, if it is going to be full.

        None of a request that would not read it either: it has no reason to wait for it. Nor has
        one that needs a state, which most likely is not there when the block is.
        """
        if self._states is not None:
            return None
        if request.params.skip_reading_prefix_cache:
            return None
        index = num_past // self._pool.block_size
        keys = request.keys
        return keys.key(index) if keys is not None and index < len(keys) else None
