"""Sequences on a loaded model, with blocks for each group of layers, as an engine has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onnxport.kv.groups import CacheGroups
from onnxport.providers.base import Model, StepInputs


def no_numbers(content: NDArray[np.generic]) -> NDArray[np.generic]:
    """NaN in place of all; of integers every byte of a scale that is none."""
    spoiled = {np.dtype(np.int8): -1, np.dtype(np.uint8): 255}.get(content.dtype, np.nan)
    return np.full_like(content, spoiled)


class Sequences:
    """Several sequences whose blocks lie anywhere; what a window leaves behind is given away.

    Before anything is written, and when it is given away, a block holds NaN; so does block 0, which
    nobody gets. So whatever is read that should not be, shows.
    """

    def __init__(self, model: Model, count: int, seed: int) -> None:
        limits = model.capabilities
        self.model = model
        self.groups = CacheGroups(limits.windows, limits.block_size)
        order = np.random.default_rng(seed).permutation(np.arange(1, limits.num_blocks))
        self.free: list[int] = order.tolist()
        self.lengths = [0] * count
        # Of each sequence, of each group: blocks, 0 for one that was given away.
        self.tables: list[list[list[int]]] = [[[] for _ in limits.windows] for _ in range(count)]
        self.num_given_away = 0
        self.spoil(range(limits.num_blocks))

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN."""
        if self.model.capabilities.moves_blocks:
            spoiled = no_numbers(self.model.read_blocks(blocks))
            self.model.write_blocks(blocks, spoiled)
            return
        for part in getattr(self.model, "_blocks")._parts:  # caches of one shape  # noqa: B009
            part.write(blocks, no_numbers(part.read(blocks)))

    def run(self, new: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Compute the next tokens of each sequence; returns the logits of all, [tokens, vocab]."""
        rows = [row for row, tokens in enumerate(new) if tokens]
        for row in rows:
            self._take(row, len(new[row]))
        lengths = [len(new[row]) for row in rows]
        past = [self.lengths[row] for row in rows]
        totals = np.array(past) + lengths
        first, *others = [self._table(rows, group) for group in range(len(self.groups))]
        logits = self.model.run(
            StepInputs(
                input_ids=np.array([token for row in rows for token in new[row]], np.int64),
                block_table=first,
                cumulative_sequence_lengths=np.cumsum([0, *lengths]).astype(np.int32),
                past_sequence_lengths=np.array(past, np.int32),
                attention_metadata=np.array([max(lengths), max(totals), max(totals)], np.int32),
                logits_indices=np.arange(sum(lengths), dtype=np.int32),
                more_block_tables=tuple(others),
            )
        )
        for row, total in zip(rows, totals.tolist(), strict=True):
            self.lengths[row] = total
        return logits.copy()

    def move(self) -> None:
        """Copy all that is held to other blocks, and spoil where it was."""
        held = [block for row in self.tables for table in row for block in table if block]
        targets, self.free = self.free[: len(held)], self.free[len(held) :]
        self.model.copy_blocks(held, targets)
        self.spoil(held)
        self.free += held
        new = dict(zip(held, targets, strict=True)) | {0: 0}
        self.tables = [[[new[block] for block in table] for table in row] for row in self.tables]

    def layer_blocks(self, row: int, layer: int) -> dict[int, NDArray[np.generic]]:
        """What a layer holds of a sequence, [2, heads, block_size, head_size], by column."""
        group, place = (self.model.capabilities.kv_format.places or {layer: (0, layer)})[layer]
        columns = [column for column, block in enumerate(self.tables[row][group]) if block]
        found = self.model.read_blocks([self.tables[row][group][column] for column in columns])
        return {column: block[place] for column, block in zip(columns, found, strict=True)}

    def _take(self, row: int, num_new: int) -> None:
        """Give away what no later token sees, and take blocks for new ones."""
        total = self.lengths[row] + num_new
        for group, table in enumerate(self.tables[row]):
            for column in range(self.groups.first_seen(group, self.lengths[row])):
                if table[column]:
                    self.spoil([table[column]])
                    self.free.insert(0, table[column])
                    self.num_given_away += 1
                    table[column] = 0
            while len(table) * self.groups.block_size < total:
                table.append(self.free.pop(0))

    def _table(self, rows: Sequence[int], group: int) -> NDArray[np.int32]:
        tables = [self.tables[row][group] for row in rows]
        width = max(map(len, tables))
        return np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
