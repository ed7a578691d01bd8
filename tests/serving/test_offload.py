"""Blocks that leave the pool and come back: swapping, host memory, disk; the same tokens always."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import CapacityError
from onnxport.kv.disk_file import Entry
from onnxport.kv.pool import BlockPool
from onnxport.providers.base import Capabilities
from onnxport.providers.null import NullModel, NullOptions
from onnxport.providers.rows import convert, element_type
from onnxport.serving import offload
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.offload import Offloader
from onnxport.serving.params import SamplingParams
from onnxport.serving.stored_blocks import are_finite, fault_of
from onnxport.serving.transfer_costs import Costs
from tests.serving.helpers import (
    Clock,
    alone,
    checked_step,
    null_engine,
    null_model,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.watch import Watch

MIB = 1 << 20
PREFIX = [(i * 7) % 500 for i in range(64)]  # sixteen blocks of 4, four of 16
LONG = SamplingParams(temperature=0.0, max_tokens=40)


def crowd(engine: Engine) -> dict[str, int]:
    """Three requests in a pool for two; returns what was preempted, saved and loaded."""
    prompts = {name: [ord(name), *range(100, 115)] for name in "abc"}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, LONG)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == alone(prompt, LONG)
        assert reasons(deltas[name]) == ["length"]
    stats = engine.stats()
    assert stats.num_preemptions > 0
    return {"saved": stats.num_blocks_saved, "loaded": stats.num_blocks_loaded}


def crowded(**options: Any) -> Engine:
    return null_engine(num_blocks=24, max_num_batched_tokens=64, **options)


def computed(engine: Engine) -> int:
    watch = Watch(engine)
    crowd(engine)
    return watch.num_tokens


def test_without_tiers_a_preempted_request_is_computed_again() -> None:
    assert crowd(crowded()) == {"saved": 0, "loaded": 0}


def test_swapping_loads_what_yielded_instead_of_computing_it() -> None:
    engine = crowded(preemption="swap", kv_host_memory=MIB)
    watch = Watch(engine)
    moved = crowd(engine)
    assert moved["saved"] > 5
    assert moved["loaded"] > 5
    plain = crowded()
    assert watch.num_tokens + 4 * moved["loaded"] == computed(plain)
    assert engine.stats().host_tier_bytes > 0


def test_recompute_does_not_save_what_yielded() -> None:
    engine = crowded(preemption="recompute", kv_host_memory=MIB)
    assert crowd(engine)["loaded"] == 0


class Timed(NullModel):
    """Takes time that a test decides, on its clock."""

    clock = Clock()
    run_s = transfer_s = 0.0

    def run(self, inputs: Any) -> Any:
        self.clock.now_s += self.run_s * len(inputs.input_ids)
        return super().run(inputs)

    def _end_transfer(self, written: Any) -> None:
        self.clock.now_s += self.transfer_s
        super()._end_transfer(written)


@pytest.mark.parametrize(("run_s", "transfer_s", "loads"), [(1.0, 0.1, True), (0.001, 50.0, False)])
def test_auto_does_what_is_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, run_s: float, transfer_s: float, loads: bool
) -> None:
    monkeypatch.setattr(Timed, "run_s", run_s)
    monkeypatch.setattr(Timed, "transfer_s", transfer_s)
    monkeypatch.setattr(Timed, "clock", Clock())
    engine = crowded(preemption="auto", kv_host_memory=MIB, model_type=Timed, clock=Timed.clock)
    assert (crowd(engine)["loaded"] > 0) == loads


def test_the_first_transfer_of_a_device_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is prepared then: kernels are loaded, or a graph compiled."""

    class Cold(Timed):
        def _end_transfer(self, written: Any) -> None:
            super()._end_transfer(written)
            self.transfer_s = 0.1

    monkeypatch.setattr(Timed, "run_s", 1.0)
    monkeypatch.setattr(Cold, "transfer_s", 500.0)
    monkeypatch.setattr(Timed, "clock", Clock())
    engine = crowded(preemption="auto", kv_host_memory=MIB, model_type=Cold, clock=Timed.clock)
    assert crowd(engine)["loaded"] > 0


