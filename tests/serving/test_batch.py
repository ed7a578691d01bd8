"""Packing: the exact arrays of a plan."""

import numpy as np

from onnxport.serving.batch import BatchPacker
from tests.serving.bench import Bench, saying


def packed(bench: Bench, packer: BatchPacker) -> dict[str, list[object]]:
    plan = bench.scheduler.plan()
    reservation = bench.scheduler.reserve(plan)
    inputs = packer.pack(plan)
    arrays = {name: getattr(inputs, name) for name in inputs.__slots__}
    assert arrays.pop("more_block_tables") == ()
    result = {name: array.tolist() for name, array in arrays.items() if array is not None}
    bench.scheduler.commit(plan, reservation)
    for row in plan.sampled:
        plan.requests[row].tokens.append(7)
    return result


def test_a_prefill_a_chunk_and_decodes_in_one_batch() -> None:
    bench = Bench(num_blocks=20, budget=8)
    packer = BatchPacker(max_num_seqs=8, max_num_batched_tokens=8)
    bench.submit("a", 5)
    assert packed(bench, packer) == {
        "input_ids": [0, 1, 2, 3, 4],
        "block_table": [[0, 1]],
        "cumulative_sequence_lengths": [0, 5],
        "past_sequence_lengths": [0],
        "attention_metadata": [5, 5, 5],
        "logits_indices": [4],
    }
    bench.submit("b", 2)
    bench.submit("c", 14)
    assert packed(bench, packer) == {
        "input_ids": [7, 0, 1, 0, 1, 2, 3, 4],
        "block_table": [[0, 1], [2, 0], [3, 4]],
        "cumulative_sequence_lengths": [0, 1, 3, 8],
        "past_sequence_lengths": [5, 0, 0],
        "attention_metadata": [5, 6, 6],
        "logits_indices": [0, 2],
    }
    assert packed(bench, packer) == {
        "input_ids": [7, 7, 5, 6, 7, 8, 9, 10],
        "block_table": [[0, 1, 0], [2, 0, 0], [3, 4, 5]],
        "cumulative_sequence_lengths": [0, 1, 2, 8],
        "past_sequence_lengths": [6, 2, 5],
        "attention_metadata": [6, 11, 11],
        "logits_indices": [0, 1],
    }


def test_a_batch_that_samples_nothing_asks_for_one_row_of_logits() -> None:
    bench = Bench(num_blocks=20, rows=4, budget=4)
    bench.submit("a", 6)
    arrays = packed(bench, BatchPacker(8, 4))
    assert arrays["logits_indices"] == [3]


def test_buffers_are_reused_and_grow() -> None:
    bench = Bench(num_blocks=100, rows=2, budget=300)
    packer = BatchPacker(max_num_seqs=2, max_num_batched_tokens=300)
    bench.submit("a", 200)
    first = packed(bench, packer)
    assert first["block_table"] == [list(range(50))]
    assert packed(bench, packer)["block_table"] == [list(range(51))]
    plan = bench.scheduler.plan()
    bench.scheduler.reserve(plan)
    assert np.shares_memory(packer.pack(plan).input_ids, packer.pack(plan).input_ids)


def test_an_array_stays_the_same_object_while_its_shape_does() -> None:
    bench = Bench(num_blocks=100, rows=2, budget=300)
    packer = BatchPacker(max_num_seqs=2, max_num_batched_tokens=300)
    bench.submit("a", 5)
    packed(bench, packer)
    steps = []
    for _ in range(4):  # behind 5, 6, 7 and 8 tokens, in blocks of 4
        plan = bench.scheduler.plan()
        reservation = bench.scheduler.reserve(plan)
        steps.append(packer.pack(plan))
        bench.scheduler.commit(plan, reservation)
        plan.requests[0].tokens.append(7)
    assert all(one.input_ids is steps[0].input_ids for one in steps)
    assert all(one.past_sequence_lengths is steps[0].past_sequence_lengths for one in steps)
    assert steps[1].block_table is steps[2].block_table
    assert steps[2].block_table is not steps[3].block_table
    assert steps[3].block_table.tolist() == [[0, 1, 2]]
    assert steps[3].past_sequence_lengths.tolist() == [8]


def test_what_a_wider_table_leaves_behind_is_not_read() -> None:
    bench = Bench(num_blocks=100, rows=3, budget=300)
    packer = BatchPacker(max_num_seqs=3, max_num_batched_tokens=300)
    bench.submit("a", 14)
    bench.submit("b", 2)
    assert packed(bench, packer)["block_table"] == [[0, 1, 2, 3], [4, 0, 0, 0]]
    bench.submit("c", 2)
    assert packed(bench, packer)["block_table"] == [[0, 1, 2, 3], [4, 0, 0, 0], [5, 0, 0, 0]]


def test_guesses_and_logits_of_several_tokens() -> None:
    bench = Bench(num_blocks=100, rows=3, budget=300)
    packer = BatchPacker(max_num_seqs=3, max_num_batched_tokens=300)
    bench.submit("a", 4)
    bench.submit("b", 6)
    packed(bench, packer)
    rows = bench.scheduler.plan().requests
    plan = bench.scheduler.plan(guess=saying({rows[1]: (3, 5)}))
    bench.scheduler.reserve(plan)
    inputs = packer.pack(plan)
    assert inputs.input_ids.tolist() == [7, 7, 3, 5]
    assert inputs.cumulative_sequence_lengths.tolist() == [0, 1, 4]
    assert inputs.logits_indices.tolist() == [0, 1, 2, 3]
