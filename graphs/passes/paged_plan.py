"""What all layers of a decomposed paged graph share, computed once a run; block ids once a table.

Integers are int64 throughout: an execution provider without int64 arithmetic leaves these small
nodes to the CPU, where their inputs come from. Sizes derive from host values alone (shapes and
the attention metadata), so nothing waits for a device; from shapes alone where a plan is given
the input QUERY_TILE.

For T tokens, B sequences with `new` tokens each, tiles of C tokens:

    first[b]   = sum of ceil(new / C) before b           first tile of a sequence
    tile n     = tokens [(n - first[b]) * C, + C) of its sequence b
    tiles      = min(B, T) + (T - min(B, T)) // C        an upper bound, exact for equal lengths
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from onnx import TensorProto

from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.paged import PagedAttentionNode, PagedInput

SCOPE: Final = "paged"  # of the names of all nodes here


class TablePlan(NamedTuple):
    """What the layers of one block table share."""

    slots: str  # int64 [written, 2], block and offset where keys and values are written
    tile_blocks: str  # int64 [tiles, blocks], the block ids that a tile reads


class PagedPlan:
    """Emits the shared nodes into a builder on construction, further ones when asked for.

    Attributes:
        written: int64 [written], the tokens to write; None for all T of them.
        tile_tokens: int64 [tiles, C], the token of each tile row; rows past the end of their
            sequence repeat some token and their result is dropped.
        token_rows: int64 [T], the row of [tiles * C] that holds a token's result.
    """

    def __init__(
        self, g: GraphBuilder, layer: PagedAttentionNode, tile_tokens: int, query_tile: str | None
    ) -> None:
        """Emit what is needed always.

        Args:
            g: Takes the nodes.
            layer: Any of the layers that share the plan.
            tile_tokens: Largest C.
            query_tile: An input whose length is C; None: the attention metadata bound C, and how
                many of the block table's columns are read.
        """
        self._g = g
        self._memo: dict[tuple[object, ...], str] = {}
        table = self._read_inputs(layer)
        if query_tile is None:
            self._bound_by_metadata(layer.input(PagedInput.ATTENTION_METADATA), tile_tokens)
        else:
            self._bound_by_shapes(query_tile, tile_tokens)
        slots = self._place_tokens(layer.input(PagedInput.SLOT_MAPPING), table)
        tile_blocks = self._place_tiles(table)
        self._tables = {layer.input(PagedInput.BLOCK_TABLE): TablePlan(slots, tile_blocks)}

    def of_table(self, block_table: str) -> TablePlan:
        """What follows from a block table. All have the shape of the first layer's."""
        if block_table not in self._tables:
            with self._g.scope(SCOPE, root=True):
                table = ops.cast(self._g, block_table, TensorProto.INT64, name="plan")
                self._tables[block_table] = TablePlan(self._slots(table), self._tile_blocks(table))
        return self._tables[block_table]

    def rotary_rows(self, table: str) -> str:
        """Rows [T, 1, width] of a cos or sin table at the tokens' positions."""
        key = ("rotary", table)
        if key not in self._memo:
            with self._g.scope(SCOPE, root=True):
                rows = self._g.node("Gather", [table, self._positions], axis=0, name="rotary")
                rows = self._g.node("Unsqueeze", [rows, self._ints(1)], name="rotary")
            self._memo[key] = rows
        return self._memo[key]

    def visible(self, window: int | None, causal: bool, chunked: bool = False) -> str:
        """Whether a query sees a key, bool [tiles, 1, C, kv_len].

        Windows slide, or are chunks, one behind the other.
        """
        key = ("visible", window, causal, chunked)
        if key not in self._memo:
            with self._g.scope(SCOPE, root=True):
                self._memo[key] = self._make_visible(window, causal, chunked)
        return self._memo[key]

    def own(self, window: int | None) -> str:
        """Whether a place in the blocks that a tile reads is its sequence's, [tiles, kv_len, 1, 1].

        Behind its end, and ahead of its window, blocks may be anybody's.
        """
        key = ("own", window)
        if key not in self._memo:
            with self._g.scope(SCOPE, root=True):
                self._memo[key] = self._make_own(window)
        return self._memo[key]

    def kv_shape(self, kv_heads: int, size: int) -> str:
        """[tiles, kv_len, kv_heads, size]."""
        return self._shape(self._tiles, self._kv_len, kv_heads, size)

    def scores_shape(self, heads: int) -> str:
        """[tiles, heads, C, kv_len]."""
        return self._shape(self._tiles, heads, self._tile, self._kv_len)

    def weights_shape(self, kv_heads: int) -> str:
        """[tiles, kv_heads, group * C, kv_len]."""
        return self._shape(self._tiles, kv_heads, -1, self._kv_len)

    def tile_shape(self, heads: int, size: int) -> str:
        """[tiles, heads, C, size]."""
        return self._shape(self._tiles, heads, self._tile, size)

    def sink_shape(self, heads: int) -> str:
        """[tiles, heads, C, 1]."""
        return self._shape(self._tiles, heads, self._tile, 1)

    def _places(self) -> str:
        """0 to kv_len, which are the positions of the keys that a tile reads."""
        key = ("places",)
        if key not in self._memo:
            bounds = [self._int(0), self._kv_len, self._int(1)]
            self._memo[key] = self._g.node("Range", bounds, name="keys")
        return self._memo[key]

    def _make_own(self, window: int | None) -> str:
        g = self._g
        places = g.node("Unsqueeze", [self._places(), self._ints(1, 2)], name="places")
        own = g.node("LessOrEqual", [places, self._last_positions], name="own")
        if window is None:
            return own
        first = g.node(
            "Slice",
            [self._query_positions, self._ints(0), self._ints(1), self._ints(2)],
            name="first.query",
        )
        inside = g.node("Greater", [places, self._sub(first, self._int(window))], name="own")
        return g.node("And", [own, inside], name="own")

    def _make_visible(self, window: int | None, causal: bool, chunked: bool) -> str:
        g = self._g
        keys = self._places()
        newest = self._query_positions if causal else self._last_positions
        visible = g.node("LessOrEqual", [keys, newest], name="visible")
        if window is not None:
            inside = self._inside(keys, self._int(window), chunked)
            visible = g.node("And", [visible, inside], name="window")
        return visible

    def _inside(self, keys: str, window: str, chunked: bool) -> str:
        """Whether keys are not ahead of a query's window, or chunk."""
        g = self._g
        if chunked:
            first = self._mul(self._div(self._query_positions, window), window)
            return g.node("GreaterOrEqual", [keys, first], name="chunk")
        oldest = self._sub(self._query_positions, window)
        return g.node("Greater", [keys, oldest], name="window")

    def _read_inputs(self, layer: PagedAttentionNode) -> str:
        """Inputs as int64, and the sizes that they have: T, B, block size, width of the table.

        Returns:
            The block table.
        """
        g = self._g
        cumulative, past, table = (
            ops.cast(g, layer.input(position), TensorProto.INT64, name="plan")
            for position in (
                PagedInput.CUMULATIVE_SEQUENCE_LENGTHS,
                PagedInput.PAST_SEQUENCE_LENGTHS,
                PagedInput.BLOCK_TABLE,
            )
        )
        self._past = past
        ends = self._ints(np.iinfo(np.int64).max)
        self._ends = g.node("Slice", [cumulative, self._ints(1), ends], name="ends")
        self._starts = g.node("Slice", [cumulative, self._ints(0), self._ints(-1)], name="starts")
        self._new = self._sub(self._ends, self._starts)
        self._num_tokens = self._dim(layer.input(PagedInput.QUERY), 0)
        self._batch = self._dim(layer.input(PagedInput.PAST_SEQUENCE_LENGTHS), 0)
        self._width = self._dim(layer.input(PagedInput.BLOCK_TABLE), 1)
        self._num_blocks = self._dim(layer.input(PagedInput.KEY_CACHE), 0)
        self._block_size = self._dim(layer.input(PagedInput.KEY_CACHE), 1)
        return table

    def _bound_by_metadata(self, metadata: str, tile_tokens: int) -> None:
        """C, and the blocks that the longest sequence needs; without metadata as in shapes."""
        g = self._g
        capacity = self._mul(self._width, self._block_size)
        longest_query, longest_kv = self._num_tokens, capacity
        if metadata:
            bounds = ops.cast(g, metadata, TensorProto.INT64, name="bounds")
            longest_query = self._known(self._pick(bounds, 0), longest_query)
            longest_kv = self._known(self._pick(bounds, 1), longest_kv)
        # Bounds of at least one keep every shape valid, whatever the metadata says.
        self._tile = self._tile_of(longest_query, tile_tokens)
        kv_len = self._max(self._min(longest_kv, capacity), self._int(1))
        self._blocks = self._ceil_div(kv_len, self._block_size)
        self._kv_len = self._mul(self._blocks, self._block_size)

    def _bound_by_shapes(self, query_tile: str, tile_tokens: int) -> None:
        """C, and all of the block table."""
        self._tile = self._tile_of(self._dim(query_tile, 0), tile_tokens)
        self._blocks = self._width
        self._kv_len = self._mul(self._blocks, self._block_size)

    def _tile_of(self, length: str, tile_tokens: int) -> str:
        tile = self._min(self._min(length, self._num_tokens), self._int(tile_tokens))
        return self._max(tile, self._int(1))

    def _place_tokens(self, slot_mapping: str, table: str) -> str:
        """The sequence and position of each token; returns slots. A mapped one of -1 is unwritten.

        Args:
            slot_mapping: slots that are given; "": they follow from the block table.
            table: the block table.
        """
        g = self._g
        tokens = g.node("Range", [self._int(0), self._num_tokens, self._int(1)], name="tokens")
        self._owner = self._count_ends(tokens, self._ends)
        self._offset = self._sub(tokens, g.node("Gather", [self._starts, self._owner]))
        past = g.node("Gather", [self._past, self._owner], name="token.past")
        self._positions = self._add(past, self._offset)
        self.written: str | None = None
        self._mapped: str | None = None
        if not slot_mapping:
            self._columns_of_tokens = self._columns(
                self._owner, self._div(self._positions, self._block_size)
            )
            return self._slots(table)
        slot = ops.cast(g, slot_mapping, TensorProto.INT64, name="slots")
        kept = g.node("GreaterOrEqual", [slot, self._int(0)], name="written")
        self.written = ops.reshape(g, g.node("NonZero", [kept], name="written"), [-1])
        slot = g.node("Gather", [slot, self.written], name="slots")
        block = self._div(slot, self._block_size)
        offset = g.node("Mod", [slot, self._block_size], name="slot.offset")
        self._mapped = self._columns(block, offset)
        return self._mapped

    def _slots(self, table: str) -> str:
        """Where tokens are written by a block table, unless that is given."""
        if self._mapped is not None:
            return self._mapped
        g = self._g
        block = g.node("GatherND", [table, self._columns_of_tokens], name="slot.block")
        key = ("offset",)
        if key not in self._memo:
            self._memo[key] = g.node("Mod", [self._positions, self._block_size], name="slot.offset")
        return self._columns(block, self._memo[key])

    def _place_tiles(self, table: str) -> str:
        """Which tokens each tile holds, and the way back; returns which blocks it reads."""
        g = self._g
        count = self._ceil_div(self._new, self._tile)  # [B]
        last = g.node("CumSum", [count, self._int(0)], name="tile.ends")
        first = self._sub(last, count)
        rows = self._min(self._batch, self._num_tokens)
        self._tiles = self._add(rows, self._div(self._sub(self._num_tokens, rows), self._tile))
        tiles = g.node("Range", [self._int(0), self._tiles, self._int(1)], name="tiles")
        self._tile_owner = owner = self._count_ends(tiles, last)  # [tiles]
        within = self._sub(tiles, g.node("Gather", [first, owner]))
        begin = self._column(self._mul(within, self._tile))
        steps = g.node("Range", [self._int(0), self._tile, self._int(1)], name="steps")
        offset = self._add(begin, steps)  # [tiles, C], within the sequence
        start = self._column(g.node("Gather", [self._starts, owner], name="tile.start"))
        token = self._min(self._add(start, offset), self._last(self._num_tokens))
        self.tile_tokens = self._max(token, self._int(0))
        past = self._column(g.node("Gather", [self._past, owner], name="tile.past"))
        new = self._column(g.node("Gather", [self._new, owner], name="tile.new"))
        axes = self._ints(1, 3)  # from [tiles, C] to [tiles, 1, C, 1]
        self._query_positions = g.node("Unsqueeze", [self._add(past, offset), axes])
        self._last_positions = g.node("Unsqueeze", [self._last(self._add(past, new)), axes])
        tile_blocks = self._tile_blocks(table)
        home = g.node("Gather", [first, self._owner], name="token.tile")
        tile = self._add(home, self._div(self._offset, self._tile))
        inner = g.node("Mod", [self._offset, self._tile], name="token.inner")
        self.token_rows = self._add(self._mul(tile, self._tile), inner)
        return tile_blocks

    def _tile_blocks(self, table: str) -> str:
        """The blocks that each tile reads, by a block table."""
        # An entry that no key needs may be anything: bring it into the pool, its keys are hidden.
        table = self._max(self._min(table, self._last(self._num_blocks)), self._int(0))
        bounds = [self._ints(0), self._shape(self._blocks), self._ints(1)]
        used = self._g.node("Slice", [table, *bounds], name="used.blocks")
        return self._g.node("Gather", [used, self._tile_owner], axis=0, name="tile.blocks")

    def _count_ends(self, items: str, ends: str) -> str:
        """For each of `items` [N], the first b with items < ends[b], clipped to the batch."""
        g = self._g
        passed = g.node("LessOrEqual", [ends, self._column(items)], name="passed")  # [N, B]
        flags = ops.cast(g, passed, TensorProto.INT64, name="passed")
        owner = g.node("ReduceSum", [flags, self._ints(1)], keepdims=0, name="owner")
        return self._min(owner, self._last(self._batch))

    def _known(self, bound: str, otherwise: str) -> str:
        """A metadata bound; 0 means that it is not known."""
        positive = self._g.node("Greater", [bound, self._int(0)], name="known")
        return self._g.node("Where", [positive, bound, otherwise], name="bound")

    def _columns(self, *columns: str) -> str:
        parts = [self._column(column) for column in columns]
        return self._g.node("Concat", parts, axis=1, name="columns")

    def _column(self, x: str) -> str:
        return self._g.node("Unsqueeze", [x, self._ints(1)], name="column")

    def _shape(self, *dims: str | int) -> str:
        """A shape tensor of scalars and numbers."""
        key = ("shape", *dims)
        if key not in self._memo:
            parts = [
                self._ints(dim)
                if isinstance(dim, int)
                else self._g.node("Unsqueeze", [dim, self._ints(0)], name="dim")
                for dim in dims
            ]
            self._memo[key] = self._g.node("Concat", parts, axis=0, name="shape")
        return self._memo[key]

    def _dim(self, x: str, axis: int) -> str:
        shape = self._g.node("Shape", [x], start=axis, end=axis + 1, name="dim")
        return self._pick(shape, 0)

    def _pick(self, x: str, index: int) -> str:
        return self._g.node("Gather", [x, self._int(index)], name="pick")

    def _int(self, value: int) -> str:
        return self._g.constant(np.array(value, np.int64), "int")

    def _ints(self, *values: int) -> str:
        return self._g.constant(np.array(values, np.int64), "ints")

    def _ceil_div(self, a: str, b: str) -> str:
        return self._div(self._sub(self._add(a, b), self._int(1)), b)

    def _last(self, count: str) -> str:
        return self._sub(count, self._int(1))

    def _add(self, a: str, b: str) -> str:
        return self._g.node("Add", [a, b], name="add")

    def _sub(self, a: str, b: str) -> str:
        return self._g.node("Sub", [a, b], name="sub")

    def _mul(self, a: str, b: str) -> str:
        return self._g.node("Mul", [a, b], name="mul")

    def _div(self, a: str, b: str) -> str:
        return self._g.node("Div", [a, b], name="div")

    def _min(self, a: str, b: str) -> str:
        return self._g.node("Min", [a, b], name="min")

    def _max(self, a: str, b: str) -> str:
        return self._g.node("Max", [a, b], name="max")
