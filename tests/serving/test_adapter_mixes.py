"""Sums of adapters, each times a scale: what they are, who shares them, and when they go."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import AdapterError, CapacityError, RequestError, UnknownAdapterError
from onnxport.graphs.lora import LoraAdapter, LoraDelta
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.adapters.mixes import mix_of, mixed
from onnxport.serving.engine import Engine
from onnxport.serving.params import RequestOptions, SamplingParams
from tests.serving.adapting import adapter_engine, alone_with, content, mixed_with
from tests.serving.helpers import checked_step, null_model, run, submit, tokens

PROMPT = tuple(range(20))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def delta(rank: int, seed: int) -> LoraDelta:
    random = np.random.default_rng(seed)
    a = random.standard_normal((rank, 5)).astype(np.float32)
    return LoraDelta(a, random.standard_normal((4, rank)).astype(np.float32))


def adapter(name: str, number: int, **ranks: int) -> Adapter:
    each: Any = {(0, projection): rank for projection, rank in ranks.items()}
    most = max(ranks.values())
    return Adapter(name, number, f"content of {name}", most, Path(name), None, ranks=each)


def test_a_sum_adds_what_its_parts_add() -> None:
    first = LoraAdapter({(0, "q_proj"): delta(2, 1), (1, "o_proj"): delta(3, 2)})
    second = LoraAdapter({(0, "q_proj"): delta(4, 3), (0, "v_proj"): delta(1, 4)})
    found = mixed("sum", [(first, 0.5), (second, -2.0)]).deltas
    assert {key: one.rank for key, one in found.items()} == {
        (0, "q_proj"): 6,
        (1, "o_proj"): 3,
        (0, "v_proj"): 1,
    }
    for key, one in found.items():
        wanted = np.zeros((4, 5), np.float32)
        for part, scale in ((first, 0.5), (second, -2.0)):
            if (own := part.deltas.get(key)) is not None:
                wanted += np.float32(scale) * (own.b @ own.a)
        np.testing.assert_allclose(one.b @ one.a, wanted, atol=1e-5)
        assert one.a.dtype == one.b.dtype == np.float32


def test_numbers_that_become_too_large() -> None:
    a, b = np.ones((1, 2), np.float32), np.full((2, 1), 1e38, np.float32)
    large = LoraAdapter({(0, "q_proj"): LoraDelta(a, b)})
    with pytest.raises(AdapterError, match="9 \\* a of LoRA adapters has numbers that are too"):
        mixed("9 * a", [(large, 9.0)])


def test_what_a_mix_is() -> None:
    a, b = adapter("a", 1, q_proj=8, v_proj=2), adapter("b", 2, q_proj=8, o_proj=12)
    assert mix_of([], 16) is None
    assert mix_of([(a, 0.0)], 16) is None
    assert mix_of([(a, 1.0), (b, 0.0)], 16) is a
    found = mix_of([(b, 2.0), (a, 0.5)], 16)
    assert found is not None
    assert (found.name, found.rank, found.number) == ("0.5 * a + 2 * b", 16, 0)
    assert found.members == (a, b)
    assert a.members == (a,)
    assert found == mix_of([(a, 0.5), (b, 2.0)], 16)
    others = [
        mix_of([(a, 0.5)], 16),
        mix_of([(a, 2.0), (b, 0.5)], 16),
        mix_of([(a, -0.5), (b, 2.0)], 16),
        a,
        b,
        found,
    ]
    assert len({one.fingerprint for one in others if one is not None}) == len(others)
    alone = mix_of([(b, 3.0)], 15)  # its ranks are no larger than its own
    assert alone is not None
    with pytest.raises(RequestError, match=r"rank 16, .* up to 15; .*--max-lora-rank") as error:
        mix_of([(a, 0.5), (b, 2.0)], 15)
    assert error.value.param == "lora"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": 1001.0}, "adapter_scales"),
        ({"a": math.nan}, "adapter_scales"),
        ({"a": "x"}, "adapter_scales"),
        ({1: 1.0}, "by their texts"),
    ],
)
def test_scales_that_are_none(given: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        RequestOptions(adapter_scales=given)
    with pytest.raises(RequestError, match="give one of them"):
        RequestOptions(adapter="a", adapter_scales={"b": 1.0})


def mixes(engine: Engine) -> list[str]:
    return [one.adapter.name for one in engine.adapters._mixes.entries]


def test_requests_share_a_mix_and_its_keys_alone() -> None:
    """One slot and the same K/V for the same sum; another one, and those of its parts, are not."""
    engine = adapter_engine(adapters=(0, 1), num_blocks=100, max_adapters=4)
    several: dict[str, dict[str, float]] = {
        "mix": {"0": 0.5, "1": 2.0},
        "other": {"0": 0.5, "1": 1.0},
        "same": {"1": 2.0, "0": 0.5},
        "itself": {"0": 1.0, "1": 0.0},
        "none": {"0": 0.0},
    }
    for name in ("mix", "other"):
        submit(engine, name, PROMPT, GREEDY, adapter_scales=several[name])
    submit(engine, "one", PROMPT, GREEDY, adapter="0")
    submit(engine, "bare", PROMPT, GREEDY)
    first = run(engine)
    assert not any(delta.num_cached_tokens for each in first.values() for delta in each)
    assert mixes(engine) == ["0.5 * 0 + 2 * 1", "0.5 * 0 + 1 * 1"]
    assert len(null_model(engine)._adapters) == 4
    for name in ("same", "itself", "none"):
        submit(engine, name, PROMPT, GREEDY, adapter_scales=several[name])
    assert engine.adapters.num_requests == {"0": 2, "1": 1}
    later = run(engine)
    assert all(any(delta.num_cached_tokens for delta in each) for each in later.values())
    assert engine.adapters.num_swaps == 0
    found = {name: tokens(each) for name, each in (first | later).items()}
    assert found["mix"] == found["same"] == mixed_with(((0, 0.5), (1, 2.0)), PROMPT, GREEDY)
    assert found["other"] == mixed_with(((0, 0.5), (1, 1.0)), PROMPT, GREEDY)
    assert found["one"] == found["itself"] == alone_with(0, PROMPT, GREEDY)
    assert found["bare"] == found["none"] == alone_with(None, PROMPT, GREEDY)
    engine.adapters.load("2", content(2))  # which needs a slot more than what nobody uses
    assert mixes(engine) == []
    engine.check()
    engine.close()


def test_a_mix_goes_with_its_slot_and_with_its_parts() -> None:
    engine = adapter_engine(adapters=(0, 1), num_blocks=100, max_adapters=2)
    submit(engine, "a", PROMPT, GREEDY, adapter_scales={"0": 0.5, "1": 0.5})
    run(engine)
    assert mixes(engine) == ["0.5 * 0 + 0.5 * 1"]
    for name in ("0", "1"):  # both slots go to these
        submit(engine, name, PROMPT, GREEDY, adapter=name)
    run(engine)
    assert mixes(engine) == []
    submit(engine, "b", PROMPT, GREEDY, adapter_scales={"0": 0.5, "1": 0.5})
    checked_step(engine)
    engine.adapters.unload("1")  # which the mix goes on with
    engine.check()
    assert engine.adapters.num_held == 2
    with pytest.raises(UnknownAdapterError):
        submit(engine, "c", PROMPT, GREEDY, adapter_scales={"1": 0.5})
    wanted = mixed_with(((0, 0.5), (1, 0.5)), PROMPT, GREEDY)
    assert tokens(run(engine)["b"])[-3:] == wanted[-3:]
    assert (mixes(engine), engine.adapters.num_held) == ([], 1)
    engine.check()
    engine.close()


def test_what_requests_get_that_pick_none() -> None:
    engine = adapter_engine(adapters=(0, 1), num_blocks=100, max_adapters=3)
    adapters = engine.adapters
    adapters.set_scales({"0": 0.5, "1": 0.0})
    assert adapters.scales == {"0": 0.5}
    prepared = engine.prepare("before", PROMPT, GREEDY)
    submit(engine, "default", PROMPT, GREEDY)
    submit(engine, "named", PROMPT, GREEDY, adapter="1")
    submit(engine, "none", PROMPT, GREEDY, adapter_scales={})
    found = {name: tokens(each) for name, each in run(engine).items()}
    assert found["default"] == mixed_with(((0, 0.5),), PROMPT, GREEDY)
    assert found["named"] == alone_with(1, PROMPT, GREEDY)
    assert found["none"] == alone_with(None, PROMPT, GREEDY)
    adapters.set_scales({"1": 1.0})
    engine.submit(prepared)  # it gets what is so when it comes
    assert tokens(run(engine)["before"]) == alone_with(1, PROMPT, GREEDY)
    adapters.unload("1")
    assert adapters.scales == {}
    submit(engine, "later", PROMPT, GREEDY)
    assert tokens(run(engine)["later"]) == alone_with(None, PROMPT, GREEDY)
    with pytest.raises(UnknownAdapterError):
        adapters.set_scales({"1": 1.0})
    engine.close()


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1001.0])
def test_what_is_for_all_has_the_range_of_scales(scale: float) -> None:
    engine = adapter_engine(adapters=(0,), num_blocks=100)
    with pytest.raises(RequestError, match="adapter_scales"):
        engine.adapters.set_scales({"0": scale})
    assert engine.adapters.scales == {}
    engine.close()


def test_one_that_is_gone_is_no_part_of_what_is_for_all() -> None:
    """Another thread may see the scales from before an adapter was unloaded."""
    engine = adapter_engine(adapters=(0, 1), num_blocks=100)
    adapters = engine.adapters
    adapters.set_scales({"0": 1.0, "1": 0.5})
    before = adapters._scales
    adapters.unload("1")
    adapters._scales = before
    picked = adapters.pick(RequestOptions())
    assert picked is not None
    assert picked.name == "0"
    engine.close()


def test_what_is_for_all_keeps_its_rank_when_a_part_is_replaced() -> None:
    engine = adapter_engine(adapters=(0, 1), num_blocks=100)  # of rank 2, up to 16
    adapters = engine.adapters
    adapters.set_scales({"0": 0.5, "1": 0.5})
    adapters.load("1", content(3, rank=14), in_place=True)
    with pytest.raises(
        CapacityError, match=r"cannot replace '1', .* has rank 17, .*/lora-adapters"
    ):
        adapters.load("1", content(4, rank=15), in_place=True)
    submit(engine, "x", PROMPT, GREEDY)
    found = tokens(run(engine)["x"])
    assert len(found) == 6
    adapters.set_scales({"0": 0.5})
    adapters.load("1", content(4, rank=15), in_place=True)
    engine.check()
    engine.close()


def test_what_a_step_costs_does_not_grow_with_adapters_times_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of an adapter are counted as they come and go, not by a look at all sums."""
    engine = adapter_engine(adapters=(0, 1, 2), num_blocks=100, max_adapters=4)
    for number in range(40):
        scales = {"0": 0.5, "1": 1.0 + number / 64}
        submit(engine, str(number), PROMPT, GREEDY, adapter_scales=scales)
    looks = 0
    members = Adapter.members.fget
    assert members is not None

    def counted(one: Adapter) -> tuple[Adapter, ...]:
        nonlocal looks
        looks += 1
        return tuple(members(one))

    monkeypatch.setattr(Adapter, "members", property(counted))
    assert engine.stats().adapter_requests == {"0": 40, "1": 40, "2": 0}
    assert looks == 0
    monkeypatch.undo()
    checked_step(engine)
    engine.abort("7")
    engine.check()
    assert engine.adapters.num_requests == {"0": 39, "1": 39, "2": 0}
    run(engine)
    assert engine.adapters.num_requests == {"0": 0, "1": 0, "2": 0}
    engine.check()
    engine.close()


