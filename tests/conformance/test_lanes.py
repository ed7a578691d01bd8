"""The lanes themselves: which ones are here, and that each runs what its name says."""

from __future__ import annotations

import pytest

from onnxport.providers import registry
from tests.conformance.conftest import Loaded, look
from tests.conformance.lanes import Lane, all_lanes


def test_the_lane_is_here(lane: Lane) -> None:
    """The one place that tells which lanes were left out, and why."""
    if reason := look(lane.name).missing:
        pytest.skip(f"lane {lane.name}: {reason}")


def test_every_provider_has_a_lane() -> None:
    lanes = all_lanes()
    assert {lane.provider for lane in lanes if not lane.emulated} == set(registry.PROVIDERS)
    assert {lane.provider for lane in lanes if lane.emulated} == set(registry.EMULATED)
    assert len({lane.name for lane in lanes}) == len(lanes)


def test_what_was_loaded(loaded: Loaded) -> None:
    found, asked = loaded.model.capabilities, loaded.lane.options
    assert (found.provider, found.emulated) == (loaded.lane.provider, loaded.lane.emulated)
    assert found.vocab_size == loaded.reference.spec.vocab_size
    assert found.attention == asked.get("attention", found.attention)
    assert found.block_size == asked.get("block_size", found.block_size)
    assert found.compute_dtype == asked.get("dtype", found.compute_dtype)
    assert found.kv_cache_dtype == asked.get("kv_cache_dtype", found.kv_cache_dtype)
    assert sum(found.placement.values()) > 10
    assert found.block_size <= 32, "short prompts have no blocks to share: give the lane a size"
