"""What of a request is in the cache already, so that it need not be computed."""

from __future__ import annotations

from onnxport.kv.pool import BlockPool
from onnxport.kv.table import NOTHING, Found
from onnxport.serving.draft import Draft
from onnxport.serving.request import Request


class Hits:
    """Looks up the blocks of requests in a pool that somebody else changes."""

    __slots__ = ("_pool",)

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def of(self, request: Request) -> Found:
        """The cached blocks that hold the next tokens of `request`.

        At least one token is left to compute: the next one is sampled from its logits.
        """
        keys, groups, find = request.keys, self._pool.groups, self._pool.find
        if keys is None:
            return NOTHING
        columns = self.columns_ahead(request)
        end = groups.reach(columns, lambda column, group: find(keys.key(column), group) is not None)
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

    def look_up(self, draft: Draft, request: Request) -> bool:
        """Find what is cached of a prompt; False if another row computes its next block already."""
        shared = self.of(request)
        draft.found[request] = shared
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

        None of a request that would not read it either: it has no reason to wait for it.
        """
        if request.params.skip_reading_prefix_cache:
            return None
        index = num_past // self._pool.block_size
        keys = request.keys
        return keys.key(index) if keys is not None and index < len(keys) else None
