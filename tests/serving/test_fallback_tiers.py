"""K/V in host memory and on disk when a device is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import OnnxportError
from onnxport.providers.base import Capabilities
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving import offload
from onnxport.serving.params import SamplingParams
from tests.serving.helpers import alone, null_engine, null_model, run, submit, tokens
from tests.serving.test_fallback import at, spare

MIB = 1 << 20
PREFIX = [(i * 7) % 500 for i in range(64)]


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("block_size", [4, 16])
def test_what_left_the_pool_serves_the_next_provider(number: int, block_size: int) -> None:
    """Blocks of 16 tokens and of 32 are made of the same units; blocks of 4 are not."""
    losing = False
    engine = null_engine(
        block_size=block_size,
        num_blocks=96 // block_size,
        max_num_batched_tokens=64,
        kv_host_memory=MIB,
        preemption="recompute",
        lost_at=lambda operation: losing and operation >= before + number,
        fallbacks=[spare(block_size=32, num_blocks=4)],
    )
    submit(engine, "a", [*PREFIX, 1])
    run(engine)
    for index in range(4):
        submit(engine, f"fill{index}", [300 + index] * 60, SamplingParams(max_tokens=1))
    run(engine)
    saved = engine.stats().num_blocks_saved
    assert saved >= 64 // block_size
    before = null_model(engine).num_operations
    losing = True
    submit(engine, "b", [*PREFIX, 2])
    deltas = run(engine)["b"]
    assert tokens(deltas) == alone([*PREFIX, 2])
    assert bool(engine.losses)
    cached = deltas[0].num_cached_tokens
    assert cached == 64 if block_size == 16 else cached in (0, 64)
    stats = engine.stats()
    assert (stats.num_blocks_saved >= saved, stats.num_tier_errors) == (True, 0)
    engine.close()


def test_what_is_on_disk_is_found_by_the_next_provider(tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 16, "num_blocks": 8, "kv_disk": tmp_path}
    engine = null_engine(**options, max_num_batched_tokens=64)
    submit(engine, "a", [*PREFIX, 1])
    run(engine)
    engine.close()
    fallbacks = [spare(block_size=32, num_blocks=4)]
    engine = null_engine(
        **options, max_num_batched_tokens=64, lost_at=at(4), fallbacks=fallbacks
    )  # 0 to 3 are the trial
    submit(engine, "b", [*PREFIX, 2])
    deltas = run(engine)["b"]
    assert engine.losses
    assert deltas[0].num_cached_tokens == 64
    assert tokens(deltas) == alone([*PREFIX, 2])
    engine.close()


class OtherModel(NullModel):
    """Its K/V are of other weights."""

    @property
    def capabilities(self) -> Capabilities:
        found = super().capabilities
        return replace(found, kv_format=replace(found.kv_format, model="other"))


def test_kv_of_another_model_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    other = OtherModel(NullOptions(block_size=16, num_blocks=8, max_model_len=512))
    losing = False
    engine = null_engine(
        block_size=16,
        num_blocks=6,
        max_num_batched_tokens=64,
        kv_host_memory=MIB,
        preemption="recompute",
        lost_at=lambda _: losing,
        fallbacks=[other],
    )
    for name, prompt in (("a", [*PREFIX, 1]), ("fill", [3] * 90)):
        submit(engine, name, prompt, SamplingParams(max_tokens=1))
        run(engine)
    assert engine.stats().host_tier_bytes > 0
    losing = True
    submit(engine, "b", [*PREFIX, 2])
    deltas = run(engine)["b"]
    assert deltas[0].num_cached_tokens == 0
    assert tokens(deltas) == alone([*PREFIX, 2])
    assert "is dropped" in caplog.text


def test_tiers_stay_where_new_ones_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model that needs them is passed over, and the next one has the old ones."""
    losing = False
    other = OtherModel(NullOptions(block_size=16, num_blocks=6, max_model_len=512))
    engine = null_engine(
        block_size=16,
        num_blocks=6,
        max_num_batched_tokens=64,
        kv_host_memory=4 * 16 * 2 * 8,
        kv_disk=tmp_path,
        preemption="recompute",
        lost_at=lambda _: losing,
        fallbacks=[other, spare(block_size=16, num_blocks=6)],
    )

    def ask(name: str, prompt: list[int]) -> int:
        submit(engine, name, prompt, SamplingParams(temperature=0.0, max_tokens=1))
        deltas = run(engine)[name]
        assert tokens(deltas) == alone(prompt)[:1]
        return deltas[0].num_cached_tokens

    def fail(*_: object) -> None:
        raise OnnxportError("the K/V folder cannot be used")

    assert [ask("a", [*PREFIX, 1]), ask("fill", [3] * 90)] == [0, 0]
    monkeypatch.setattr(offload, "open_store", fail)
    losing = True
    assert ask("b", [*PREFIX, 2]) == 64
    assert [ask("fill", [4] * 90), ask("again", [*PREFIX, 3])] == [0, 64]
    assert [(one.provider, one.replaced_by) for one in engine.losses][-1][1] == "null"
    assert engine.stats().num_tier_errors == 0
    engine.close()


