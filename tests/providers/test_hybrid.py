"""Layers in groups with block tables of their own: the same numbers, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CapacityError
from onnxport.providers.base import Model
from onnxport.providers.cpu import provider as cpu
from onnxport.providers.features import Attention
from tests.conformance.models import step
from tests.exporter.checkpoints import VOCAB
from tests.providers.conftest import ArtifactMaker
from tests.providers.hybrid import Sequences
from tests.providers.models import opened, run_rows
from tests.providers.test_graph_cache import graphs

# New tokens of three sequences in each step: prompts whole and in chunks, then decoding, with
# steps that begin at, before and behind the border of a block and of a window.
STEPS = (
    (40, 7, 0),
    (1, 8, 33),
    (1, 1, 15),
    (24, 1, 0),
    (1, 1, 1),
    (1, 30, 17),
    *[(1, 1, 1)] * 6,
)
Maker = Callable[[], Path]


def tokens(step: int, count: int) -> list[int]:
    return np.random.default_rng(step).integers(3, VOCAB, count).tolist()


@pytest.fixture(params=["alternating", "gemma3", "gpt-oss", "mistral-window"])
def windowed(
    request: pytest.FixtureRequest, tiny_artifact: ArtifactMaker, alternating_artifact: Path
) -> Path:
    if request.param == "alternating":
        return alternating_artifact
    return tiny_artifact(request.param, "int4")


GROUPS = {
    "alternating": ((None, 20), 2, 4),  # windows, layers of a group, layers
    "gemma3": ((None, 6, 6), 1, 3),
    "gpt-oss": ((None, 6, 6), 1, 3),
    "mistral-window": ((7,), 2, 2),
}


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        *(("custom", dtype) for dtype in ("float32", "float16", "bfloat16", "int8")),
        ("decomposed", "float32"),
    ],
)
def test_logits_and_caches_are_the_same_bit_for_bit(
    windowed: Path, attention: Attention, dtype: str
) -> None:
    with (
        opened(windowed, attention, kv_cache_dtype=dtype) as hybrid,
        opened(windowed, attention, kv_cache_dtype=dtype, hybrid_kv_cache=False) as plain,
    ):
        check_steps(hybrid, plain)


def check_steps(hybrid: Model, plain: Model) -> None:
    """The same logits and caches in STEPS, with blocks that move in between."""
    assert plain.capabilities.windows == (None,)
    found, expected = Sequences(hybrid, 3, seed=1), Sequences(plain, 3, seed=2)
    for number, counts in enumerate(STEPS):
        new = [tokens(3 * number + row, count) for row, count in enumerate(counts)]
        wanted = expected.run(new)
        assert np.isfinite(wanted).all()
        assert found.run(new).tobytes() == wanted.tobytes(), f"step {number}"
        if number in (2, 7):
            found.move()
    assert found.num_given_away > 3
    assert expected.num_given_away == 0
    check_caches(found, expected)


def check_caches(found: Sequences, expected: Sequences) -> None:
    """What layers still hold is what they hold in the model with one table for all."""
    size = found.groups.block_size
    for row, length in enumerate(found.lengths):
        for layer in range(expected.model.capabilities.kv_format.num_layers):
            theirs = expected.layer_blocks(row, layer)
            ours = found.layer_blocks(row, layer)
            assert ours
            for column, block in ours.items():
                used = min(size, length - column * size)
                left, right = block[:, :, :used], theirs[column][:, :, :used]
                assert left.tobytes() == right.tobytes(), (row, layer, column)


@pytest.mark.parametrize("case", ["alternating", "gemma3", "gpt-oss", "mistral-window"])
def test_memory_is_of_as_many_layers_as_a_group_has(
    case: str,
    tiny_artifact: ArtifactMaker,
    alternating_artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocated: list[int] = []
    allocate = cpu.allocate

    def note(*arguments: Any) -> Any:
        pairs, blocks = allocate(*arguments)
        allocated.append(sum(cache.nbytes for pair in pairs.values() for cache in pair))
        return pairs, blocks

    monkeypatch.setattr(cpu, "allocate", note)
    path = alternating_artifact if case == "alternating" else tiny_artifact(case, "int4")
    windows, places, layers = GROUPS[case]
    with (
        opened(path, "custom") as hybrid,
        opened(path, "custom", hybrid_kv_cache=False) as plain,
    ):
        limits, whole = hybrid.capabilities, plain.capabilities
    assert limits.windows == windows
    assert limits.kv_format.num_layers == places
    assert len(limits.kv_format.places) == (layers if len(windows) > 1 else 0)
    assert (limits.num_blocks, whole.num_blocks) == (64 * len(windows), 64)
    assert limits.kv_tokens == whole.kv_tokens == 1024
    assert limits.kv_block_bytes * layers == whole.kv_block_bytes * places
    assert allocated == [one.num_blocks * one.kv_block_bytes for one in (limits, whole)]
    assert (whole.windows, whole.kv_format.places) == ((None,), ())


def test_one_window_for_all_layers_changes_no_graph(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[bytes] = []
    start = cpu.start_session

    def note(model: bytes, *others: Any) -> Any:
        models.append(model)
        return start(model, *others)

    monkeypatch.setattr(cpu, "start_session", note)
    for hybrid in (True, False):
        with opened(
            tiny_artifact("mistral-window", "int4"), "custom", hybrid_kv_cache=hybrid
        ) as model:
            assert model.capabilities.windows == ((7,) if hybrid else (None,))
    assert models[0] == models[1]


def test_what_no_sequence_outgrows_is_no_window(alternating_artifact: Path) -> None:
    for longest, windows in ((20, (None,)), (21, (None, 20))):
        with opened(alternating_artifact, "custom", max_model_len=longest) as model:
            assert model.capabilities.windows == windows


def test_the_decomposed_graph_has_tables_of_groups(alternating_artifact: Path) -> None:
    """Its steps run in parts, too, where they would take too much memory."""
    with (
        opened(alternating_artifact, "decomposed") as whole,
        opened(alternating_artifact, "decomposed") as parts,
    ):
        assert whole.capabilities.windows == (None, 20)
        assert whole.capabilities.kv_format.places == ((1, 0), (0, 0), (1, 1), (0, 1))
        parts._step_memory = replace(parts._step_memory, most_bytes=0)  # type: ignore[attr-defined]
        found, expected = Sequences(parts, 3, seed=1), Sequences(whole, 3, seed=2)
        for number, counts in enumerate(STEPS):
            new = [tokens(3 * number + row, count) for row, count in enumerate(counts)]
            np.testing.assert_allclose(found.run(new), expected.run(new), rtol=1e-4, atol=1e-4)
        assert found.num_given_away > 3


def test_a_step_without_the_tables_of_all_groups_is_caught(alternating_artifact: Path) -> None:
    with (
        opened(alternating_artifact, "custom") as model,
        pytest.raises(AssertionError, match="each group has a block table"),
    ):
        model.run(step([(tokens(0, 3), 0, [1])]))


def test_a_sequence_may_be_longer_than_what_fits_for_certain(alternating_artifact: Path) -> None:
    """With 20 tokens in sight, no more than three blocks of 16 are held."""
    small = {"kv_cache_tokens": 80, "max_model_len": 112}
    with opened(alternating_artifact, "custom", **small) as model:
        assert (model.capabilities.num_blocks, model.capabilities.kv_tokens) == (10, 80)
        assert model.capabilities.max_model_len == 112
    with pytest.raises(CapacityError, match=r"holds 10 blocks of 16, for 2 groups of layers"):
        opened(alternating_artifact, "custom", kv_cache_tokens=80, max_model_len=113).__enter__()
    with (
        pytest.raises(CapacityError, match=r"holds 5 blocks of 16, 80 tokens; lower"),
        opened(alternating_artifact, "custom", hybrid_kv_cache=False, **small),
    ):
        pass


def test_a_kept_graph_is_of_the_groups_that_are_asked_for(
    alternating_artifact: Path, tmp_path: Path
) -> None:
    given = {"graph_cache": tmp_path, "max_model_len": 64}
    prompt = tokens(0, 50)

    def logits(**options: Any) -> bytes:
        with opened(alternating_artifact, "custom", **given, **options) as model:
            return Sequences(model, 1, seed=0).run([prompt]).tobytes()

    first = logits()
    assert len(graphs(tmp_path)) == 1
    assert logits() == first
    assert len(graphs(tmp_path)) == 1
    assert logits(hybrid_kv_cache=False) == first
    assert len(graphs(tmp_path)) == 2
    assert logits(hybrid_kv_cache=False) == first
    with opened(alternating_artifact, "custom", graph_cache=tmp_path, max_model_len=20) as model:
        assert model.capabilities.windows == (None,)
        run_rows(model, [(prompt[:20], 0, [1, 2])])
    assert len(graphs(tmp_path)) == 2, "the one that has one table was not used again"
