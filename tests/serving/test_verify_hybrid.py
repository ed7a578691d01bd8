"""What verify does without the engine, where layers are in groups with their own block tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import CapacityError
from onnxport.providers.base import StepInputs
from onnxport.serving.fallback import describe
from onnxport.serving.verify.caches import _token_bytes
from onnxport.serving.verify.decoding import LentModel, Tokens
from onnxport.serving.verify.golden import rows_of
from onnxport.serving.verify.prompts import NEW_TOKENS, longest_need, make_prompts
from onnxport.serving.verify.sequence import LoneSequence
from onnxport.serving.verify.speed import _fits
from onnxport.serving.verify.transfers import SavedPrompt, check_transfer, resume, save_prompt
from onnxport.serving.verify.variants import decode_alone
from tests.providers.models import opened
from tests.serving.verifying import GOLDEN

TOKENS = GOLDEN.tolist()
LONG = np.resize(GOLDEN, 90)
WINDOWED = (0, 2)  # of the artifact's four layers, those that see 20 tokens
KINDS = {
    "hybrid": {},
    "plain": {"hybrid_kv_cache": False},
    "wide": {"block_size": 48},
}


class Noting(LentModel):
    """Keeps what it is told and what it answers."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.steps: list[StepInputs] = []
        self.logits = b""

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        self.steps.append(inputs)
        found = super().run(inputs)
        self.logits += found.tobytes()
        return found


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_are_told_no_block_behind_the_window(
    alternating_artifact: Path, reverse: bool
) -> None:
    with opened(alternating_artifact, "custom") as model:
        noting = Noting(model)
        sequence = LoneSequence(noting, 90, reverse=reverse)
        for start, stop in ((0, 60), (60, 61), (61, 90)):
            sequence.step(LONG[start:stop].tolist(), [0])
    full, seen = sequence.tables
    assert not set(full) & set(seen)
    assert [len(full), len(seen)] == [6, 6]
    tables = [(one.block_table.tolist(), one.more_block_tables[0].tolist()) for one in noting.steps]
    assert (
        tables
        == [
            ([full[:4]], [seen[:4]]),
            ([full[:4]], [[0, 0, *seen[2:4]]]),  # token 60 sees those from 41 on
            ([full], [[0, 0, *seen[2:]]]),
        ]
    )


@pytest.mark.parametrize("first", [1, 37, 89, 90])
def test_rows_are_those_of_one_table(alternating_artifact: Path, first: int) -> None:
    rows = [0, 19, 20, 21, 47, 63, 64, 89]
    with (
        opened(alternating_artifact, "custom") as hybrid,
        opened(alternating_artifact, "custom", hybrid_kv_cache=False) as plain,
    ):
        expected = rows_of(plain, LONG, rows, 90)
        assert rows_of(hybrid, LONG, rows, first).tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def saved(alternating_artifact: Path) -> dict[str, list[SavedPrompt]]:
    """Prompts that each kind of model has computed."""
    found = {}
    for kind, options in KINDS.items():
        with opened(alternating_artifact, "custom", **options) as model:
            prompts = make_prompts(TOKENS, model.capabilities).fixed
            found[kind] = [save_prompt(model, prompt) for prompt in prompts]
    return found


def test_what_is_saved_is_of_all_layers(saved: dict[str, list[SavedPrompt]]) -> None:
    for ours, theirs in zip(saved["hybrid"], saved["plain"], strict=True):
        assert ours.cache.shape[0] == 4
        assert (ours.prompt, ours.first_token) == (theirs.prompt, theirs.first_token)
        assert ours.cache.tobytes() == theirs.cache.tobytes()


def resumed(path: Path, kind: str, one: SavedPrompt) -> tuple[Tokens, bytes]:
    """Tokens and logits behind a saved prompt."""
    with opened(path, "custom", **KINDS[kind]) as model:
        noting = Noting(model)
        return resume(noting, one, NEW_TOKENS), noting.logits


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_blocks_move_between_groups(
    alternating_artifact: Path, saved: dict[str, list[SavedPrompt]], source: str, target: str
) -> None:
    with opened(alternating_artifact, "custom", **KINDS["plain"]) as plain:
        alone = decode_alone(plain, [one.prompt for one in saved["plain"]])
    with opened(alternating_artifact, "custom", **KINDS[target]) as model:
        assert len(model.capabilities.windows) == (1 if target == "plain" else 2)
        found = check_transfer(source, saved[source], alone, model, "exact", 0.0)
    assert (found.tokens.state, found.tokens.agreement) == ("passed", 1.0)
    for one, expected in zip(saved[source], saved["plain"], strict=True):
        wanted = resumed(alternating_artifact, "plain", expected)
        assert resumed(alternating_artifact, target, one) == wanted


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("target", ["hybrid", "plain"])
def test_each_layer_gets_what_it_sees(
    alternating_artifact: Path, saved: dict[str, list[SavedPrompt]], target: str, layer: int
) -> None:
    """What is lost in a layer matters, unless it is behind the layer's window."""
    one = saved["hybrid"][-1]
    _, logits = resumed(alternating_artifact, "plain", one)
    for first, last, same in ((0, 31, layer in WINDOWED), (31, 50, False)):
        cache = one.cache.copy()
        cache[layer, :, :, first:last] += 1
        _, found = resumed(alternating_artifact, target, replace(one, cache=cache))
        assert (found == logits) == same


def test_sizes_are_of_all_groups(alternating_artifact: Path) -> None:
    with (
        opened(alternating_artifact, "custom", kv_cache_tokens=80) as hybrid,
        opened(alternating_artifact, "custom", hybrid_kv_cache=False) as plain,
    ):
        limits = hybrid.capabilities
        assert (limits.num_blocks, limits.kv_tokens, limits.max_model_len) == (10, 80, 112)
        assert _token_bytes(hybrid) == _token_bytes(plain)
        assert "10 KV blocks of 16 tokens for 2 groups of layers in " in describe(limits)
        assert "64 KV blocks of 16 tokens in " in describe(plain.capabilities)
        LoneSequence(hybrid, 80)
        with pytest.raises(CapacityError, match=r"81 tokens .* 10 blocks of 16 for 2 groups of l"):
            LoneSequence(hybrid, 81)
        # 16 tokens and 32 more are three blocks in each group.
        assert [_fits(hybrid, rows) for rows in (1, 2)] == [True, False]
        prompts = make_prompts(TOKENS, limits)
        assert max(map(len, prompts.all)) == 50
        assert longest_need(prompts.all, limits) == 4 + 3
        assert longest_need(prompts.all, plain.capabilities) == 4
        assert LentModel(hybrid, 7).capabilities.max_model_len == 64
        assert LentModel(plain, 7).capabilities.max_model_len == 112


def test_prompts_fit_even_if_no_window_gives_a_block_up(alternating_artifact: Path) -> None:
    with opened(alternating_artifact, "custom", kv_cache_tokens=48) as model:
        assert (model.capabilities.kv_tokens, model.capabilities.max_model_len) == (48, 48)
        assert max(map(len, make_prompts(TOKENS, model.capabilities).all)) == 40
