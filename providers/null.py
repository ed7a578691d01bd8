"""A model without machine learning, for tests, simulation and measuring the engine itself.

It keeps a real paged cache, of token ids, and its logits are a hash of everything the cache holds
for a sequence. A block that is wrong, stale, shared by mistake or not yet written therefore
changes the tokens, and most such mistakes are caught as they happen: each slot remembers the
position that it was written for.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CapacityError, DeviceLostError, ProviderError
from onnxport.graphs.lora import LoraAdapter
from onnxport.graphs.noise import Noise
from onnxport.providers.base import Capabilities, KVFormat, StepInputs
from onnxport.providers.blocks import HostBlocks, plain_layout
from onnxport.providers.input_checks import check_inputs
from onnxport.providers.null_states import STATE_BYTES, NullStates

MAX_ADAPTER_RANK = 16
MARK_BITS = 24  # a group's number is above them in what it stores, and tokens below
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_POISON = np.int64(-(1 << 62))  # in slots whose content must not be read


@dataclass(frozen=True, slots=True)
class NullOptions:
    """What a `NullModel` looks like."""

    vocab_size: int = 512
    num_blocks: int = 64
    block_size: int = 16
    windows: tuple[int | None, ...] = (None,)  # of each group of layers
    one_table: bool = False  # the groups have one table in common, and nothing is given up
    max_model_len: int = 4096
    max_batch_rows: int | None = None
    max_batch_tokens: int | None = None
    max_adapters: int = 0
    int8_products: bool = False  # see Capabilities
    latency_s: float = 0.0  # slept in every run
    # Return the least of a row's logits in the place of all that `StepInputs.exact_logits` does not
    # ask for, and more than the largest where a token is not allowed: whoever looks at one of these
    # gets other tokens.
    takes_exact_logits: bool = False
    rounds_anew: bool = False  # that it says so of itself
    state_slots: int = 0  # see Capabilities
    host_states: bool = False  # likewise
    final_features: int = 0  # numbers of each token that it tells, hashes as the logits are
    fails: Callable[[int], bool] = field(default=lambda run: False)  # by number of the run, from 0
    # by number of the transfer, from 0: copies, reads and writes of blocks are counted together
    transfer_fails: Callable[[int], bool] = field(default=lambda transfer: False)
    # by number of the run or transfer, counted together from 0: the device is lost for good
    lost_at: Callable[[int], bool] = field(default=lambda operation: False)


class NullModel:
    """A `Model` whose next token is a hash of the tokens before it.

    Each group of layers keeps all tokens, in blocks of its own if it has a table, and adds a hash
    of those that its window shows. With slots for states there is a layer besides that hashes the
    tokens that went through a sequence's states.

    In canonical form a block is int64 [1, 2, 1, block_size, 1]: its tokens are the key, their
    positions the value. Poisoned slots are copied along, so that using them is still caught.
    """

    def __init__(self, options: NullOptions | None = None) -> None:
        self.options = options = options or NullOptions()
        self.num_runs = 0
        self.num_transfers = 0
        self.num_operations = 0  # runs and transfers
        self.lost = False
        self.num_copied_blocks = self.num_read_blocks = self.num_written_blocks = 0
        self.closed = False
        self._adapters: dict[int, int] = {}  # slot -> what it adds to the tokens that are stored
        shape = (options.num_blocks, options.block_size)
        self._tokens = np.full(shape, _POISON, np.int64)
        self._positions = np.full(shape, _POISON, np.int64)
        caches = self._tokens[:, :, None, None], self._positions[:, :, None, None]
        self._blocks = HostBlocks([caches], plain_layout())
        self._states = NullStates(options.state_slots)
        self._vocab = np.arange(options.vocab_size, dtype=np.uint64) * _GAMMA

    @property
    def capabilities(self) -> Capabilities:
        """What the options say."""
        options, count = self.options, len(self._tables)
        places = tuple((group, 0) for group in range(count)) if count > 1 else ()
        return Capabilities(
            provider="null",
            device="none",
            attention="native",
            compute_dtype="float32",
            kv_cache_dtype="int64",
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            kv_block_bytes=16 * options.block_size,
            kv_format=KVFormat("null", 1, 1, 1, "int64", places),
            max_model_len=options.max_model_len,
            vocab_size=options.vocab_size,
            max_batch_rows=options.max_batch_rows,
            max_batch_tokens=options.max_batch_tokens,
            placement={"null": 1},
            max_adapters=options.max_adapters,
            max_adapter_rank=MAX_ADAPTER_RANK if options.max_adapters else 0,
            takes_exact_logits=options.takes_exact_logits,
            rounds_anew=options.rounds_anew,
            windows=self._tables,
            int8_products=options.int8_products,
            state_slots=options.state_slots,
            state_bytes=STATE_BYTES if options.state_slots else 0,
            host_states=options.host_states,
            features=options.final_features,
            final_features=options.final_features,
        )

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Store the new tokens and return logits, float32 [num_logits, vocab].

        Raises:
            ProviderError: as `NullOptions.fails` says; the slots it would have written, of K/V
                and of states, are poisoned then.
            DeviceLostError: as `NullOptions.lost_at` says.
            AssertionError: the inputs break the contract, or read what was never written; or the
                device was lost before.
        """
        self._begin()
        check_inputs(inputs, self.capabilities)
        number, self.num_runs = self.num_runs, self.num_runs + 1
        if self.options.latency_s:
            time.sleep(self.options.latency_s)
        past = inputs.past_sequence_lengths.astype(np.int64)
        new = np.diff(inputs.cumulative_sequence_lengths)
        rows = np.repeat(np.arange(len(new)), new)
        starts = inputs.cumulative_sequence_lengths[:-1]
        positions = np.arange(len(rows)) - starts[rows] + past[rows]
        tables = np.stack((inputs.block_table, *inputs.more_block_tables))
        blocks = tables[:, rows, positions // self.options.block_size]  # [groups, num_tokens]
        slots = positions % self.options.block_size
        keys = blocks.astype(np.int64) * self.options.block_size + slots
        assert len(np.unique(keys)) == keys.size, "two tokens are written to one slot"
        if self.options.fails(number):
            self._tokens[blocks, slots] = self._positions[blocks, slots] = _POISON
            if inputs.state_writes is not None:
                self._states.poison(inputs.state_writes.tolist())
            raise ProviderError(f"run {number} was told to fail")
        marks = np.arange(len(tables), dtype=np.int64)[:, None] << MARK_BITS
        self._tokens[blocks, slots] = inputs.input_ids + marks
        added = None
        if inputs.adapter_slots is not None:  # K/V depend on the adapter, and so do states
            added = self._adapter_marks(inputs.adapter_slots)
            self._tokens[blocks, slots] += added[rows]
        self._positions[blocks, slots] = positions
        hashes = np.zeros((len(past), int((past + new).max())), np.uint64)
        for group, window in enumerate(self.options.windows):
            stored = min(group, len(tables) - 1)
            tokens = self._seen(tables[stored], past, past + new, window)
            hashes += _hashes(tokens + ((group - stored) << MARK_BITS), window)
        made = hashes[rows, positions]
        if self.options.state_slots:
            made += self._states.step(inputs, None if added is None else added.tolist())
        if inputs.hidden_states is not None and self.options.final_features:
            inputs.hidden_states[:] = self._final(made)
        logits = self._logits(made[inputs.logits_indices])
        if inputs.exact_logits is not None and self.options.takes_exact_logits:
            _keep_largest(logits, inputs)
        return logits

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `providers.base.Model.copy_blocks`; a failure poisons the targets."""
        self._begin()
        self._blocks.copy(sources, targets)
        self._end_transfer(targets)
        self.num_copied_blocks += len(targets)

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `providers.base.Model.read_blocks`; int64 [len(blocks), 1, 2, 1, block_size, 1]."""
        self._begin()
        content = self._blocks.read(blocks)
        self._end_transfer(())
        self.num_read_blocks += len(blocks)
        return content

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `providers.base.Model.write_blocks`; a failure poisons the blocks."""
        self._begin()
        self._blocks.write(blocks, content)
        self._end_transfer(blocks)
        self.num_written_blocks += len(blocks)

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        """See `providers.base.Model.set_adapter`."""
        assert 1 <= slot <= self.options.max_adapters, slot
        if adapter is not None and adapter.rank > MAX_ADAPTER_RANK:
            raise CapacityError(
                f"the adapter's rank is {adapter.rank}; this model takes up to {MAX_ADAPTER_RANK}"
            )
        if adapter is None:
            self._adapters.pop(slot, None)
        else:
            self._adapters[slot] = _adapter_mark(adapter)

    def poison(self, blocks: Iterable[int]) -> None:
        """Make the content of `blocks` unreadable, as a test does with free ones."""
        ids = list(blocks)
        self._tokens[ids] = self._positions[ids] = _POISON

    def poison_states(self, slots: Iterable[int]) -> None:
        """Make the content of state slots unreadable, as a test does with free ones."""
        self._states.poison(slots)

    def close(self) -> None:
        """Refuse to run from now on."""
        self.closed = True

    def _begin(self) -> None:
        """Count a run or transfer, and lose the device where `NullOptions.lost_at` says so."""
        assert not self.closed, "the model is closed"
        assert not self.lost, "the device was lost and is used again"
        number, self.num_operations = self.num_operations, self.num_operations + 1
        if self.options.lost_at(number):
            self.lost = True
            raise DeviceLostError(f"operation {number} was told to lose the device")

    def _adapter_marks(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return what the adapter of each row adds to the tokens it stores, int64 [batch]."""
        marks = []
        for slot in slots.tolist():
            assert not slot or slot in self._adapters, f"slot {slot} is empty"
            marks.append(self._adapters[slot] if slot else 0)
        return np.array(marks, np.int64)

    def _end_transfer(self, written: Sequence[int]) -> None:
        """Count a transfer, and let it fail where `NullOptions.transfer_fails` says so."""
        number, self.num_transfers = self.num_transfers, self.num_transfers + 1
        if self.options.transfer_fails(number):
            self.poison(written)
            raise ProviderError(f"transfer {number} was told to fail")

    @property
    def _tables(self) -> tuple[int | None, ...]:
        """The window of each block table."""
        return (None,) if self.options.one_table else self.options.windows

    def _seen(
        self,
        block_table: NDArray[np.int32],
        past: NDArray[np.int64],
        lengths: NDArray[np.int64],
        window: int | None,
    ) -> NDArray[np.int64]:
        """Return what is stored of each row's positions, -1 where no new one sees it.

        Args:
            block_table: of a group of layers.
            past: tokens of each row before the step.
            lengths: and after it.
            window: how many tokens are seen; None: all.
        """
        batch, longest = len(lengths), int(lengths.max())
        tokens = self._tokens[block_table].reshape(batch, -1)[:, :longest]
        stored = self._positions[block_table].reshape(batch, -1)[:, :longest]
        wanted = np.arange(longest)
        seen = wanted < lengths[:, None]
        if window is not None:  # the first new token sees the earliest one
            seen &= wanted > past[:, None] - window
        wrong = np.argwhere(seen & (stored != wanted))
        assert not len(wrong), (
            f"row {wrong[0][0]} reads position {wrong[0][1]} and finds what was written for "
            f"{stored[tuple(wrong[0])]}"
        )
        return np.where(seen, tokens, -1)

    def _final(self, hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Return states in [-1, 1), float32 [num_tokens, final_features]."""
        places = _mix(np.arange(self.options.final_features, dtype=np.uint64))
        bits = _mix(_mix(hashes)[:, None] ^ places)
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)

    def _logits(self, hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Return logits in [0, 8), float32 [num_logits, vocab]."""
        bits = _mix(_mix(hashes)[:, None] + self._vocab)
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(8 * 2.0**-24)


def _hashes(tokens: NDArray[np.int64], window: int | None) -> NDArray[np.uint64]:
    """Return a hash of the last `window` tokens up to each position, uint64 [batch, length].

    Args:
        tokens: int64 [batch, length]; what is negative is not there.
        window: how many; None: all.
    """
    places = _mix(np.arange(tokens.shape[1], dtype=np.uint64))
    mixed = np.where(tokens >= 0, _mix(tokens.astype(np.uint64) * _GAMMA + places), np.uint64(0))
    sums: NDArray[np.uint64] = mixed.cumsum(axis=1, dtype=np.uint64)
    if window is not None:
        sums[:, window:] -= sums[:, :-window].copy()
    return sums


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble each value (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keep_largest(logits: NDArray[np.float32], inputs: StepInputs) -> None:
    """Replace all logits, [num_logits, vocab], that a step does not ask for."""
    assert inputs.exact_logits is not None
    allowed, races = inputs.allowed_tokens, inputs.races
    for number, count in enumerate(inputs.exact_logits.tolist()):
        row = logits[number]
        if not count:
            continue
        places = np.arange(len(row))
        if allowed is not None:
            places = places[(allowed[number][places // 32] >> (places % 32) & 1) == 1]
        kept = row[places]
        if 0 < count < len(kept):
            uniform, factor = (0.0, 0.0) if races is None else races[number].tolist()
            sums = kept.astype(np.float64)
            if factor:
                noise = Noise(uniform, len(row))
                sums = sums * factor + noise.of(np.arange(len(noise.most))).ravel()[places]
            # What is less has an even smaller sum then.
            kept[sums < np.partition(sums, -count)[-count]] = kept.min() - (1e6 if factor else 0)
        row[:] = row.max() + 1
        row[places] = kept


def _adapter_mark(adapter: LoraAdapter) -> int:
    """Return a multiple of 2**32, below 2**61, that differs between adapters."""
    digest = hashlib.sha256()
    for key, delta in sorted(adapter.deltas.items()):
        digest.update(repr(key).encode() + delta.a.tobytes() + delta.b.tobytes())
    return int.from_bytes(digest.digest()[:4], "big") % (1 << 29) << 32
