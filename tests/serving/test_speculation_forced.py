"""Guessing what a grammar demands."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.forced import ForcedDrafter
from onnxport.serving.speculation.ngram import NgramDrafter
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.thoughts import Thought
from tests.serving.helpers import null_engine, run, submit, tokens
from tests.serving.speculating import GREEDY, Eager, Guesser, Machine, request
from tests.serving.structured import tokenizer, vocabulary

REPEATED = [1, 2, 3, 1, 2]


class Demands:
    """A grammar that demands tokens 40, 41 and so on, or nothing."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open

    def forced(self, tokens: array[int], most: int) -> Sequence[int]:
        return () if self.is_open else list(range(40, 40 + most))

    def masks(self, tokens: Any, draft: Sequence[int] = ()) -> Any:
        raise NotImplementedError

    def num_possible(self, tokens: Any, draft: Sequence[int]) -> int:
        raise NotImplementedError

    def is_complete(self, tokens: Any) -> bool:
        raise NotImplementedError


def with_grammar(grammar: Demands) -> Request:
    tokens = request(REPEATED).tokens
    return Request("r", tokens, GREEDY, max_total_tokens=99, grammar=grammar)


def test_the_grammar_goes_first() -> None:
    requests = [request(REPEATED), with_grammar(Demands()), with_grammar(Demands(is_open=True))]
    found = ForcedDrafter(NgramDrafter(3, 1)).propose(requests, [2, 3, 1])
    assert list(map(list, found)) == [[3, 1], [40, 41, 42], [3]]
    found = ForcedDrafter().propose(requests, [2, 3, 1])
    assert list(map(list, found)) == [[], [40, 41, 42], []]


def test_the_other_one_is_told() -> None:
    other = Guesser(Machine(lambda tokens: 1.0, 1.0))
    drafter, one = ForcedDrafter(other), request([1])
    assert drafter.is_cheap
    assert drafter.num_behind(one) == 0
    drafter.propose([with_grammar(Demands())], [3])
    assert other.num_asked == 0
    drafter.propose([one], [3])
    assert other.num_asked == 1
    drafter.forget(one)
    assert other.forgotten == [one]
    drafter.close()
    assert other.closed
    ForcedDrafter().forget(one)
    ForcedDrafter().close()


SCHEMA = {
    "type": "object",
    "properties": {"the seat": {"type": "boolean"}, "théâtre": {"enum": ["the sea", "no"]}},
    "required": ["the seat", "théâtre"],
    "additionalProperties": False,
}


def written(speculator: Eager | None, temperature: float, form: StructuredOutputs) -> Any:
    """All tokens of some requests, and the counters of guesses."""
    size = vocabulary().vocab_size
    engine = null_engine(
        tokenizer=tokenizer(), vocab_size=size, max_model_len=400, speculator=speculator
    )
    for number in range(4):
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=120, structured_outputs=form
        )
        submit(engine, str(number), [5 + number, 6, 7], params)
    found = run(engine)
    counters = engine.stats().speculation
    engine.close()
    return {name: tokens(deltas) for name, deltas in found.items()}, counters


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs(json=SCHEMA),
        StructuredOutputs(regex="(the sea[0-9]théâtre){2}x?"),
        StructuredOutputs(json=SCHEMA, thought=Thought(("#",), ("e", "a", "t"), is_open=True)),
    ],
    ids=["json", "regex", "behind reasoning"],
)
def test_it_changes_no_token(temperature: float, form: StructuredOutputs) -> None:
    plain, _ = written(None, temperature, form)
    config = SpeculationConfig("grammar", num_speculative_tokens=7)
    guessed, counters = written(Eager(ForcedDrafter(), config), temperature, form)
    assert guessed == plain
    assert counters.num_draft_tokens > 0
    assert counters.num_accepted_tokens > 0
