"""Pad steps to few shapes, for devices that compile a graph for each.

Sizes are powers of two and the maximum itself. A step in which every row has exactly one new
token, decoding, gets a shape of its own kind: as many tokens and logits as rows, attention tiles
of one token. Any other has

    num_tokens >= the tokens        the difference is filled by padding rows, each of which takes
                                    as many tokens as a sequence may have in the block table
    num_rows   >= rows + those      further rows have no new tokens
    num_logits =  num_rows, or another such size where more logits than that are wanted
    query_tile =  8 or 64, by the longest chunk

What padding tokens write goes to spare blocks behind the pool, each to a slot of its own, and no
real row reads them. Less than half of a size is padding, so padding rows are at most as many as
real ones, and `num_rows` at most twice `max_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs.passes.decompose import DEFAULT_TILE_TOKENS
from onnxport.providers.base import StepInputs
from onnxport.providers.hidden_states import padded_states

_Integer = TypeVar("_Integer", bound=np.integer[Any])

_SHORT_TILE: Final = 8  # tokens, of chunks such as speculation makes


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a padded step's arrays."""

    num_tokens: int
    num_rows: int
    table_width: int  # blocks a row
    num_logits: int
    query_tile: int  # tokens, the length of contract.QUERY_TILE


@dataclass(frozen=True, slots=True)
class Buckets:
    """What steps may be, and so the shapes they are padded to."""

    max_tokens: int  # of a step
    max_rows: int  # of a step, at most max_tokens
    max_model_len: int  # tokens of the longest sequence
    block_size: int  # tokens
    tile_tokens: int = DEFAULT_TILE_TOKENS  # largest attention tile
    # Rows, those that pad included, have a tile's tokens at most: graphs.passes.chunk_linear.
    row_is_tile: bool = False
    few_widths: bool = False  # of block tables: powers of four, for what does not cost more for it

    def __post_init__(self) -> None:
        """Every size is at least one, and a token for each row fits."""
        sizes = (self.max_rows, self.max_model_len, self.block_size, self.tile_tokens)
        assert min(sizes) >= 1, self
        assert self.max_rows <= self.max_tokens, self

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def widths(self) -> list[int]:
        """Every width of a block table."""
        if not self.few_widths:
            return sizes_up_to(self.max_blocks)
        powers = [4**power for power in range(1, self.max_blocks.bit_length() // 2 + 1)]
        return [*(width for width in powers if width < self.max_blocks), self.max_blocks]

    def width_of(self, blocks: int) -> int:
        """The smallest of `widths` that holds so many blocks."""
        return next(width for width in self.widths if width >= blocks)

    @property
    def spare_blocks(self) -> int:
        """Blocks that padding needs behind the pool, whatever the step.

        The widest table needs most: only the last block of a sequence may stay partly unused. Where
        a row is a tile, the shortest tile may leave more of each unused.
        """
        tokens = _largest_gap(sizes_up_to(self.max_tokens))
        tiles = {self.query_tile(chunk) for chunk in (1, _SHORT_TILE + 1)}
        every = (self.padding_rows(tokens, self.max_blocks, tile) for tile in tiles)
        return max(sum(-(-row // self.block_size) for row in rows) for rows in every)

    @property
    def slots_of_a_block(self) -> int:
        """Positions of a sequence that its first block holds."""
        return min(self.block_size, self.max_model_len)

    def padding_rows(self, tokens: int, table_width: int, query_tile: int) -> list[int]:
        """How many tokens each padding row takes, beside rows with attention tiles of so many."""
        most = min(table_width * self.block_size, self.max_model_len)
        if self.row_is_tile:
            most = min(most, query_tile)
        full, rest = divmod(tokens, most)
        return [most] * full + [rest] * (rest > 0)

    def query_tile(self, longest_chunk: int) -> int:
        """The attention tile of a step that does not only decode."""
        short = longest_chunk <= _SHORT_TILE
        return min(_SHORT_TILE, self.tile_tokens) if short else self.tile_tokens

    def row_width(self, longest_chunk: int) -> int:
        """What a row is padded to in a step that runs whole, where a row is a tile."""
        assert self.row_is_tile
        return 1 if longest_chunk == 1 else self.query_tile(longest_chunk)

    def shape(self, tokens: int, rows: int, longest_chunk: int, blocks: int) -> StepShape:
        """The sizes that a step is padded to, where it wants a row of logits for each row at most.

        Args:
            tokens: new ones, of all rows.
            rows: of the step.
            longest_chunk: new tokens of a row.
            blocks: the width of its block table.

        Raises:
            ProviderError: The step is larger than the buckets; says which limit.
        """
        self._check(tokens, rows, blocks)
        width = self.width_of(blocks)
        if longest_chunk == 1 and tokens == rows:
            padded = size_of(rows, self.max_rows)
            return StepShape(padded, padded, width, padded, 1)
        num_tokens = size_of(tokens, self.max_tokens)
        tile = self.query_tile(longest_chunk)
        padding = self.padding_rows(num_tokens - tokens, width, tile)
        num_rows = size_of(rows + len(padding), 2 * self.max_rows)
        return StepShape(num_tokens, num_rows, width, num_rows, tile)

    def _check(self, tokens: int, rows: int, blocks: int) -> None:
        """Refuse a step that no shape holds."""
        for found, most, what, advice in (
            (tokens, self.max_tokens, "tokens", "max_num_batched_tokens"),
            (rows, self.max_rows, "rows", "max_num_seqs"),
            (blocks, self.max_blocks, "blocks a row", "max_model_len"),
        ):
            if found > most:
                raise ProviderError(
                    f"a step of {found} {what} was given to a device whose graph is compiled for "
                    f"at most {most}; lower {advice}"
                )

    def decode_shapes(self) -> list[StepShape]:
        """Every shape of a step that only decodes."""
        sizes = product(sizes_up_to(self.max_rows), self.widths)
        return [StepShape(rows, rows, width, rows, 1) for rows, width in sizes]

    def shapes(self) -> set[StepShape]:
        """Every shape that `pad` can make; few of them occur in one workload."""
        found = set(self.decode_shapes())
        for tokens, rows, width, chunk in product(
            sizes_up_to(self.max_tokens),
            sizes_up_to(2 * self.max_rows),
            self.widths,
            (1, _SHORT_TILE + 1),
        ):
            tile = self.query_tile(chunk)
            logits = [rows, *(size for size in sizes_up_to(tokens) if size > rows)]
            found |= {StepShape(tokens, rows, width, count, tile) for count in logits}
        return found


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """A step as a device runs it."""

    inputs: StepInputs
    query_tile: int  # tokens, the length of contract.QUERY_TILE
    num_logits: int  # the real ones, which come first

    @property
    def shape(self) -> StepShape:
        """The sizes of its arrays."""
        num_rows, table_width = self.inputs.block_table.shape
        return StepShape(
            len(self.inputs.input_ids),
            num_rows,
            table_width,
            len(self.inputs.logits_indices),
            self.query_tile,
        )


@dataclass(frozen=True, slots=True)
class _Padding:
    """The rows behind the real ones."""

    new: NDArray[np.int32]  # [num_rows], tokens
    past: NDArray[np.int32]  # [num_rows], tokens
    table: NDArray[np.int32]  # [num_rows, table_width]


def pad(inputs: StepInputs, buckets: Buckets, num_blocks: int, spare_state: int = 0) -> PaddedStep:
    """Pad a step to one of `buckets.shapes()`; its own part stays as it is.

    Args:
        inputs: A step of at least one row.
        buckets: What steps may be.
        num_blocks: Blocks of the pool, behind which there are `buckets.spare_blocks` more.
        spare_state: The slot that padding rows write their states to, where the model has some. All
            of them do, and nobody reads it.

    Raises:
        ProviderError: The step is larger than the buckets; says which limit.
    """
    tokens, (rows, width) = len(inputs.input_ids), inputs.block_table.shape
    new = np.diff(inputs.cumulative_sequence_lengths)
    longest = int(new.max())
    shape = buckets.shape(tokens, rows, longest, width)
    num_tokens, table_width = shape.num_tokens, shape.table_width
    if longest == 1 and tokens == rows:
        padding = _decode_rows(buckets, num_tokens - rows, table_width, num_blocks)
    else:
        chunks = buckets.padding_rows(num_tokens - tokens, table_width, shape.query_tile)
        chunks += [0] * (shape.num_rows - rows - len(chunks))
        padding = _chunk_rows(buckets, chunks, table_width, num_blocks)
    table, *others = (
        _widened(one, padding.table) for one in (inputs.block_table, *inputs.more_block_tables)
    )
    lengths = np.concatenate([new, padding.new])
    past = np.concatenate([inputs.past_sequence_lengths, padding.past])
    totals = lengths + past
    num_logits, wanted = len(lengths), len(inputs.logits_indices)
    slots, reads, writes = inputs.adapter_slots, inputs.state_reads, inputs.state_writes
    padded = StepInputs(
        input_ids=_extended(inputs.input_ids, num_tokens, 0),
        block_table=table,
        cumulative_sequence_lengths=np.cumsum([0, *lengths], dtype=np.int32),
        past_sequence_lengths=past,
        attention_metadata=np.array([lengths.max(), totals.max(), totals.max()], np.int32),
        logits_indices=_extended(
            inputs.logits_indices,
            num_logits if wanted <= num_logits else size_of(wanted, num_tokens),
            inputs.logits_indices[-1] if wanted else 0,
        ),
        adapter_slots=None if slots is None else _extended(slots, len(lengths), 0),
        state_reads=None if reads is None else _extended(reads, len(lengths), 0),
        state_writes=None if writes is None else _extended(writes, len(lengths), spare_state),
        more_block_tables=tuple(others),
    )
    return PaddedStep(padded_states(inputs, padded), shape.query_tile, wanted)


def _decode_rows(buckets: Buckets, count: int, width: int, first_spare: int) -> _Padding:
    """One token a row; the rows of one spare block are at its positions in turn."""
    number = np.arange(count, dtype=np.int32)
    table = np.zeros((count, width), np.int32)
    table[:, 0] = first_spare + number // buckets.slots_of_a_block
    return _Padding(np.ones_like(number), number % buckets.slots_of_a_block, table)


def _chunk_rows(buckets: Buckets, chunks: list[int], width: int, first_spare: int) -> _Padding:
    """Sequences without a past, each in spare blocks of its own."""
    table = np.zeros((len(chunks), width), np.int32)
    for row, tokens in enumerate(chunks):
        count = -(-tokens // buckets.block_size)
        table[row, :count] = np.arange(first_spare, first_spare + count)
        first_spare += count
    new = np.array(chunks, np.int32)
    return _Padding(new, np.zeros_like(new), table)


def _widened(table: NDArray[np.int32], below: NDArray[np.int32]) -> NDArray[np.int32]:
    """A block table as wide as the rows `below` it, with these."""
    rows, width = table.shape
    wide = np.zeros((rows + len(below), below.shape[1]), np.int32)
    wide[:rows, :width] = table
    wide[rows:] = below
    return wide


def _extended(values: NDArray[_Integer], length: int, fill: int) -> NDArray[_Integer]:
    longer = np.full(length, fill, values.dtype)
    longer[: len(values)] = values
    return longer


def sizes_up_to(maximum: int) -> list[int]:
    """The powers of two below `maximum`, and it."""
    return [1 << power for power in range((maximum - 1).bit_length())] + [maximum]


def size_of(count: int, maximum: int) -> int:
    """The smallest of `sizes_up_to(maximum)` that holds `count`."""
    assert count <= maximum, f"{count} of at most {maximum}"
    return min(1 << max(0, count - 1).bit_length(), maximum)


def _largest_gap(sizes: list[int]) -> int:
    """Most padding that any count may need."""
    return max((larger - smaller - 1 for smaller, larger in pairwise(sizes)), default=0)
