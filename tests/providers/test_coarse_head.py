"""The cpu provider's output head, where rows ask for their largest logits alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.providers.base import LoadOptions, Model, StepInputs
from onnxport.providers.cpu import lowering
from onnxport.providers.cpu.library import matmul_isa
from onnxport.providers.features import Attention
from tests.providers.conftest import WIDE_VOCAB, ArtifactMaker
from tests.providers.models import opened
from tests.serving.samplers import native

pytestmark = pytest.mark.skipif(
    matmul_isa() is None, reason="the kernel was not built, or this processor lacks what it needs"
)
Floats = NDArray[np.float32]
FIRST_CALLS = 10  # in which four bits of the weights are made, and some more
HIDDEN = 64
ROWS = 8


def inputs_of(seeds: list[int], new: int = 8, block_size: int = 8) -> StepInputs:
    """As many random tokens of each row, and logits after the last."""
    rows = len(seeds)
    blocks = -(-new // block_size)
    ids = [np.random.default_rng(seed).integers(3, 150, new) for seed in seeds]
    return StepInputs(
        input_ids=np.concatenate(ids),
        block_table=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
        cumulative_sequence_lengths=np.arange(0, rows * new + 1, new, dtype=np.int32),
        past_sequence_lengths=np.zeros(rows, np.int32),
        attention_metadata=np.array([new] * 3, np.int32),
        logits_indices=np.arange(new - 1, rows * new, new, dtype=np.int32),
    )


def step(
    model: Model,
    seeds: list[int],
    exact: list[int] | None,
    allowed: NDArray[np.bool_] | None = None,
) -> Floats:
    """Logits of `inputs_of`, [len(seeds), vocab]."""
    inputs = replace(
        inputs_of(seeds),
        exact_logits=None if exact is None else np.array(exact, np.int32),
        allowed_tokens=None if allowed is None else words_of(allowed),
    )
    return model.run(inputs).copy()


def words_of(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Masks of rows, as the graph takes them, of [rows, vocab]."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def check(found: Floats, wanted: Floats, exact: list[int]) -> None:
    """Check what `Model.run` promises."""
    for row, (got, whole, count) in enumerate(zip(found, wanted, exact, strict=True)):
        least = np.partition(whole, -count)[-count]
        counts = whole >= least
        assert got[counts].tobytes() == whole[counts].tobytes(), (row, count)
        assert (got[~counts] < least).all(), (row, count)


@pytest.fixture(scope="module")
def model(wide_artifact: Path) -> Iterator[Model]:
    """A model whose head is ready."""
    with opened(wide_artifact, "custom") as loaded:
        for seed in range(FIRST_CALLS):
            check(step(loaded, [seed], [1]), step(loaded, [seed], None), [1])
        yield loaded


@pytest.mark.parametrize("exact", [[1], [7], [1, 1], [5, 1, 2], [0]])
def test_the_largest_logits_are_what_they_would_be(model: Model, exact: list[int]) -> None:
    for seed in range(20):
        seeds = [100 * seed + row for row in range(len(exact))]
        counts = [count or WIDE_VOCAB for count in exact]
        check(step(model, seeds, exact), step(model, seeds, None), counts)


def test_it_does_not_compute_the_others(model: Model) -> None:
    """Nearly all of them, once it has seen some steps; all of them when nothing is said."""
    whole = step(model, [3], None)
    few = step(model, [3], [1])
    assert (few != whole).mean() > 0.5
    assert step(model, [3], None).tobytes() == whole.tobytes()
    assert step(model, [3], [0]).tobytes() == whole.tobytes()


@pytest.mark.parametrize("share", [0.0005, 0.1, 0.9])
def test_the_largest_logits_of_what_is_allowed(model: Model, share: float) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        allowed = rng.random((3, WIDE_VOCAB)) < share
        allowed[:, 17] = True
        allowed[1] |= seed % 2 == 0
        seeds, counts = [seed, 100 + seed, 200 + seed], [1, 5, contract.ALL_ALLOWED]
        found, whole = step(model, seeds, counts, allowed), step(model, seeds, None)
        for row, count in enumerate(counts):
            some = allowed[row]
            number = some.sum() if count == contract.ALL_ALLOWED else min(count, some.sum())
            check(found[row : row + 1, some], whole[row : row + 1, some], [int(number)])
        assert np.isfinite(found).all()


def test_it_reads_no_weights_of_what_is_not(model: Model) -> None:
    allowed = np.zeros((1, WIDE_VOCAB), bool)
    allowed[0, [50, 9000]] = True
    found, whole = step(model, [3], [1], allowed), step(model, [3], None)
    assert (found[:, allowed[0]] == whole[:, allowed[0]]).sum() >= 1
    assert np.mean(found == np.finfo(np.float32).min) > 0.99
    assert step(model, [3], None).tobytes() == whole.tobytes()


def test_a_number_that_is_written_while_it_runs(model: Model) -> None:
    """Whenever that is, the tokens that may come have their logits.

    Steps of many tokens, and more of them if need be: whoever writes may get no core before a step
    has ended.
    """
    allowed = np.random.default_rng(1).random((ROWS, WIDE_VOCAB)) < 0.3
    words = words_of(allowed)
    whole = inputs_of([*range(ROWS)], new=96, block_size=model.capabilities.block_size)
    began = time.perf_counter()
    wanted = model.run(whole).copy()
    length_s = time.perf_counter() - began
    exact = np.zeros(ROWS, np.int32)
    masks = np.zeros_like(words)
    inputs = replace(whole, exact_logits=exact, allowed_tokens=masks)
    was_early = False
    for wait_s in np.tile(np.linspace(0, 1.2 * length_s, 100), 20).tolist():
        exact[:] = 0
        masks[:] = 0

        def write(wait_s: float = wait_s) -> None:
            time.sleep(wait_s)
            masks[:] = words
            native().fence()
            exact[:] = 1

        thread = threading.Thread(target=write)
        thread.start()
        found = model.run(inputs).copy()
        thread.join()
        for row in range(ROWS):
            check(found[row : row + 1, allowed[row]], wanted[row : row + 1, allowed[row]], [1])
        was_early |= bool((found != wanted).any())
        if was_early and wait_s > length_s:
            break
    assert was_early


def test_a_number_for_each_row(model: Model) -> None:
    with pytest.raises(ProviderError, match="a number for each of 1 rows, found 2"):
        step(model, [3], [1, 1])
    check(step(model, [3], [1]), step(model, [3], None), [1])


def test_it_can_be_forbidden(wide_artifact: Path, model: Model) -> None:
    assert model.capabilities.takes_exact_logits
    with opened(wide_artifact, "custom", coarse_head=False) as plain:
        assert not plain.capabilities.takes_exact_logits
        wanted = step(model, [3], None).tobytes()
        for _ in range(FIRST_CALLS):
            assert step(plain, [3], [1]).tobytes() == wanted


@pytest.mark.parametrize(
    ("attention", "level"),
    [pytest.param("custom", 1, id="float32"), pytest.param("decomposed", None, id="decomposed")],
)
def test_where_the_product_is_not_ours(
    wide_artifact: Path, attention: Attention, level: int | None
) -> None:
    with opened(wide_artifact, attention, matmul_accuracy_level=level) as plain:
        assert not plain.capabilities.takes_exact_logits
        assert step(plain, [3], [1]).tobytes() == step(plain, [3], None).tobytes()


def test_a_small_vocabulary_has_none(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "int4"), "custom") as small:
        assert not small.capabilities.takes_exact_logits


def test_a_graph_that_was_kept_has_it(wide_artifact: Path, model: Model, tmp_path: Path) -> None:
    for _ in range(2):
        with opened(wide_artifact, "custom", graph_cache=tmp_path) as kept:
            assert kept.capabilities.takes_exact_logits
            for _ in range(FIRST_CALLS):
                check(step(kept, [3], [1]), step(model, [3], None), [1])


def test_with_slots_for_adapters(wide_artifact: Path) -> None:
    with opened(wide_artifact, "custom", max_adapters=1) as slots:
        assert slots.capabilities.takes_exact_logits
        whole = step(slots, [3], None)
        for _ in range(FIRST_CALLS):
            check(step(slots, [3], [2]), whole, [2])


def test_its_memory_is_counted(wide_artifact: Path) -> None:
    """As that of weights: a cache that takes a share of the rest is smaller."""
    artifact = Artifact.read(wide_artifact)
    sizes = []
    for coarse_head in (False, True):
        options = LoadOptions(coarse_head=coarse_head)
        graph = artifact.load_graph("paged")
        cache = ("float32", "tiled")
        groups = LayerGroups.single(artifact.manifest.model.num_layers)
        chosen = (graph, artifact, options, cache, None)
        steps = list(
            lowering.lower(*chosen, groups=groups, int8=True, summaries=True)  # type: ignore[arg-type]
        )
        lowered = lowering.lowered_graph(artifact, steps, is_exact=False, is_native=True)
        sizes.append(lowered.stored_bytes)
    assert sizes[1] - sizes[0] == HIDDEN * WIDE_VOCAB // 2
