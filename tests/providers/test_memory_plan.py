"""Which memory plan of ONNX Runtime a step gets: that of its number of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.graphs.contract import mask_words
from onnxport.providers.base import StepInputs
from onnxport.providers.memory_plan import MEMORY_PLAN
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened

# Tokens of each row, logits of the last of each, tokens before them.
STEPS = (
    ([1], [1], [20]),
    ([6], [6], [20]),
    ([6], [1], [0]),
    ([1], [1], [40]),
    ([1, 1, 1], [1, 1, 1], [3, 17, 35]),
    ([4, 1], [4, 1], [3, 17]),
    ([9, 1], [1, 1], [0, 50]),
)


class Recorder:
    """An I/O binding that remembers the shapes of what is bound from host memory."""

    def __init__(self, binding: Any) -> None:
        self.binding = binding
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_cpu_input(self, name: str, array: NDArray[Any]) -> None:
        self.shapes[name] = array.shape
        self.binding.bind_cpu_input(name, array)


def step(new: list[int], logits: list[int], past: list[int], block_size: int) -> StepInputs:
    ends = np.cumsum(new)
    totals = np.array(new) + past
    width = int(-(-totals.max() // block_size))
    wanted = [range(end - count, end) for end, count in zip(ends, logits, strict=True)]
    return StepInputs(
        input_ids=np.arange(3, 3 + sum(new), dtype=np.int64),
        block_table=np.arange(len(new) * width, dtype=np.int32).reshape(-1, width),
        cumulative_sequence_lengths=np.array([0, *ends], np.int32),
        past_sequence_lengths=np.array(past, np.int32),
        attention_metadata=np.array([max(new), totals.max(), totals.max()], np.int32),
        logits_indices=np.array([index for one in wanted for index in one], np.int32),
    )


@pytest.mark.parametrize("max_adapters", [0, 1])
def test_it_is_known_by_the_number_of_tokens_alone(
    tiny_artifact: ArtifactMaker, max_adapters: int
) -> None:
    check_plans(tiny_artifact("llama", "int4"), max_adapters=max_adapters)


@pytest.mark.parametrize("coarse_head", [False, True])
def test_logits_that_must_be_exact_do_not_count(wide_artifact: Path, coarse_head: bool) -> None:
    check_plans(wide_artifact, coarse_head=coarse_head)


@pytest.mark.parametrize(("case", "num_tables"), [("gemma2", 2), ("gemma3", 3)])
@pytest.mark.parametrize("max_adapters", [0, 1])
def test_tables_of_several_groups_do_not_count(
    tiny_artifact: ArtifactMaker, case: str, num_tables: int, max_adapters: int
) -> None:
    path = tiny_artifact(case, "int4")
    with opened(path, "custom") as model:
        assert len(model.capabilities.windows) == num_tables
    check_plans(path, max_adapters=max_adapters)


def check_plans(path: Path, **options: object) -> None:
    with opened(path, "custom", **options) as model:
        recorder = model._binding = Recorder(model._binding)  # type: ignore[attr-defined]
        takes = model.capabilities.takes_exact_logits
        words = mask_words(model.capabilities.vocab_size) if takes else 0
        for new, logits, past in STEPS:
            plain = step(new, logits, past, model.capabilities.block_size)
            first, others = plain.block_table, range(1, len(model.capabilities.windows))
            tables = tuple(first + first.size * number for number in others)
            plain = replace(plain, more_block_tables=tables)
            rows = len(plain.logits_indices)
            masks = np.full((rows, words), -1, np.int32)
            masked = replace(plain, exact_logits=np.ones(rows, np.int32), allowed_tokens=masks)
            drawn = replace(masked, races=np.full((rows, 2), 0.5))
            for inputs in (plain, masked, drawn) if takes else (plain,):
                assert np.isfinite(model.run(inputs)).all()
                assert set(recorder.shapes) > {MEMORY_PLAN, "input_ids"}
                dimensions = [size for shape in recorder.shapes.values() for size in shape]
                others = 3 ^ words ^ (2 if takes else 0)  # of the metadata, of masks and races
                assert reduce(xor, dimensions) == sum(new) ^ others


def test_a_decomposed_graph_has_none(tiny_artifact: ArtifactMaker) -> None:
    """The sizes of its tensors depend on more than the tokens."""
    with opened(tiny_artifact("llama", "int4"), "decomposed") as model:
        recorder = model._binding = Recorder(model._binding)  # type: ignore[attr-defined]
        model.run(step([1], [1], [20], model.capabilities.block_size))
        assert MEMORY_PLAN not in recorder.shapes