def test_tiers_are_of_the_model_that_filled_them(caplog: pytest.LogCaptureFixture) -> None:
    """The third model is like the first one, and finds nothing of the second one's."""
    other = OtherModel(
        NullOptions(block_size=16, num_blocks=6, max_model_len=512, lost_at=lambda _: losing > 1)
    )
    losing = 0
    engine = null_engine(
        block_size=16,
        num_blocks=6,
        max_num_batched_tokens=64,
        kv_host_memory=MIB,
        preemption="recompute",
        lost_at=lambda _: losing > 0,
        fallbacks=[other, spare(block_size=16, num_blocks=6)],
    )
    for number, last in ((1, 5), (2, 6)):
        losing = number
        for name, prompt in (("a", [*PREFIX, last]), ("fill", [3] * 90)):
            submit(engine, name, prompt, SamplingParams(temperature=0.0, max_tokens=1))
            deltas = run(engine)[name]
            assert deltas[0].num_cached_tokens == 0
            assert tokens(deltas) == alone(prompt)[:1]
    assert caplog.text.count("is dropped") == 2


def test_what_is_cached_on_a_device_that_dies_at_the_end_is_not_waited_for(tmp_path: Path) -> None:
    losing = False
    engine = null_engine(
        block_size=16,
        num_blocks=8,
        kv_disk=tmp_path,
        lost_at=lambda _: losing,
        max_num_batched_tokens=64,
    )
    submit(engine, "a", PREFIX)
    run(engine)
    losing = True
    engine.close()
    assert null_model(engine).lost
    assert null_model(engine).closed


class Halves(NullModel):
    """Its canonical form is float16, in which all its tokens and positions are exact."""

    dtype = "float16"

    @property
    def capabilities(self) -> Capabilities:
        found = super().capabilities
        return replace(found, kv_format=replace(found.kv_format, dtype=self.dtype))

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        return np.clip(super().read_blocks(blocks), -2048, 2047).astype(self.dtype)

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        assert content.dtype == self.dtype
        super().write_blocks(blocks, content.astype(np.int64))


class Singles(Halves):
    dtype = "float32"


@pytest.mark.parametrize("disk", [False, True])
def test_the_next_provider_may_keep_kv_in_another_type(tmp_path: Path, disk: bool) -> None:
    """What it finds is converted; what it leaves is of its own type."""
    losing = False
    options: dict[str, Any] = {"kv_host_memory": 20 * 64 if disk else MIB}
    if disk:  # host memory for a few blocks, all others go on
        options["kv_disk"] = tmp_path
    engine = null_engine(
        model_type=Halves,
        block_size=16,
        num_blocks=6,
        max_num_batched_tokens=64,
        preemption="recompute",
        lost_at=lambda _: losing,
        fallbacks=[Singles(NullOptions(block_size=32, num_blocks=3, max_model_len=512))],
        **options,
    )
    other = PREFIX[::-1]

    def ask(name: str, prompt: list[int]) -> int:
        submit(engine, name, prompt, SamplingParams(temperature=0.0, max_tokens=2))
        deltas = run(engine)[name]
        assert tokens(deltas) == alone(prompt)[:2]
        return deltas[0].num_cached_tokens

    assert ask("a", [*PREFIX, 1]) == 0
    assert ask("fill", [3] * 90) == 0
    if disk:
        assert engine._runtime.offloader is not None
        assert engine._runtime.offloader.store.persist(60.0)
    losing = True
    assert ask("b", [*PREFIX, 2]) == 64
    losing = False
    assert engine.losses
    assert ask("c", [*other, 1]) == 0
    assert ask("fill again", [4] * 90) == 0
    assert ask("d", [*other, 2]) == 64
    assert ask("e", [*PREFIX, 3]) == 64
    assert engine.stats().num_tier_errors == 0
    engine.close()
