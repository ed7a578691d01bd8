"""Decoding in every way finds the way that is wrong, and near ties are no excuse for more."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from onnxport.errors import CapacityError, DeviceMemoryError, ProviderError
from onnxport.providers.base import StepInputs
from onnxport.serving.verify.comparison import gap, tie_limit
from onnxport.serving.verify.prompts import NEW_TOKENS, Prompts, make_prompts
from onnxport.serving.verify.sequence import LoneSequence, last_logits
from onnxport.serving.verify.transfers import check_transfer, resume, save_prompt
from onnxport.serving.verify.variants import Variant, decode_alone, judge, run_variants
from tests.serving.verifying import GOLDEN, AloneModel, WrongModel, all_right

TOKENS = GOLDEN.tolist()
PROMPTS = {
    prompt
    for size in (4, 16, 32)
    for prompt in make_prompts(TOKENS, WrongModel(block_size=size).capabilities).all
}


def variants(model: WrongModel, prompts: Prompts | None = None) -> dict[str, Variant]:
    chosen = prompts or make_prompts(TOKENS, model.capabilities)
    alone = decode_alone(model, chosen.all)
    return {one.name: one for one in run_variants(model, chosen, alone, 0.0)}


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64, 256])
def test_every_variant_runs_whatever_the_block_size(block_size: int) -> None:
    found = variants(WrongModel(block_size=block_size))
    assert {name: (one.state, one.reason) for name, one in found.items()} == dict.fromkeys(
        ("batched", "chunked", "cached", "preempted"), ("passed", "")
    )
    assert all(one.agreement == 1 and one.num_tokens > 5 * NEW_TOKENS for one in found.values())
    assert found["cached"].num_tokens == 2 * found["batched"].num_tokens


def too_many_rows(inputs: StepInputs) -> bool:
    return len(inputs.past_sequence_lengths) > 8


def continued(inputs: StepInputs) -> bool:
    """A prompt whose first part is in the cache already."""
    new = np.diff(inputs.cumulative_sequence_lengths)
    return bool(((inputs.past_sequence_lengths > 0) & (new > 1)).any())


def started_over(inputs: StepInputs) -> bool:
    """What is computed from the start is no prompt: it has some of the answer."""
    begins = inputs.cumulative_sequence_lengths
    parts = zip(inputs.past_sequence_lengths, begins, begins[1:], strict=False)
    whole = [inputs.input_ids[start:stop].tolist() for past, start, stop in parts if past == 0]
    return any(tuple(tokens) not in PROMPTS for tokens in whole)


@pytest.mark.parametrize(
    ("wrong", "name", "unhurt"),
    [
        (too_many_rows, "batched", "chunked"),
        (continued, "chunked", "batched"),
        (continued, "cached", "batched"),
        (started_over, "preempted", "batched"),
    ],
)
def test_what_one_way_gets_wrong_fails_that_way(
    wrong: Callable[[StepInputs], bool], name: str, unhurt: str
) -> None:
    found = variants(WrongModel(wrong))
    assert (found[name].state, found[unhurt].state) == ("failed", "passed")
    assert found[name].agreement < 1
    assert found[name].divergences


def test_what_cannot_be_tried_is_skipped_and_says_why() -> None:
    found = variants(WrongModel(block_size=256, max_model_len=100))
    assert "fills a block of 256 tokens" in found["cached"].reason
    assert found["batched"].state == "passed"
    one_row = variants(WrongModel(max_batch_rows=1))
    assert (one_row["batched"].state, one_row["chunked"].state) == ("skipped", "passed")
    nothing = variants(WrongModel(max_model_len=10))
    assert {one.state for one in nothing.values()} == {"skipped"}
    assert "no prompt fits" in nothing["batched"].reason


def test_a_failing_device_is_an_error_of_the_variant() -> None:
    model = WrongModel(fails=lambda run: run > 40)
    with pytest.raises(ProviderError, match="was told to fail"):
        variants(model)


def test_a_batch_that_fails_is_no_success_of_the_requests_alone() -> None:
    found = variants(AloneModel())
    assert {one.state for one in found.values()} == {"failed"}
    assert all(one.agreement == 1 and not one.divergences for one in found.values())
    for one in found.values():
        assert re.fullmatch(
            r"\d+ steps failed and were tried again: ProviderError: no batches here", one.reason
        )


def test_steps_that_fail_are_told_where_there_is_nothing_else_to_tell() -> None:
    """Neither hits nor preemptions come about, which would be a reason to skip."""
    found = variants(AloneModel(block_size=256, max_model_len=100))
    assert {one.state for one in found.values()} == {"failed"}


def test_a_prompt_alone_that_fits_in_parts_only() -> None:
    class Short(WrongModel):
        def run(self, inputs: StepInputs) -> np.ndarray:
            if len(inputs.input_ids) > 40:
                raise DeviceMemoryError("no memory")
            return super().run(inputs)

    why = "prompts were decoded alone, .* failed and were tried again: DeviceMemoryError: no memory"
    with pytest.raises(ProviderError, match=why):
        variants(Short())


def test_prompts_are_the_same_for_every_provider_but_for_their_own() -> None:
    small, large = (make_prompts(TOKENS, WrongModel(block_size=s).capabilities) for s in (16, 256))
    assert small.fixed == large.fixed
    assert [len(prompt) for prompt in large.own] == [253, 253, 259]
    assert large.own[0][:251] == large.own[1][:251] == large.own[2][:251]
    assert len(set(large.all)) == len(large.all) == 9
    assert small.fixed[3] == small.fixed[4][:33] == small.fixed[5][:33]


def test_another_token_must_be_a_near_tie() -> None:
    model = WrongModel()
    prompt = tuple(TOKENS)
    alone = decode_alone(model, [prompt])
    position = 3
    logits = last_logits(model, [*prompt, *alone[prompt][:position]])
    second = int(logits.argsort()[-2])
    changed = (*alone[prompt][:position], second, *alone[prompt][position + 1 :])
    distance = float(logits.max() - logits[second]) / float(logits.astype(np.float64).std())
    for allowed, state in ((distance * 1.01, "passed"), (distance * 0.99, "failed"), (0, "failed")):
        found = judge("x", model, alone, [(prompt, changed)], allowed)
        assert found.state == state
        assert found.agreement == position / NEW_TOKENS
        (one,) = found.divergences
        assert (one.position, one.expected, one.found) == (position, int(logits.argmax()), second)
        assert one.gap == pytest.approx(distance)
    wrong = (*alone[prompt][:position], int(logits.argmin()), *alone[prompt][position + 1 :])
    assert judge("x", model, alone, [(prompt, wrong)], distance * 1.01).state == "failed"


def test_a_gap_is_that_of_the_worse_token_below_the_likeliest() -> None:
    logits = np.array([0, 1, 2, 5], np.float32)
    assert gap(logits, (2, 1)) == pytest.approx(4 / logits.std())
    assert gap(logits, (3, 3)) == 0


@pytest.mark.parametrize(("error", "other"), [(0.3, 0.3), (0.3, 0.1), (0.1, 0.3)])
def test_the_limit_of_a_tie_is_what_two_errors_can_do(error: float, other: float) -> None:
    random = np.random.default_rng(1)
    most = 0.0
    for _ in range(3000):
        exact = random.standard_normal(5) * 0.3
        own, theirs, again = (
            (exact + random.choice([-1, 1], 5) * size).astype(np.float32)
            for size in (error, other, error)
        )
        chosen = int(own.argmax()), int(theirs.argmax())
        most = max(most, gap(again, chosen) * float(again.astype(np.float64).std()))
    limit = tie_limit(error, other)
    assert 0.9 * limit < most <= limit + 1e-6


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16), (4, 256), (256, 5)])
def test_blocks_move_between_providers(sizes: tuple[int, int]) -> None:
    source, target = (WrongModel(block_size=size) for size in sizes)
    prompts = make_prompts(TOKENS, source.capabilities).fixed
    alone = decode_alone(source, prompts)
    saved = [save_prompt(source, prompt) for prompt in prompts]
    assert [one.cache.shape[3] for one in saved] == [len(prompt) for prompt in prompts]
    found = check_transfer("source", saved, alone, target, "exact", 0.0)
    assert (found.source, found.arithmetic, found.tokens.state) == ("source", "exact", "passed")
    assert found.tokens.num_tokens == len(prompts) * NEW_TOKENS


@pytest.mark.parametrize("position", [0, 15, 16, 32])
def test_a_slot_that_is_lost_on_the_way_is_found(position: int) -> None:
    source, target = WrongModel(), WrongModel(block_size=32)
    prompt = make_prompts(TOKENS, source.capabilities).fixed[3]
    alone = decode_alone(source, [prompt])
    saved = save_prompt(source, prompt)
    saved.cache[:, 0, :, position] += 1  # the keys; those of the null model are its tokens
    assert check_transfer("source", [saved], alone, target, "exact", 0.0).tokens.state == "failed"


def test_resuming_computes_no_prompt() -> None:
    source, target = WrongModel(), WrongModel()
    prompt = make_prompts(TOKENS, source.capabilities).fixed[-1]
    alone = decode_alone(source, [prompt])
    saved = save_prompt(source, prompt)
    assert resume(target, saved, NEW_TOKENS) == alone[prompt]
    assert target.num_runs == NEW_TOKENS - 1


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"20 tokens .* 1 blocks of 16"):
        LoneSequence(WrongModel(all_right, num_blocks=1), 20)
    with pytest.raises(CapacityError, match="may have 10 tokens"):
        LoneSequence(WrongModel(all_right, max_model_len=10), 20)