def test_what_moving_costs_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves while it seems dear, and so nothing would tell that it has become cheap."""
    monkeypatch.setattr(offload, "REMEASURED_BLOCKS", 5)
    monkeypatch.setattr(Timed, "run_s", 1.0)
    monkeypatch.setattr(Timed, "transfer_s", 50.0)
    monkeypatch.setattr(Timed, "clock", Clock())
    engine = crowded(preemption="auto", kv_host_memory=MIB, model_type=Timed, clock=Timed.clock)
    monkeypatch.setattr(Timed, "transfer_s", 0.001)
    for _ in range(12):
        crowd(engine)
    assert engine.stats().num_blocks_loaded > 0


@pytest.mark.parametrize(
    ("num_tokens", "num_decodes", "noted"),
    [(16, 0, True), (15, 0, False), (40, 20, True), (40, 21, False), (64, 64, False)],
)
def test_tokens_that_decode_do_not_tell_what_a_prompt_costs(
    num_tokens: int, num_decodes: int, noted: bool
) -> None:
    costs = Costs(block_size=16)
    costs.note_step(2.0, num_tokens, num_decodes)
    assert costs.token_s == (2.0 / num_tokens if noted else None)


def test_saving_does_not_make_computing_look_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timed, "run_s", 0.001)
    monkeypatch.setattr(Timed, "transfer_s", 7.0)
    monkeypatch.setattr(Timed, "clock", Clock())
    engine = crowded(preemption="swap", kv_host_memory=MIB, model_type=Timed, clock=Timed.clock)
    fill(engine)
    assert engine.stats().num_blocks_saved > 5
    assert engine._runtime.offloader is not None
    assert engine._runtime.offloader.costs.token_s == pytest.approx(0.001)


def fill(engine: Engine, number: int = 6) -> None:
    """Overwrite what the pool has cached."""
    for index in range(number):
        submit(engine, f"fill{index}", [300 + index] * 60, SamplingParams(max_tokens=1))
    run(engine)


def ask(engine: Engine, name: str, tail: int, **options: Any) -> int:
    """Ask for the prefix; returns how many of its tokens were cached."""
    prompt = [*PREFIX, tail]
    submit(engine, name, prompt, **options)
    deltas = run(engine)[name]
    assert tokens(deltas) == alone(prompt)
    return deltas[0].num_cached_tokens


def test_a_prefix_comes_back_from_host_memory() -> None:
    engine = null_engine(
        num_blocks=24, kv_host_memory=MIB, preemption="recompute", max_num_batched_tokens=64
    )
    assert ask(engine, "a", 1) == 0
    fill(engine)
    assert ask(engine, "b", 2) == 64
    stats = engine.stats()
    assert stats.num_blocks_loaded >= 16
    assert stats.num_blocks_saved >= 16
    assert stats.num_tier_errors == 0


class Faulty(NullModel):
    """Has K/V in floats, and where one token's were is NaN."""

    token = PREFIX[9]

    @property
    def capabilities(self) -> Capabilities:
        limits = super().capabilities
        return replace(limits, kv_format=replace(limits.kv_format, dtype="float32"))

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        content = super().read_blocks(blocks).astype(np.float32)
        return np.where(content == self.token, np.float32(np.nan), content)

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        super().write_blocks(blocks, content.astype(np.int64))