def test_a_sum_of_too_high_a_rank_is_refused_where_it_is_asked_for() -> None:
    engine = adapter_engine(num_blocks=100, max_adapters=3)
    for name in ("a", "b"):
        engine.adapters.load(name, content(int(name, 16), rank=9))
    for scales in ({"a": 0.5, "b": 0.5}, {"a": 1.0, "b": 1.0}):
        with pytest.raises(
            RequestError, match="has rank 18, and the model was loaded for ranks up"
        ):
            submit(engine, "x", PROMPT, GREEDY, adapter_scales=scales)
        with pytest.raises(RequestError, match="has rank 18"):
            engine.adapters.set_scales(scales)
    engine.check()
    engine.close()


def test_a_replaced_part_makes_another_mix() -> None:
    engine = adapter_engine(adapters=(0,), num_blocks=100, max_adapters=3)
    engine.adapters.load("x", content(1))
    scales = {"0": 0.5, "x": 0.25}
    prepared = engine.prepare("waits", PROMPT, GREEDY, RequestOptions(adapter_scales=scales))
    submit(engine, "first", PROMPT, GREEDY, adapter_scales=scales)
    checked_step(engine)
    place = engine.adapters.find("x").place
    engine.adapters.load("x", content(2), in_place=True)
    assert engine.adapters.find("x").place == place == 1
    engine.submit(prepared)
    found = {name: tokens(each) for name, each in run(engine).items()}
    assert found["waits"] == mixed_with(((0, 0.5), (2, 0.25)), PROMPT, GREEDY)
    assert found["first"] == mixed_with(((0, 0.5), (1, 0.25)), PROMPT, GREEDY)[1:]
    engine.adapters.load("y", content(3))
    assert engine.adapters.find("y").place == 2
    engine.check()
    engine.close()


def test_who_runs_is_told_by_the_adapters_of_a_sum() -> None:
    engine = adapter_engine(adapters=(0, 1), num_blocks=100, max_adapters=3)
    submit(engine, "a", PROMPT, GREEDY, adapter_scales={"0": 0.5, "1": 0.5})
    assert engine.stats().waiting_adapters == ("0", "1")
    checked_step(engine)
    stats = engine.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (("0", "1"), ())
    assert (stats.adapter_requests, stats.num_adapters) == ({"0": 1, "1": 1}, 2)
    run(engine)
    engine.close()
