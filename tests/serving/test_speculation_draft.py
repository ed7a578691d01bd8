"""A draft model over the null model: its cache, its blocks, its limits.

The null model's next token is a hash of everything its cache holds for a sequence. So guesses over
the same model that are all right prove that the cache held what it should.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import ArtifactError, DeviceLostError, ProviderError
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.rules import logit_rules
from onnxport.serving.speculation import build
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.draft_model import ModelDrafter
from onnxport.serving.speculation.packing import DraftPacker, DraftRow, advance, room
from tests.serving.helpers import alone
from tests.serving.speculating import GREEDY, request
from tests.tiers import examples

VOCAB = 512
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=3)


def drafter(budget: int = 64, vocab_size: int = VOCAB, **options: Any) -> ModelDrafter:
    given = {"vocab_size": VOCAB, "num_blocks": 64, "block_size": 4, "max_model_len": 256}
    given |= {"takes_exact_logits": True}
    return ModelDrafter(NullModel(NullOptions(**{**given, **options})), budget, vocab_size)


def right(one: Request, length: int) -> list[int]:
    """What the null model of 512 tokens makes of a request."""
    params = SamplingParams(
        temperature=one.params.temperature,
        top_k=one.params.top_k,
        seed=one.params.seed,
        max_tokens=length,
    )
    return alone(list(one.tokens), params)


def guesses(
    tested: ModelDrafter, requests: Sequence[Request], lengths: Sequence[int]
) -> list[list[int]]:
    before = [list(one.tokens) for one in requests]
    found = [list(tokens) for tokens in tested.propose(requests, lengths)]
    assert [list(one.tokens) for one in requests] == before
    tested.check()
    return found


def test_guesses_are_what_the_model_says() -> None:
    tested = drafter()
    some = [request([1, 2, 3]), request(range(9)), request([7])]
    assert guesses(tested, some, [4, 1, 0]) == [right(some[0], 4), right(some[1], 1), []]
    assert tested.num_behind(some[2]) == 1


def test_another_model_is_another_guess() -> None:
    tested = drafter(vocab_size=VOCAB, block_size=8)
    one, other = request([1, 2, 3]), request([1, 2, 4])
    assert guesses(tested, [one], [4])[0] != right(other, 4)


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_any_number_of_guesses_may_come_true(data: st.DataObject) -> None:
    tested = drafter(num_blocks=data.draw(st.sampled_from([12, 24, 64])), budget=24)
    some = [request(range(start, start + 5)) for start in range(3)]
    for _ in range(data.draw(st.integers(2, 6))):
        asked = data.draw(st.lists(st.sampled_from(some), min_size=1, unique=True))
        lengths = [data.draw(st.integers(0, 4)) for _ in asked]
        for one, length, found in zip(asked, lengths, guesses(tested, asked, lengths), strict=True):
            assert len(found) <= length
            assert not found or found == right(one, len(found))
            kept = data.draw(st.integers(0, len(found)))
            one.tokens.extend([*found[:kept], data.draw(st.integers(0, VOCAB - 1))])
        if data.draw(st.booleans()):
            tested.forget(data.draw(st.sampled_from(some)))


def test_each_token_is_computed_once() -> None:
    tested = drafter()
    model = tested._model
    one = request(range(20))
    assert isinstance(model, NullModel)
    for expected in (4, 8, 12):  # a run for each guess, and none besides
        found = guesses(tested, [one], [4])[0]
        assert model.num_runs == expected
        one.tokens.extend([*found, 5])
        assert tested.num_behind(one) == 2  # the last guess and what came after it


def test_arrays_that_are_moved_on_are_those_of_the_next_run() -> None:
    blocks = [array("i", [3, 5, 2]), array("i", [7, 1, 4])]
    pasts, tokens, races = [17, 28], [5, 6], [(0.5, 2.0), (0.0, 0.0)]

    def rows() -> list[DraftRow]:
        given = zip(tokens, pasts, blocks, races, strict=True)
        return [DraftRow([one], past, table, 1, race) for one, past, table, race in given]

    inputs = DraftPacker(16).pack(rows())
    assert room(rows(), 16) == 3  # the second row holds 29 tokens then, of 32
    for number in range(3):
        pasts = [past + 1 for past in pasts]
        tokens, races = [10 + number, 20 + number], [(number / 8, 2.0), (0.0, 0.0)]
        advance(inputs, tokens, races)
        for name, expected in asdict(DraftPacker(16).pack(rows())).items():
            np.testing.assert_array_equal(getattr(inputs, name), expected)
    assert room(rows(), 16) == 0


def test_runs_of_a_shape_have_the_same_arrays() -> None:
    packer, blocks = DraftPacker(16), array("i", [3, 5, 2])
    first = packer.pack([DraftRow([5], 17, blocks)])
    between = packer.pack([DraftRow([5, 6, 7], 17, blocks), DraftRow([8], 3, blocks)])
    assert between.input_ids.tolist() == [5, 6, 7, 8]
    assert between.block_table.tolist() == [[3, 5], [3, 0]]
    again = packer.pack([DraftRow([9], 18, blocks)])
    for name, found in asdict(again).items():
        if isinstance(found, np.ndarray):
            assert getattr(again, name) is getattr(first, name), name
    assert again.input_ids.tolist() == [9]
    assert again.past_sequence_lengths.tolist() == [18]


def test_growing_drafts_are_packed_again_only_where_they_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = []

    pack = DraftPacker.pack

    def noting(packer: DraftPacker, rows: Sequence[DraftRow], *states: Any) -> Any:
        packed.append([row.num_past for row in rows])
        return pack(packer, rows, *states)

    monkeypatch.setattr(DraftPacker, "pack", noting)
    one = drafter()
    size = one._limits.block_size
    long = request([1] * (3 * size - 3))
    short = request([2] * (3 * size - 3))
    found = one.propose([long, short], [6, 2])
    assert [len(guess) for guess in found] == [6, 2]
    end = 3 * size - 3
    # What is missing, both, one when the other ends, and one that enters a block.
    assert packed == [[0, 0], [end, end], [end + 1], [end + 3]]
    assert list(found[0]) == right(long, 6)


def test_rows_are_computed_together() -> None:
    tested = drafter()
    some = [request([start, 1]) for start in range(6)]
    guesses(tested, some, [3] * 6)
    assert tested._model.num_runs == 3  # type: ignore[attr-defined]


def test_limits_of_the_device_are_kept() -> None:
    tested = drafter(max_batch_rows=2, max_batch_tokens=5)  # which the null model asserts
    some = [request(range(start, start + 3)) for start in range(5)]
    assert guesses(tested, some, [2] * 5) == [right(one, 2) for one in some]


def test_a_long_prompt_is_caught_up_with_step_by_step() -> None:
    tested = drafter(budget=16)
    long, short = request(range(50)), request([1])
    for behind in (35, 20, 5):
        assert guesses(tested, [long, short], [2, 2]) == [[], right(short, 2)]
        assert tested.num_behind(long) == behind
    assert guesses(tested, [long, short], [2, 2]) == [right(long, 2), right(short, 2)]


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=1.3, seed=4)])
def test_it_draws_as_the_request_does(params: SamplingParams) -> None:
    tested = drafter()
    some = [request(range(start, 9), params, seed=params.seed or 0) for start in range(3)]
    assert guesses(tested, some, [4] * 3) == [right(one, 4) for one in some]


def test_it_obeys_the_rules_of_the_request() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={7: 100.0}, presence_penalty=2.0)
    rules = logit_rules(params, (), VOCAB, None)
    one = Request("r", request([1, 2]).tokens, params, max_total_tokens=99, rules=rules)
    assert guesses(drafter(), [one], [4]) == [[7] * 4]
    params = SamplingParams(temperature=0.0, allowed_token_ids=[3, 4, 5], frequency_penalty=2.0)
    rules = logit_rules(params, (), VOCAB, None)
    one = Request("r", request([1, 2]).tokens, params, max_total_tokens=99, rules=rules)
    [found] = guesses(drafter(), [one], [4])
    assert len(found) == 4
    assert {*found} <= {3, 4, 5}


class OnlyEven:
    """A grammar of even tokens, of which each is larger than the one before."""

    def __init__(self, breaks: bool = False) -> None:
        self.breaks = breaks

    def masks(self, tokens: Any, draft: Sequence[int] = ()) -> Any:
        if self.breaks:
            raise ValueError("broken")
        masks = np.zeros((len(draft) + 1, VOCAB), np.uint8)
        for line, last in enumerate([0, *draft]):
            masks[line, last + 2 :: 2] = 1
        return np.packbits(masks, axis=1, bitorder="little").view(np.uint32)

    def num_possible(self, tokens: Any, draft: Sequence[int]) -> int:
        raise NotImplementedError

    def forced(self, tokens: Any, most: int) -> Sequence[int]:
        raise NotImplementedError

    def is_complete(self, tokens: Any) -> bool:
        raise NotImplementedError


def test_it_follows_the_grammar() -> None:
    one = Request("r", request([1, 2]).tokens, GREEDY, max_total_tokens=99, grammar=OnlyEven())
    [found] = guesses(drafter(), [one], [4])
    assert len(found) >= 2
    assert found == sorted({*found})
    assert all(token_id % 2 == 0 for token_id in found)


def test_a_broken_grammar_is_not_its_business() -> None:
    tokens = request([1, 2]).tokens
    one = Request("r", tokens, GREEDY, max_total_tokens=99, grammar=OnlyEven(breaks=True))
    assert guesses(drafter(), [one], [3]) == [right(request([1, 2]), 3)]


def test_nothing_is_guessed_after_an_end() -> None:
    plain = request([1, 2, 3])
    expected = right(plain, 4)
    one = Request(
        "r", plain.tokens, GREEDY, max_total_tokens=99, stop_token_ids=frozenset(expected[1:2])
    )
    assert guesses(drafter(), [one], [4]) == [expected[:2]]


def test_who_was_not_asked_about_for_longest_gives_its_blocks() -> None:
    tested = drafter(num_blocks=8)
    first, second, third = (request(range(start, start + 11)) for start in range(3))
    for one in (first, second, first, third):
        assert guesses(tested, [one], [2]) == [right(one, 2)]
    assert [tested.num_behind(one) for one in (first, second, third)] == [1, 11, 1]


def test_there_are_guesses_for_as_many_as_there_is_room_for() -> None:
    tested = drafter(num_blocks=8)
    some = [request(range(start, start + 11)) for start in range(4)]
    found = guesses(tested, some, [2] * 4)
    assert [len(tokens) for tokens in found] == [2, 2, 0, 0]


def test_beyond_its_context_it_is_silent() -> None:
    tested = drafter(max_model_len=16)
    one = request(range(14))
    assert guesses(tested, [one], [5]) == [right(one, 3)]
    one.tokens.extend([1, 2])
    assert guesses(tested, [one], [5]) == [right(one, 1)]
    one.tokens.append(3)
    assert guesses(tested, [one], [5]) == [[]]
    assert tested._pool.num_free == 64


@pytest.mark.parametrize("size", [300, 700])
def test_vocabularies_may_be_padded(size: int) -> None:
    tested = drafter(vocab_size=size)
    found = guesses(tested, [request([1, 2, start]) for start in range(20)], [2] * 20)
    ids = [token_id for tokens in found for token_id in tokens]
    assert len(ids) == 40
    assert max(ids) < min(size, VOCAB)
    assert guesses(tested, [request([1, 600])], [2]) == [[]]  # a token that it does not know


def test_no_guess_without_a_number() -> None:
    class Broken(NullModel):
        def run(self, inputs: Any) -> Any:
            logits = super().run(inputs)
            logits[0] = np.nan
            return logits

    tested = ModelDrafter(Broken(NullOptions(block_size=4)), 64, VOCAB)
    one, other = request([1]), request([2, 3])
    assert guesses(tested, [one, other], [1, 1]) == [[], right(other, 1)]


def test_after_a_failure_it_begins_anew() -> None:
    tested = drafter(fails=lambda run: run == 6)
    some = [request([1, 2, 3]), request([4, 5])]
    before = guesses(tested, some, [4, 4])
    with pytest.raises(ProviderError):
        tested.propose(some, [4, 4])
    for one in some:
        tested.forget(one)
    assert tested._pool.num_free == 64
    assert guesses(tested, some, [4, 4]) == before


def test_a_lost_device_is_told_and_closed() -> None:
    tested = drafter(lost_at=lambda operation: True)
    with pytest.raises(DeviceLostError):
        tested.propose([request([1])], [1])
    tested.forget(request([1]))
    tested.close()
    tested.close()
    assert tested._model.closed  # type: ignore[attr-defined]


def test_many_steps_with_chance() -> None:
    chance = Random(5)
    tested = drafter(num_blocks=40, budget=20)
    some = [request([start]) for start in range(6)]
    for _ in range(60):
        asked = chance.sample(some, chance.randint(1, 6))
        for one, found in zip(asked, guesses(tested, asked, [3] * len(asked)), strict=True):
            assert found == right(one, 3)[: len(found)]
            one.tokens.extend([*found[: chance.randint(0, 3)], chance.randrange(VOCAB)])
        for number, one in enumerate(some):
            if len(one.tokens) > 40:
                tested.forget(one)
                some[number] = request([chance.randrange(VOCAB)])


def test_a_draft_model_that_has_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(draft=None, linear=SimpleNamespace())
    monkeypatch.setattr(build, "_spec", lambda path: spec)
    config = SpeculationConfig("draft_model", model=Path("draft"), kv_cache_tokens=256)
    with pytest.raises(ArtifactError, match=r"draft has layers that keep states.* cannot go"):
        build.check_draft(config, Path("target"))