def test_what_is_no_number_is_not_kept() -> None:
    engine = null_engine(
        num_blocks=24,
        kv_host_memory=MIB,
        preemption="recompute",
        max_num_batched_tokens=64,
        model_type=Faulty,
    )
    ask(engine, "a", 1)
    fill(engine)
    assert ask(engine, "b", 2) == 8  # the blocks before it


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_blocks_are_finite_where_all_their_numbers_are(dtype: Any) -> None:
    blocks = np.ones((5, 2, 3, 4), dtype)
    blocks[4] = ml_dtypes.finfo(dtype).min
    assert are_finite(blocks).all()
    blocks[:4, 1, 2, 3] = [np.nan, -np.nan, np.inf, -np.inf]
    assert are_finite(blocks).tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rows_of_integers_are_finite_where_their_scales_are(dtype: str) -> None:
    numbers = np.ones((4, 2, 3, 40), np.float32)
    numbers[1, 0, 2, 7], numbers[2, 1, 1, 39] = np.nan, -np.inf
    rows = convert(numbers, element_type(dtype))
    assert are_finite(rows).tolist() == [True, False, False, True]
    faults = [fault_of(Entry(block.tobytes(), dtype), 40) for block in rows]
    assert [fault is None for fault in faults] == [True, False, False, True]


@pytest.mark.parametrize(
    ("own", "other", "on_disk", "stays"),
    [
        ("int8", "float32", False, True),
        ("float32", "int4", False, True),
        ("int8", "float32", True, False),
        ("float16", "float32", True, True),
        ("int8", "int8", True, True),
    ],
)
def test_tiers_stay_where_what_they_hold_converts(
    tmp_path: Path, own: str, other: str, on_disk: bool, stays: bool
) -> None:
    class First(NullModel):
        dtype = own

        @property
        def capabilities(self) -> Capabilities:
            found = super().capabilities
            return replace(found, kv_format=replace(found.kv_format, dtype=self.dtype))

    class Second(First):
        dtype = other

    disk = {"kv_disk": tmp_path} if on_disk else {}
    config = EngineConfig(kv_host_memory=MIB, **disk)
    options = NullOptions(block_size=16, num_blocks=3, max_model_len=512)
    moved = Offloader(First(options), BlockPool(3, 16), config)
    store = moved.store
    moved.move_to(Second(options), BlockPool(3, 16))
    assert (moved.store is store) is stays
    moved.store.close(1.0)


def test_what_one_request_needs_is_not_overwritten_by_what_the_next_one_loads() -> None:
    engine = null_engine(
        num_blocks=24, kv_host_memory=MIB, preemption="recompute", max_num_batched_tokens=64
    )
    prompts = {"a": [*PREFIX, 2], "b": [*PREFIX[::-1], 2]}  # 17 blocks each
    for name, prompt in prompts.items():
        submit(engine, f"{name}0", prompt)
        run(engine)
    fill(engine)
    before = engine.stats().num_blocks_loaded
    for name, prompt in prompts.items():
        submit(engine, name, prompt)
    deltas = run(engine)
    assert [deltas[name][0].num_cached_tokens for name in "ab"] == [64, 64]
    assert engine.stats().num_blocks_loaded - before == 32
    assert all(tokens(deltas[name]) == alone(prompt) for name, prompt in prompts.items())


def test_two_requests_load_side_by_side_where_there_is_room() -> None:
    engine = null_engine(
        num_blocks=48, kv_host_memory=MIB, preemption="recompute", max_num_batched_tokens=64
    )
    for index, tail in enumerate(([1] * 9, [2] * 9)):
        ask_for(engine, f"first{index}", [*PREFIX, *tail])
    fill(engine, 12)
    submit(engine, "a", [*PREFIX, *[1] * 9])
    submit(engine, "b", [*PREFIX, *[2] * 9])
    checked_step(engine)
    assert engine.stats().num_requests_running == 2
    assert engine.stats().num_blocks_loaded == 18 + 2  # the prefix once
    deltas = run(engine)
    assert [deltas[name][0].num_cached_tokens for name in "ab"] == [72, 72]


def ask_for(engine: Engine, name: str, prompt: list[int]) -> None:
    submit(engine, name, prompt)
    run(engine)


def test_without_host_memory_it_does_not() -> None:
    engine = null_engine(num_blocks=24, max_num_batched_tokens=64)
    ask(engine, "a", 1)
    fill(engine)
    assert ask(engine, "b", 2) == 0


