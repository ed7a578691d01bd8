"""What forms let a model write in messages that have channels, where marks are special tokens."""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from onnxport.serving.channels import MARKS, Channels
from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.harmony import HARMONY
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.structured.compiler import CompileLimits, compile_grammar
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.structured import ids_of
from tests.serving.tokenizers_for_tests import EOS, byte_level

from .harmony import CALL, CONSTRAINED, NEXT, RETURN, answer, call, message

THOUGHT = message("analysis", 'hm {"x": <b>\n')
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
FIND = {"type": "function", "function": {"name": "find"}}
GOOD, BAD, LOOSE = call("add", '{"x": 1}'), call("add", '{"x": "1"}'), call("find", '{"a": []}')
IN_ROLE = ' to=functions.add<|channel|>commentary json<|message|>{"x": 1}'
FINAL = message("final", '{"x": 1}')
ANSWER = StructuredOutputs(json=ADD["function"]["parameters"])  # type: ignore[index]


@cache
def words() -> tuple[Tokenizer, Vocabulary]:
    fast = byte_level()
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    ends = frozenset(fast.token_to_id(each) for each in (EOS, RETURN, CALL))
    tokenizer = Tokenizer(fast, ends)
    return tokenizer, Vocabulary.build(tokenizer, tokenizer.vocab_size, ends)


def form(base: StructuredOutputs, begun: str = "", calls: Any = None) -> StructuredOutputs:
    """Return a form behind thoughts, as requests have it."""
    return replace(base, thought=Channels(begun), calls=calls)


def tools(**how: Any) -> StructuredOutputs:
    tokenizer, _ = words()
    special = {each: tokenizer.token_to_id(each) for each in HARMONY.tokens}
    return calls([ADD, FIND], HARMONY, special, **{"several": True, **how})  # type: ignore[arg-type]


def accepts(form: StructuredOutputs, text: str) -> bool:
    tokenizer, vocabulary = words()
    sequence = compile_grammar(form, vocabulary, CompileLimits()).sequence(0)
    tokens = array("q", tokenizer.encode(text, add_special_tokens=False))
    if sequence.num_possible(array("q"), tokens) < len(tokens):
        return False
    return tokenizer.eos_token_ids <= set(ids_of(sequence.masks(tokens)[0]))


@pytest.mark.parametrize(
    ("text", "may"),
    [
        (FINAL, True),
        (answer(THOUGHT, FINAL), True),
        (answer(THOUGHT, message("analysis", ""), FINAL), True),
        (answer(THOUGHT, message(f"final {CONSTRAINED}", '{"x": 1}')), True),
        (message(f"final{CONSTRAINED}", '{"x": 1}'), True),
        ('{"x": 1}', False),
        ("", False),
        (THOUGHT, False),
        (message("final", '{"x": "1"}'), False),
        (answer(message("commentary", "See."), FINAL), False),  # it would be content, too
        (answer(THOUGHT, message("commentary", '{"x": 1}')), False),
        (answer(FINAL, FINAL), False),
        (answer(message("analysis to=functions.add", "{}"), FINAL), False),
        (message("analysis", f"a<|channel|>b{NEXT}{FINAL}"), False),
    ],
)
def test_an_answer_has_its_form_in_the_final_channel(text: str, may: bool) -> None:
    assert accepts(form(ANSWER), text) is may


@pytest.mark.parametrize(
    ("base", "good", "bad"),
    [
        (StructuredOutputs(regex="[<a]+"), "<a", "b"),
        (StructuredOutputs(choice=("yes", "no")), "no", "ye"),
        (StructuredOutputs(grammar='start: "x" y\ny: /a|}b/'), "x}b", "x"),
        (StructuredOutputs(json_object=True), '{"<|": "<|end|"}', '{"a": "<|end|>"}'),
    ],
)
def test_every_form_can_be_in_it(base: StructuredOutputs, good: str, bad: str) -> None:
    assert accepts(form(base), answer(THOUGHT, message("final", good)))
    assert not accepts(form(base), answer(THOUGHT, message("final", bad)))


@pytest.mark.parametrize(
    ("text", "forced", "once", "named"),
    [
        (GOOD, True, True, True),
        (IN_ROLE, True, True, True),
        (IN_ROLE.replace("json", f"{CONSTRAINED}"), True, True, True),
        (answer(THOUGHT, GOOD), True, True, True),
        (answer(GOOD, GOOD), True, False, False),
        (answer(GOOD, IN_ROLE), True, False, False),
        (call("find", "{}"), True, True, False),  # without parameters there are no arguments
        (LOOSE, False, False, False),
        (BAD, False, False, False),
        (call("sub", "{}"), False, False, False),
        ("", False, False, False),
        (message("final", "no"), False, False, False),
        (answer(message("commentary", "See."), GOOD), False, False, False),
        (GOOD.replace("functions.", ""), False, False, False),
    ],
)
def test_forced_calls(text: str, forced: bool, once: bool, named: bool) -> None:
    assert accepts(form(tools()), text) is forced
    assert accepts(form(tools(several=False)), text) is once
    assert accepts(form(tools(several=False, name="add")), text) is named


@pytest.mark.parametrize(
    ("text", "free", "once"),
    [
        (message("final", "no <b>"), True, True),
        (answer(THOUGHT, message("commentary", "See."), THOUGHT, GOOD), True, True),
        (answer(GOOD, message("final", "a")), True, False),
        (answer(GOOD, LOOSE), True, False),
        (LOOSE, True, True),
        (BAD, False, False),
        (answer(THOUGHT, BAD), False, False),
        (answer(THOUGHT, message("analysis to=functions.add", "{}")), False, False),
        (message("commentary to=python", "1"), False, False),
        ("text", False, False),
    ],
)
def test_strict_functions(text: str, free: bool, once: bool) -> None:
    assert accepts(form(tools(forced=False)), text) is free
    assert accepts(form(tools(forced=False, several=False)), text) is once


def test_a_form_or_calls() -> None:
    either = form(ANSWER, calls=tools(forced=False, alone=True))
    for text in (FINAL, answer(THOUGHT, FINAL), GOOD, answer(THOUGHT, LOOSE), answer(GOOD, GOOD)):
        assert accepts(either, text), text
    for text in (BAD, message("final", "no"), answer(GOOD, FINAL), THOUGHT, '{"x": 1}'):
        assert not accepts(either, text), text


def test_calls_of_another_format_are_in_the_final_channel() -> None:
    base = calls([ADD], HERMES, several=False)
    hermes = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    beside = calls([ADD], HERMES, several=False, alone=True, forced=False)
    for one in (form(base), form(ANSWER, calls=beside)):
        assert accepts(one, answer(THOUGHT, message("final", hermes)))
        assert not accepts(one, hermes)


def test_a_prompt_may_begin_a_message() -> None:
    final, thought = message("final", ""), message("analysis", "")
    assert accepts(form(ANSWER, final), '{"x": 1}')
    assert not accepts(form(ANSWER, final), FINAL)
    assert accepts(form(ANSWER, thought), answer("hm", THOUGHT, FINAL))
    assert not accepts(form(ANSWER, thought), FINAL)
    assert accepts(form(tools(), final), answer(" yes", GOOD))
    assert not accepts(form(tools(), final), " yes")
