"""Forms of text inside the engine: batches, small pools, several completions, other parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import RequestError
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.structured.cache import GrammarCompiler
from onnxport.serving.structured.compiler import CompileLimits
from onnxport.serving.structured.sequence import SequenceGrammar
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.thoughts import ReasoningSplitter, Thought
from tests.tiers import examples

from .helpers import null_engine, reasons, run, submit, text, tokens
from .prophet import Prophet
from .structured import PADDING, assert_valid, tokenizer, vocabulary

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -99, "maximum": 99},
        "tag": {"enum": ["é", "the sea", None]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["x", "tag", "list"],
    "additionalProperties": False,
}
FORMS = (
    StructuredOutputs(json=POINT),
    StructuredOutputs(regex="[a-f0-9]{4}(-é{1,3})*x"),
    StructuredOutputs(choice=("the sea", "日本語", "no")),
    StructuredOutputs(grammar='start: "<" NAME ("," NAME)* ">"\nNAME: /[a-z]{1,6}/'),
    StructuredOutputs(
        regex="[a-f0-9]{4}(-é{1,3})*x", thought=Thought(("#",), ("e", "}"), is_open=True)
    ),
    StructuredOutputs(json=POINT, thought=Thought(("a", "[", "the"), ("e", "}"))),
    None,
)
FREE = SamplingParams(temperature=1.0, max_tokens=150, seed=3)
END = min(tokenizer().eos_token_ids)


def engine(**options: Any) -> Engine:
    size = vocabulary().vocab_size
    return null_engine(tokenizer=tokenizer(), vocab_size=size, max_model_len=400, **options)


def with_form(form: StructuredOutputs | None, **more: Any) -> SamplingParams:
    return replace(FREE, structured_outputs=form, **more)


def check(form: StructuredOutputs | None, written: str) -> None:
    """Assert that a text has its form."""
    if form is None:
        return
    written = ReasoningSplitter(form.thought).take(written, is_last=True).content
    if form.kind == "json":
        assert_valid(POINT, written)
    elif form.kind == "regex":
        assert re.fullmatch(form.text, written)
    elif form.choice is not None:
        assert written in form.choice
    else:
        assert re.fullmatch("<[a-z]{1,6}(,[a-z]{1,6})*>", written)


def of(deltas: Sequence[CompletionDelta], index: int) -> list[CompletionDelta]:
    return [delta for delta in deltas if delta.index == index]


def refused(deltas: Sequence[CompletionDelta]) -> bool:
    """Whether a request ended with a failure, and is told that it is to blame."""
    failure = deltas[-1].failure
    assert failure is not None
    return failure.refused


requests = st.lists(
    st.tuples(
        st.sampled_from(FORMS),
        st.integers(1, 40),  # tokens of the prompt
        st.integers(0, 99),
        st.sampled_from([1, 1, 3]),
        st.sampled_from(
            [
                {},
                {"temperature": 0.0},
                {"top_k": 5},
                {"top_p": 0.5, "repetition_penalty": 1.5},
                {"min_p": 0.2, "logit_bias": {END: 8.0}},
                {"logprobs": 2, "presence_penalty": 1.0},
            ]
        ),
    ),
    min_size=1,
    max_size=5,
)


@given(requests, st.sampled_from([{}, {"num_blocks": 110, "max_num_batched_tokens": 9}]))
@settings(max_examples=examples(12), deadline=None)
def test_in_any_company(asked: list[Any], options: dict[str, Any]) -> None:
    """Batched, chunked, forked and preempted, texts have their form and the tokens of one alone."""
    together = engine(**options)
    alone = engine(enable_prefix_caching=False)
    wanted: dict[str, list[list[int]]] = {}
    for number, (form, length, seed, n, more) in enumerate(asked):
        params = with_form(form, seed=seed, n=n, **more)
        prompt = [seed % 7 + 20 + place % 50 for place in range(length)]
        submit(alone, str(number), prompt, params)
        found = run(alone)[str(number)]
        wanted[str(number)] = [tokens(found, index) for index in range(n)]
        submit(together, str(number), prompt, params)
    for name, deltas in run(together).items():
        form, n = asked[int(name)][0], asked[int(name)][3]
        assert [tokens(deltas, index) for index in range(n)] == wanted[name]
        for index in range(n):
            [reason] = reasons(of(deltas, index))
            if reason == "stop":
                check(form, text(of(deltas, index)))
            else:
                assert reason == "length"


def test_the_end_of_the_form_ends_the_text() -> None:
    """At once, without an end token; ignore_eos and min_tokens do not keep it up."""
    form = StructuredOutputs(choice=("no", "yes"))
    one = engine()
    submit(one, "a", [30], with_form(StructuredOutputs(regex="()"), min_tokens=2))
    [nothing] = run(one)["a"]
    assert (nothing.error, nothing.text, nothing.finish_reason) == (None, "", "stop")
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        one = engine()
        submit(one, "a", [30], with_form(form, **more))
        deltas = run(one)["a"]
        assert reasons(deltas) == ["stop"]
        assert text(deltas) in ("no", "yes")
        assert END not in tokens(deltas)
        assert deltas[-1].stop_reason is None


def test_an_end_token_is_the_end_even_if_it_is_ignored() -> None:
    form = StructuredOutputs(regex="[ab]+")
    params = with_form(form, ignore_eos=True, logit_bias={END: 9.0})
    one = engine()
    submit(one, "a", [30], params)
    deltas = run(one)["a"]
    assert reasons(deltas) == ["stop"]
    assert tokens(deltas)[-1] == END
    assert re.fullmatch("[ab]+", text(deltas))


def test_min_tokens_holds_while_the_form_can_go_on() -> None:
    form = StructuredOutputs(regex="[ab]+")
    one = engine()
    submit(one, "a", [30], with_form(form, min_tokens=20, logit_bias={END: 50.0}))
    deltas = run(one)["a"]
    assert reasons(deltas) == ["stop"]
    assert len(tokens(deltas)) == 21


def test_stop_strings_cut_the_form() -> None:
    one = engine()
    form = StructuredOutputs(regex="a{9}b{9}")
    submit(one, "a", [30], with_form(form, stop=("aab",)))
    deltas = run(one)["a"]
    assert text(deltas) == "aaaaaaa"
    assert deltas[-1].stop_reason == "aab"


def test_when_nothing_is_left_the_request_ends_alone() -> None:
    letter = tokenizer().encode("a", add_special_tokens=False)[0]
    one = engine()
    form = StructuredOutputs(regex="[0-9]+")
    submit(one, "wrong", [30], with_form(form, allowed_token_ids=(letter, END)))
    submit(one, "banned", [30], with_form(StructuredOutputs(regex="0"), bad_words=("0",)))
    submit(one, "right", [31], with_form(form))
    deltas = run(one)
    assert reasons(deltas["wrong"]) == reasons(deltas["banned"]) == ["error"]
    assert "allowed_token_ids and the grammar forbid" in (deltas["wrong"][-1].error or "")
    assert refused(deltas["wrong"])
    assert "bad_words and the grammar forbid" in (deltas["banned"][-1].error or "")
    assert text(deltas["right"]).isdigit()


def test_a_limit_in_the_middle_ends_one_request() -> None:
    one = engine()
    limits = CompileLimits(max_lexer_states=60)
    one._intake.grammars = GrammarCompiler(vocabulary, limits)
    long = StructuredOutputs(regex="(a|b)*a(a|b){14}")
    submit(one, "broken", [30], with_form(long, logit_bias={END: -100.0}))
    submit(one, "right", [31], with_form(FORMS[2]))
    deltas = run(one)
    assert reasons(deltas["broken"]) == ["error"]
    assert "the grammar of the request failed" in (deltas["broken"][-1].error or "")
    assert refused(deltas["broken"])
    assert tokens(deltas["broken"])
    check(FORMS[2], text(deltas["right"]))


@pytest.mark.parametrize("speculates", [False, True])
def test_a_forbidden_token_is_our_own_fault(
    monkeypatch: pytest.MonkeyPatch, speculates: bool
) -> None:
    """A mask that is not kept to: the text before the token stays, and so do all others."""
    letters = tokenizer().encode("abc", add_special_tokens=False)
    masks = SequenceGrammar.masks

    def wrong(grammar: SequenceGrammar, tokens: Any, draft: Sequence[int] = ()) -> Any:
        found = masks(grammar, tokens, draft)
        return np.full_like(found, 0xFFFFFFFF) if list(tokens[:1]) == [30] else found

    monkeypatch.setattr(SequenceGrammar, "masks", wrong)
    one = engine(speculator=Prophet(lambda request: letters[:1] * 9) if speculates else None)
    bias = {letter: 100.0 - 20 * place for place, letter in enumerate(letters)}
    form = StructuredOutputs(regex="a{3}b+")
    ban = SamplingParams(temperature=0.0, logprobs=0, logit_bias=bias, structured_outputs=form)
    submit(one, "wrong", [30], ban)
    submit(one, "right", [31], replace(ban, max_tokens=5))
    deltas = run(one)
    failure = deltas["wrong"][-1].failure
    assert failure is not None
    assert not failure.refused
    assert failure.message.startswith(f"internal error: token {letters[0]} came, which the grammar")
    assert reasons(deltas["wrong"]) == ["error"]
    assert text(deltas["wrong"]) == "aaa"
    assert tokens(deltas["wrong"]) == [letters[0]] * 3
    assert sum(len(delta.logprobs or ()) for delta in deltas["wrong"]) == 3
    assert text(deltas["right"]) == "aaabb"
    assert reasons(deltas["right"]) == ["length"]


def test_a_model_without_end_tokens() -> None:
    one = engine(eos_token_ids=frozenset())
    submit(one, "a", [30], with_form(StructuredOutputs(json=POINT)))
    submit(one, "b", [31], with_form(StructuredOutputs(regex="[ab]+"), max_tokens=12))
    deltas = run(one)
    assert reasons(deltas["a"]) == ["stop"]
    assert_valid(POINT, text(deltas["a"]))
    assert reasons(deltas["b"]) == ["length"]
    assert re.fullmatch("[ab]+", text(deltas["b"]))


def test_what_is_refused_before_it_runs() -> None:
    one = engine()
    for wrong in ("(", "a\\", "a\\\\\\"):
        with pytest.raises(RequestError, match="cannot be compiled") as caught:
            submit(one, "a", [30], with_form(StructuredOutputs(regex=wrong)))
        assert caught.value.param == "structured_outputs.regex"
    with pytest.raises(RequestError, match="give a StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    bare = null_engine()
    with pytest.raises(RequestError, match="need a tokenizer"):
        submit(bare, "a", [30], with_form(StructuredOutputs(regex="a")))
    assert not one.has_work


def test_the_grammar_is_compiled_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    really = Vocabulary.build

    def build(*args: Any) -> Vocabulary:
        built.append(1)
        return really(*args)

    monkeypatch.setattr(Vocabulary, "build", build)
    one = engine(num_blocks=400)
    assert not built
    for name in "abc":
        submit(one, name, [30], with_form(StructuredOutputs(json=json.dumps(POINT)), n=2))
    assert one.grammars is not None
    assert len(one.grammars._cache) == len(built) == 1
    found = run(one)
    assert all(reasons(deltas) == ["stop", "stop"] for deltas in found.values())
    one.close()


def test_the_model_has_more_tokens_than_its_tokenizer() -> None:
    """Else the tests of padding would prove nothing."""
    assert engine().capabilities.vocab_size == tokenizer().vocab_size + PADDING