def test_a_salt_isolates_in_the_tiers_too() -> None:
    engine = null_engine(
        num_blocks=24, kv_host_memory=MIB, preemption="recompute", max_num_batched_tokens=64
    )
    ask(engine, "a", 1, cache_salt="x")
    fill(engine)
    assert ask(engine, "b", 2) == 0
    fill(engine)
    assert ask(engine, "c", 3, cache_salt="x") == 64


def test_many_blocks_are_loaded_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LOADED_TOKENS", 256)
    engine = null_engine(
        num_blocks=200,
        kv_host_memory=MIB,
        preemption="recompute",
        max_num_batched_tokens=512,
        max_model_len=2000,
    )
    prompt = [i % 512 for i in range(600)]  # 150 blocks, of which a step loads 64
    submit(engine, "a", prompt)
    first = tokens(run(engine)["a"])
    submit(engine, "fill", [3] * 700, SamplingParams(max_tokens=1))
    run(engine)
    submit(engine, "b", prompt)
    submit(engine, "other", [1, 2, 3])
    assert [delta.request_id for delta in checked_step(engine)] == ["other"]
    assert engine.stats().num_blocks_loaded == 64
    deltas = run(engine)
    assert deltas["b"][0].num_cached_tokens >= 590
    assert tokens(deltas["b"]) == first


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_new_engine_finds_on_disk_what_another_left(tmp_path: Path, block_size: int) -> None:
    """Also one with other block sizes, as another provider has."""
    options: dict[str, Any] = {"num_blocks": 8, "max_num_batched_tokens": 64, "kv_disk": tmp_path}
    engine = null_engine(block_size=16, **options)
    assert ask(engine, "a", 1) == 0
    engine.close()
    engine = null_engine(block_size=block_size, **options)
    assert ask(engine, "b", 2) == 64
    assert null_model(engine).num_written_blocks - 2 == 64 // block_size  # two were the trial
    assert engine.stats().num_tier_errors == 0
    engine.close()
    engine = null_engine(block_size=16, **options)
    assert ask(engine, "c", 3) == 64
    engine.close()


def test_tables_of_two_kinds_share_a_folder(tmp_path: Path) -> None:
    """Under the keys of their tokens they keep something else, so neither is in the other's way."""
    options: dict[str, Any] = {
        "num_blocks": 60,
        "max_num_batched_tokens": 64,
        "kv_disk": tmp_path,
        "windows": (None, 8),
    }

    def cached(tail: int, *, one_table: bool) -> int:
        engine = null_engine(one_table=one_table, **options)
        submit(engine, "a", [*PREFIX, tail])
        deltas = run(engine)["a"]
        assert tokens(deltas) == alone([*PREFIX, tail], windows=(None, 8))
        assert engine.stats().num_tier_errors == 0
        engine.close()
        return deltas[0].num_cached_tokens

    assert [cached(1, one_table=True), cached(2, one_table=False)] == [0, 0]
    assert [cached(3, one_table=True), cached(4, one_table=False)] == [64, 64]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_what_is_in_host_memory_is_on_disk_after_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "num_blocks": 24,
        "max_num_batched_tokens": 64,
        "kv_disk": tmp_path,
        "kv_host_memory": MIB,
        "preemption": "recompute",
    }
    engine = null_engine(**options)
    ask(engine, "a", 1)
    fill(engine)
    engine.close()
    engine = null_engine(**options)
    assert ask(engine, "b", 2) == 64
    engine.close()


def test_host_memory_that_is_full_goes_to_disk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_blocks": 24, "max_num_batched_tokens": 64, "kv_disk": tmp_path}
    engine = null_engine(kv_host_memory=8 * 64, preemption="recompute", **options)  # eight blocks
    ask(engine, "a", 1)
    fill(engine)
    assert engine._runtime.offloader is not None
    assert engine._runtime.offloader.store.persist(60.0)  # a thread of its own writes
    assert engine.stats().host_tier_bytes <= 8 * 64
    assert engine.stats().disk_tier_bytes > 0
    assert ask(engine, "b", 2) == 64
    engine.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap", "gone"])
