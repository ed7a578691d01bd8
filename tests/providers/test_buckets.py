"""Padding to few shapes: arithmetic, and that no result changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import ProviderError
from onnxport.graphs import contract as c
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes.accuracy import set_accuracy
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.passes.retype import retype
from onnxport.providers.base import StepInputs
from onnxport.providers.buckets import Buckets, PaddedStep, StepShape, pad, size_of, sizes_up_to
from onnxport.providers.ort import ort_value, start_session
from tests.exporter.checkpoints import VOCAB
from tests.providers.conftest import ArtifactMaker
from tests.tiers import examples

POOL = 10_000  # blocks
ROW = 90  # blocks that a row may have
FIELDS = (
    "input_ids",
    "block_table",
    "cumulative_sequence_lengths",
    "past_sequence_lengths",
    "logits_indices",
)


def step(
    new: list[int], past: list[int], width: int, logits: list[int], block_size: int
) -> StepInputs:
    """A step in which every row has blocks of its own; unused entries of the table are 0."""
    table = np.zeros((len(new), width), np.int32)
    totals = np.add(new, past)
    for row, total in enumerate(totals):
        count = -(-total // block_size)
        table[row, :count] = np.arange(count) + row * ROW
    return StepInputs(
        input_ids=np.arange(1, sum(new) + 1, dtype=np.int64) % VOCAB,
        block_table=table,
        cumulative_sequence_lengths=np.cumsum([0, *new], dtype=np.int32),
        past_sequence_lengths=np.array(past, np.int32),
        attention_metadata=np.array([max(new), max(totals), max(totals)], np.int32),
        logits_indices=np.array(logits, np.int32),
    )


@st.composite
def steps(draw: st.DrawFn, *, decoding: bool = False) -> tuple[Buckets, StepInputs]:
    """Any step that some buckets take."""
    max_tokens = draw(st.integers(1, 200))
    buckets = Buckets(
        max_tokens=max_tokens,
        max_rows=draw(st.integers(1, min(24, max_tokens))),
        max_model_len=draw(st.integers(1, ROW)),
        block_size=draw(st.sampled_from([1, 3, 4, 16, 32])),
        tile_tokens=draw(st.sampled_from([1, 8, 64])),
        few_widths=draw(st.booleans()),
        row_is_tile=draw(st.booleans()),
    )
    longest_row = buckets.tile_tokens if buckets.row_is_tile else buckets.max_tokens
    new: list[int] = []
    for _ in range(draw(st.integers(1, buckets.max_rows))):
        most = min(buckets.max_model_len, buckets.max_tokens - sum(new), longest_row)
        if most >= 1:
            new.append(1 if decoding else draw(st.integers(1, most)))
    past = [draw(st.integers(0, buckets.max_model_len - count)) for count in new]
    longest = max(np.add(new, past))
    width = draw(st.integers(-(-longest // buckets.block_size), buckets.max_blocks))
    logits = sorted(draw(st.sets(st.integers(0, sum(new) - 1), max_size=40)))
    return buckets, step(new, past, width, logits, buckets.block_size)


def slots(inputs: StepInputs, block_size: int, first_row: int = 0) -> Iterator[tuple[int, int]]:
    """Where the tokens of the rows from `first_row` on are written: block and offset."""
    new = np.diff(inputs.cumulative_sequence_lengths)
    for row in range(first_row, len(new)):
        for i in range(new[row]):
            position = int(inputs.past_sequence_lengths[row]) + i
            yield int(inputs.block_table[row, position // block_size]), position % block_size


@settings(max_examples=examples(400), deadline=None)
@given(steps() | steps(decoding=True))
def test_the_real_part_is_untouched(case: tuple[Buckets, StepInputs]) -> None:
    buckets, inputs = case
    padded = pad(inputs, buckets, POOL)
    assert padded.num_logits == len(inputs.logits_indices)
    for name in FIELDS:
        before, after = getattr(inputs, name), getattr(padded.inputs, name)
        part = after[tuple(slice(size) for size in before.shape)]
        np.testing.assert_array_equal(part, before)
        assert after.dtype == before.dtype
        assert after.flags.c_contiguous
    rows, width = inputs.block_table.shape
    assert not padded.inputs.block_table[:rows, width:].any()
    assert not padded.inputs.input_ids[len(inputs.input_ids) :].any()
    last = inputs.logits_indices[-1] if padded.num_logits else 0
    assert set(padded.inputs.logits_indices[padded.num_logits :].tolist()) <= {last}


@settings(max_examples=examples(400), deadline=None)
@given(steps() | steps(decoding=True))
def test_padding_writes_distinct_spare_slots_alone(case: tuple[Buckets, StepInputs]) -> None:
    buckets, inputs = case
    padded = pad(inputs, buckets, POOL).inputs
    rows = len(inputs.block_table)
    written = list(slots(padded, buckets.block_size, rows))
    assert len(written) == len(padded.input_ids) - len(inputs.input_ids)
    assert len(set(written)) == len(written)
    assert all(POOL <= block < POOL + buckets.spare_blocks for block, _ in written)


@settings(max_examples=examples(100), deadline=None)
@given(steps() | steps(decoding=True))
def test_block_tables_of_all_groups_are_padded_alike(case: tuple[Buckets, StepInputs]) -> None:
    """Padding rows have the same spare blocks in each: nobody reads what layers leave there."""
    buckets, inputs = case
    others = tuple(inputs.block_table + np.int32(number) for number in (1, 2))
    padded = pad(replace(inputs, more_block_tables=others), buckets, POOL).inputs
    alone = pad(inputs, buckets, POOL).inputs
    np.testing.assert_array_equal(padded.block_table, alone.block_table)
    rows, width = inputs.block_table.shape
    for table, other in zip(others, padded.more_block_tables, strict=True):
        np.testing.assert_array_equal(other[:rows, :width], table)
        assert not other[:rows, width:].any()
        np.testing.assert_array_equal(other[rows:], padded.block_table[rows:])
        assert (other.dtype, other.flags.c_contiguous) == (np.int32, True)


@settings(max_examples=examples(400), deadline=None)
@given(steps() | steps(decoding=True))
def test_a_padded_step_is_a_valid_step(case: tuple[Buckets, StepInputs]) -> None:
    buckets, inputs = case
    padded = pad(inputs, buckets, POOL).inputs
    cumulative = padded.cumulative_sequence_lengths
    assert cumulative[0] == 0
    assert cumulative[-1] == len(padded.input_ids)
    new = np.diff(cumulative)
    totals = new + padded.past_sequence_lengths
    assert len(totals) == len(padded.block_table)
    assert totals.max() <= buckets.max_model_len, "the RoPE tables have no more rows"
    assert totals.max() <= padded.block_table.shape[1] * buckets.block_size
    assert padded.attention_metadata.tolist() == [new.max(), totals.max(), totals.max()]
    assert padded.attention_metadata.dtype == np.int32
    assert (padded.logits_indices < len(padded.input_ids)).all()


@settings(max_examples=examples(200), deadline=None)
@given(steps() | steps(decoding=True))
def test_rows_that_pad_have_a_tile_of_tokens_where_rows_do(
    case: tuple[Buckets, StepInputs],
) -> None:
    buckets, inputs = case
    padded = pad(inputs, buckets, POOL)
    if buckets.row_is_tile:
        assert np.diff(padded.inputs.cumulative_sequence_lengths).max() <= padded.query_tile


def test_padding_is_cut_into_tiles_where_rows_are() -> None:
    inputs = step([8, 8, 8, 8, 1], [0] * 5, 3, [4], 4)
    for is_tile, wanted in ((True, [8, 8, 8, 7]), (False, [16, 15])):
        buckets = Buckets(64, 8, 16, 4, row_is_tile=is_tile)
        padded = pad(inputs, buckets, POOL).inputs
        new = np.diff(padded.cumulative_sequence_lengths)[5:]
        assert new[new > 0].tolist() == wanted
        assert buckets.spare_blocks == 8, "31 tokens"
    assert Buckets(64, 8, 16, 16, row_is_tile=True).spare_blocks == 4, "half empty ones"


def test_rows_that_pad_leave_states_in_one_slot() -> None:
    inputs = step([5, 1], [0, 9], 3, [4, 5], 4)
    buckets = Buckets(64, 8, 32, 4, row_is_tile=True)
    assert pad(inputs, buckets, 100, 7).inputs.state_reads is None
    reads, writes = np.array([0, 3], np.int32), np.array([2, 1], np.int32)
    for counts in ([5, 1], [1, 1]):
        inputs = step(counts, [0, 9], 3, [1], 4)
        padded = pad(
            replace(inputs, state_reads=reads, state_writes=writes), buckets, 100, 7
        ).inputs
        assert padded.state_reads is not None
        assert padded.state_writes is not None
        more = len(padded.block_table) - 2
        assert padded.state_reads.tolist() == [0, 3, *[0] * more]
        assert padded.state_writes.tolist() == [2, 1, *[7] * more]
        assert padded.state_reads.dtype == padded.state_writes.dtype == np.int32


@settings(max_examples=examples(300), deadline=None)
@given(steps() | steps(decoding=True))
def test_every_shape_is_one_of_those_stated(case: tuple[Buckets, StepInputs]) -> None:
    buckets, inputs = case
    padded = pad(inputs, buckets, POOL)
    assert padded.shape in buckets.shapes()
    new = np.diff(inputs.cumulative_sequence_lengths)
    decodes = set(new.tolist()) == {1}
    shape = padded.shape
    assert (shape.query_tile == 1) == (decodes or buckets.tile_tokens == 1)
    if decodes:
        assert shape in buckets.decode_shapes()
        assert shape.num_tokens == shape.num_rows == shape.num_logits
    assert shape.num_tokens < 2 * len(inputs.input_ids), "less than half is padding"
    assert shape.num_rows <= 2 * size_of(len(new), 2 * buckets.max_rows)
    assert pad(inputs, buckets, POOL + 5).shape == shape


def test_the_number_of_shapes() -> None:
    """Of an engine with its defaults, 4096 tokens of context and blocks of 16."""
    buckets = Buckets(max_tokens=512, max_rows=64, max_model_len=4096, block_size=16)
    assert len(buckets.decode_shapes()) == 7 * 9
    tokens, rows, widths, tiles = 10, 8, 9, 2
    few_logits = tokens * rows * widths * tiles
    assert len(buckets.shapes()) <= 7 * 9 + few_logits * tokens // 2
    assert buckets.spare_blocks == 16, "255 tokens"


def test_larger_steps_have_no_smaller_sizes() -> None:
    for maximum in (1, 2, 3, 8, 9, 100, 512):
        sizes = [size_of(count, maximum) for count in range(1, maximum + 1)]
        assert sizes == sorted(sizes)
        assert sorted(set(sizes)) == sizes_up_to(maximum)
        assert all(count <= size for count, size in enumerate(sizes, 1))
    buckets = Buckets(max_tokens=300, max_rows=20, max_model_len=64, block_size=4)
    shapes = [pad(step([1] * n, [5] * n, 2, [0], 4), buckets, POOL).shape for n in range(1, 21)]
    for smaller, larger in pairwise(shapes):
        assert smaller.num_rows <= larger.num_rows
    chunks = [pad(step([n], [0], 16, [0], 4), buckets, POOL).shape for n in range(2, 65)]
    for smaller, larger in pairwise(chunks):
        assert smaller.num_tokens <= larger.num_tokens
        assert smaller.query_tile <= larger.query_tile


def test_examples() -> None:
    buckets = Buckets(max_tokens=64, max_rows=8, max_model_len=32, block_size=4)
    decode = pad(step([1, 1, 1], [4, 0, 9], 3, [0, 1, 2], 4), buckets, 100)
    assert decode.shape == StepShape(4, 4, 4, 4, 1)
    assert decode.inputs.block_table[3].tolist() == [100, 0, 0, 0]
    mixed = pad(step([5, 1], [0, 9], 3, [4, 5], 4), buckets, 100)
    assert mixed.shape == StepShape(8, 4, 4, 4, 8)
    assert mixed.inputs.cumulative_sequence_lengths.tolist() == [0, 5, 6, 8, 8]
    assert mixed.inputs.block_table[2:].tolist() == [[100, 0, 0, 0], [0, 0, 0, 0]]
    assert mixed.inputs.attention_metadata.tolist() == [5, 10, 10]
    assert mixed.inputs.logits_indices.tolist() == [4, 5, 5, 5]
    narrow = pad(step([4, 4, 4, 4, 1], [0] * 5, 1, [3], 4), buckets, 100)
    assert np.diff(narrow.inputs.cumulative_sequence_lengths[5:]).tolist() == [4, 4, 4, 3, 0] + [
        0
    ] * (narrow.shape.num_rows - 10)
    assert narrow.inputs.block_table[5:9, 0].tolist() == [100, 101, 102, 103]
    every = pad(step([4, 3], [0, 0], 1, list(range(7)), 4), buckets, 100)
    assert every.shape == StepShape(8, 4, 1, 8, 8), "more logits than rows: one a token"
    some = pad(step([30, 1], [0, 9], 8, [2, 5, 8, 11, 30], 4), buckets, 100)
    assert some.shape == StepShape(32, 4, 8, 8, 64), "no more than there may be wanted"
    assert some.inputs.logits_indices.tolist() == [2, 5, 8, 11, 30, 30, 30, 30]


def test_rows_at_the_limits() -> None:
    buckets = Buckets(max_tokens=40, max_rows=5, max_model_len=32, block_size=4)
    full = pad(step([4, 4, 4, 4, 2], [0] * 5, 1, [0], 4), buckets, POOL)
    assert full.shape == StepShape(32, 10, 1, 10, 8), "five rows and four of padding"
    assert full.shape in buckets.shapes()
    idle = pad(step([1, 0, 0], [0, 3, 0], 1, [0], 4), buckets, POOL)
    assert idle.shape == StepShape(1, 4, 1, 4, 8), "a row without new tokens does not decode"
    assert np.diff(idle.inputs.cumulative_sequence_lengths).tolist() == [1, 0, 0, 0]
    assert idle.inputs.past_sequence_lengths.tolist() == [0, 3, 0, 0]


@pytest.mark.parametrize(
    ("new", "width", "words"),
    [
        ([9, 8], 4, "17 tokens .* at most 16; lower max_num_batched_tokens"),
        ([1] * 5, 1, "5 rows .* at most 4; lower max_num_seqs"),
        ([2], 5, "5 blocks a row .* at most 4; lower max_model_len"),
    ],
)
def test_a_step_that_no_shape_holds_is_refused(new: list[int], width: int, words: str) -> None:
    buckets = Buckets(max_tokens=16, max_rows=4, max_model_len=16, block_size=4)
    with pytest.raises(ProviderError, match=words):
        pad(step(new, [0] * len(new), width, [0], 4), buckets, POOL)


class Bucketed:
    """A tiny artifact decomposed for compiled shapes, on the CPU, over a pool with spare blocks."""

    block_size, num_blocks = 4, 5 * ROW

    def __init__(self, artifact: Artifact, buckets: Buckets, garbage: float) -> None:
        lowered = retype(artifact.load_graph("paged"), artifact.read_tensor)
        model = decompose(set_accuracy(lowered.model, 1).model, bounds="shapes").model
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        values = [ort_value(value) for value in lowered.attached.values()]
        options.add_external_initializers(list(lowered.attached), values)
        self.session = start_session(model.SerializeToString(), artifact.path, options)
        spec = artifact.manifest.model
        self.buckets = buckets
        shape = (
            self.num_blocks + buckets.spare_blocks,
            self.block_size,
            spec.num_kv_heads,
            spec.head_size,
        )
        self.caches = {
            info.name: np.zeros(shape, np.float32)
            for info in model.graph.input
            if info.name.startswith("past_key_values.")
        }
        random = np.random.default_rng(0)
        for cache in self.caches.values():
            spare = cache[self.num_blocks :]
            spare[:] = random.standard_normal(spare.shape) * garbage
        assert {info.type.tensor_type.elem_type for info in model.graph.input} == {
            onnx.TensorProto.INT64,
            onnx.TensorProto.INT32,
            onnx.TensorProto.FLOAT,
            onnx.TensorProto.INT8,
        }

    def run(self, inputs: StepInputs, *, padded: bool) -> np.ndarray:
        """Logits of one step; the caches go on from it."""
        made = (
            pad(inputs, self.buckets, self.num_blocks)
            if padded
            else PaddedStep(inputs, self.buckets.tile_tokens, len(inputs.logits_indices))
        )
        feeds = {name: getattr(made.inputs, name) for name in FIELDS}
        feeds[c.QUERY_TILE] = np.zeros(made.query_tile, np.int8)
        presents = [name.replace("past_key_values", "present") for name in self.caches]
        logits, *caches = self.session.run([c.LOGITS, *presents], {**feeds, **self.caches})
        self.caches = dict(zip(self.caches, caches, strict=True))
        return logits[: made.num_logits]


def workload() -> Iterator[StepInputs]:
    """Two prompts, one in chunks, then decoding, speculation of three tokens, and a late prompt."""
    size = Bucketed.block_size
    yield step([13, 5], [0, 0], 8, [12, 17], size)
    yield step([7, 11], [13, 5], 8, [], size)
    yield step([1, 1], [20, 16], 6, [0, 1], size)
    yield step([3, 3], [21, 17], 6, [0, 1, 2, 3, 4, 5], size)
    yield step([1, 1, 1], [24, 20, 0], 7, [0, 1, 2], size)
    yield step([1, 1, 9, 2], [25, 21, 1, 0], 7, [0, 1, 10, 12], size)


@pytest.mark.parametrize(
    ("family", "precision"),
    [("llama", "fp32"), ("mistral-window", "fp16"), ("qwen2", "int8"), ("qwen3", "int4")],
)
def test_padding_changes_no_logits(
    tiny_artifact: ArtifactMaker, family: str, precision: str
) -> None:
    artifact = Artifact.read(tiny_artifact(family, precision))
    buckets = Buckets(max_tokens=40, max_rows=5, max_model_len=33, block_size=4, tile_tokens=16)
    plain = Bucketed(artifact, buckets, 0)
    clean, poisoned = Bucketed(artifact, buckets, 0), Bucketed(artifact, buckets, 1e4)
    shapes = set()
    for inputs in workload():
        expected = plain.run(inputs, padded=False)
        found, other = clean.run(inputs, padded=True), poisoned.run(inputs, padded=True)
        shapes.add(pad(inputs, buckets, Bucketed.num_blocks).shape)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        np.testing.assert_array_equal(found, other, "whatever the spare blocks hold")
        for name, cache in plain.caches.items():
            real = slice(Bucketed.num_blocks)
            np.testing.assert_allclose(clean.caches[name][real], cache[real], atol=1e-5)
            np.testing.assert_array_equal(poisoned.caches[name][real], clean.caches[name][real])
            assert clean.caches[name][Bucketed.num_blocks :].any(), "padding wrote there"
    assert len(shapes) >= 4


@pytest.mark.parametrize(
    ("blocks", "widths"),
    [(1, [1]), (3, [3]), (4, [4]), (5, [4, 5]), (16, [4, 16]), (100, [4, 16, 64, 100])],
)
def test_few_widths_are_powers_of_four(blocks: int, widths: list[int]) -> None:
    buckets = Buckets(512, 64, max_model_len=16 * blocks, block_size=16, few_widths=True)
    assert buckets.widths == widths
    assert [buckets.width_of(width) for width in widths] == widths
    assert buckets.width_of(1) == widths[0]
    assert {shape.table_width for shape in buckets.shapes()} == set(widths)
