"""Models around a model: with fewer blocks, and with steps that fail."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs.lora import LoraAdapter
from onnxport.providers.base import Capabilities, Model, StepInputs


class Wrapped:
    """The same model; `close` leaves it open, for it is shared."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def capabilities(self) -> Capabilities:
        return self._model.capabilities

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        return self._model.run(inputs)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._model.copy_blocks(sources, targets)

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        return self._model.read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        self._model.write_blocks(blocks, content)

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        self._model.set_adapter(slot, adapter)

    def close(self) -> None: ...


class Slotted(Wrapped):
    """A model that keeps states, which finds the slots of steps that name none by their blocks.

    A state is that of the block which holds a sequence's last token, and of its length. So a copy
    of that block goes on from it, too; one that nobody has written from the state of no tokens.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._held: OrderedDict[tuple[int, int], int] = OrderedDict()

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        if inputs.state_reads is not None:
            self._held.clear()  # an engine has slots of its own
            return self._model.run(inputs)
        past = inputs.past_sequence_lengths.tolist()
        new = np.diff(inputs.cumulative_sequence_lengths).tolist()
        before = [self._key(*one) for one in zip(inputs.block_table, past, strict=True)]
        totals = [old + more for old, more in zip(past, new, strict=True)]
        behind = [self._key(*one) for one in zip(inputs.block_table, totals, strict=True)]
        reads = [self._held.get(key, 0) if key[1] else 0 for key in before]
        writes = self._free(reads)
        changes = {
            "state_reads": np.array(reads, np.int32),
            "state_writes": np.array(writes, np.int32),
        }
        logits = self._model.run(dataclasses.replace(inputs, **changes))
        self._held.update(zip(behind, writes, strict=True))
        return logits

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().copy_blocks(sources, targets)
        to = dict(zip(sources, targets, strict=True))
        copied = {(to[b], n): slot for (b, n), slot in self._held.items() if b in to}
        self._held.update(copied)

    def close(self) -> None:
        self._model.close()

    def _key(self, table: NDArray[np.int32], length: int) -> tuple[int, int]:
        return int(table[max(0, length - 1) // self.capabilities.block_size]), length

    def _free(self, reads: Sequence[int]) -> list[int]:
        """A slot for each row, which no row reads; the longest held ones are given up."""
        every = set(range(1, self.capabilities.state_slots + 1)) - set(reads)
        while len(free := sorted(every - set(self._held.values()))) < len(reads):
            self._held.popitem(last=False)
        return free[: len(reads)]


class FewSlots(Wrapped):
    """The first ones of the model's slots for adapters."""

    def __init__(self, model: Model, num_slots: int) -> None:
        super().__init__(model)
        assert num_slots <= model.capabilities.max_adapters
        self._num_slots = num_slots

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self._model.capabilities, max_adapters=self._num_slots)


class Narrow(Wrapped):
    """A pool of `num_blocks`: the first ones of the model's."""

    def __init__(self, model: Model, num_blocks: int) -> None:
        super().__init__(model)
        assert num_blocks <= model.capabilities.num_blocks
        self._num_blocks = num_blocks

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self._model.capabilities, num_blocks=self._num_blocks)


class Unreliable(Wrapped):
    """Every third step of several rows fails, after writing other tokens into its slots."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._num_steps = 0

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        self._num_steps += len(inputs.past_sequence_lengths) > 1
        if self._num_steps % 3 or len(inputs.past_sequence_lengths) == 1:
            return self._model.run(inputs)
        other = (inputs.input_ids + 1) % self._model.capabilities.vocab_size
        self._model.run(dataclasses.replace(inputs, input_ids=other))
        raise ProviderError("this step was told to fail")


def num_columns(limits: Capabilities) -> int:
    """How many columns of blocks a pool has: one of each group of layers."""
    return limits.num_blocks // len(limits.windows)


def tables_of(limits: Capabilities, columns: Sequence[int]) -> list[list[int]]:
    """The blocks of each group of layers: its own of every column."""
    count = len(limits.windows)
    return [[column * count + group for column in columns] for group in range(count)]


def step(
    rows: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    limits: Capabilities | None = None,
    **changes: Any,
) -> StepInputs:
    """One batch of rows: new tokens, past length, blocks. Logits of every token.

    Where `limits` has groups of layers, blocks are columns, see `tables_of`.
    """
    new = [len(tokens) for tokens, _, _ in rows]
    total = [len(tokens) + past for tokens, past, _ in rows]
    width = max(len(blocks) for _, _, blocks in rows)
    table = np.zeros((len(rows), width), np.int32)
    for row, (_, _, blocks) in enumerate(rows):
        table[row, : len(blocks)] = blocks
    count = 1 if limits is None else len(limits.windows)
    inputs = StepInputs(
        input_ids=np.array([token for tokens, _, _ in rows for token in tokens], np.int64),
        block_table=table * count,
        cumulative_sequence_lengths=np.cumsum([0, *new]).astype(np.int32),
        past_sequence_lengths=np.array([past for _, past, _ in rows], np.int32),
        attention_metadata=np.array([max(new), max(total), max(total)], np.int32),
        logits_indices=np.arange(sum(new), dtype=np.int32),
        more_block_tables=tuple(table * count + group for group in range(1, count)),
    )
    return dataclasses.replace(inputs, **changes)