def test_files_that_are_damaged_change_no_token(tmp_path: Path, damage: str) -> None:
    options: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": 16,
        "max_num_batched_tokens": 64,
        "kv_disk": tmp_path,
    }
    engine = null_engine(**options)
    ask(engine, "a", 1)
    engine.close()
    files = sorted(
        path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 256
    )
    assert len(files) >= 4
    engine = null_engine(**options)
    first = files[0].read_bytes()
    for path in files:
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[-9] ^= 64
        elif damage == "cut":
            del content[-8:]
        elif damage == "empty":
            content.clear()
        elif damage == "swap" and path != files[0]:
            content = bytearray(first)
        path.write_bytes(content)
        if damage == "gone":
            path.unlink()
    prompt = [*PREFIX, 2]
    submit(engine, "b", prompt)
    deltas = run(engine)["b"]
    assert tokens(deltas) == alone(prompt)
    assert deltas[0].num_cached_tokens in ((0, 16) if damage == "swap" else (0,))
    assert (engine.stats().num_tier_errors > 0) == (damage != "gone")
    engine.close()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_transfers_that_fail_cost_time_and_no_token(every: int) -> None:
    engine = crowded(
        preemption="swap",
        kv_host_memory=MIB,
        transfer_fails=lambda transfer: transfer > 1 and transfer % every == 0,
    )
    crowd(engine)
    assert engine.stats().num_tier_errors > 0
    assert engine.stats().finished["length"] == 3


def test_copies_that_fail_are_retried_like_steps() -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=10, n=3)
    engine = null_engine(transfer_fails=lambda transfer: transfer == 0)
    submit(engine, "a", PREFIX[:6], params)
    deltas = run(engine)["a"]
    assert reasons(deltas) == ["length"] * 3
    for index in range(3):
        assert tokens(deltas, index) == alone(PREFIX[:6], params, index)
    assert engine.stats().num_failed_steps == 1


def test_a_request_ends_while_its_blocks_are_loading() -> None:
    engine = null_engine(
        num_blocks=200,
        kv_host_memory=MIB,
        preemption="recompute",
        max_num_batched_tokens=512,
        max_model_len=2000,
    )
    prompt = [i % 512 for i in range(600)]
    submit(engine, "a", prompt)
    run(engine)
    submit(engine, "fill", [3] * 700, SamplingParams(max_tokens=1))
    run(engine)
    submit(engine, "b", prompt)
    checked_step(engine)
    assert reasons(engine.abort("b")) == ["abort"]
    engine.check()
    assert not engine.has_work
    submit(engine, "c", [1, 2, 3])
    assert tokens(run(engine)["c"]) == alone([1, 2, 3])


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_what_is_being_loaded_keeps_its_room(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...]
) -> None:
    """In a pool for one and a half, the next request must not start from nothing in its place."""
    monkeypatch.setattr(offload, "LOADED_TOKENS", 16 // len(windows))
    engine = null_engine(
        num_blocks=26, windows=windows, preemption="swap", kv_host_memory=MIB, max_model_len=80
    )
    prompts = {name: [ord(name)] * 64 for name in "abc"}
    for name, prompt in prompts.items():
        submit(engine, f"{name} first", prompt)
        run(engine)
    fill(engine)
    for name, prompt in prompts.items():
        submit(engine, name, prompt)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == alone(prompt, windows=windows)
        assert deltas[name][0].num_cached_tokens == 60


def test_the_disks_folder_may_be_given_as_text(tmp_path: Path) -> None:
    given: Any = str(tmp_path)
    assert EngineConfig(kv_disk=given).kv_disk == tmp_path
    for wrong in ("", 7, b"folder"):
        given = wrong
        with pytest.raises(CapacityError, match=r"kv_disk is .*; give the path of a folder"):
            EngineConfig(kv_disk=given)
