"""Calls as published chat templates write them are read, and are what a forced call may be."""

from __future__ import annotations

import json
from array import array
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import ParsedCall
from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.granite import GRANITE_TOKEN
from onnxport.serving.http.tool_formats.registry import recognized
from onnxport.serving.structured.compiler import (
    CompiledGrammar,
    CompileLimits,
    compile_grammar,
)
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.structured import ids_of
from tests.serving.tokenizers_for_tests import EOS, byte_level

from .places import needs_llama_cpp
from .tool_cases_2 import ARGUMENTS, CASES, Case, message, read

pytestmark = needs_llama_cpp
every_case = pytest.mark.parametrize("case", CASES, ids=lambda each: each.file)
NO_TOOLS = [
    "google-gemma-2-2b-it",
    "microsoft-Phi-3.5-mini-instruct",
    "HuggingFaceTB-SmolLM3-3B",
    "llama-cpp-rwkv-world",
]


def parse(case: Case, *pieces: str) -> tuple[str, list[tuple[str, Any]]]:
    parser = ToolCallParser(case.schemas, case.syntax, case.syntax.tokens)
    content, found = "", list[ParsedCall]()
    for parsed in [*map(parser.feed, pieces), parser.finish()]:
        content += parsed.content
        found += parsed.calls
    return content, [(each.name, json.loads(each.arguments)) for each in found]


def check(case: Case, text: str, content: str, called: list[tuple[str, Any]]) -> None:
    whole = parse(case, text)
    assert whole == (content, called), text
    assert parse(case, *text) == whole
    for size in (2, 3, 7):
        assert parse(case, *(text[at : at + size] for at in range(0, len(text), size))) == whole


@every_case
def test_which_format_a_template_asks_for(case: Case) -> None:
    template = case.template
    assert recognized(template.source(with_tools=True)) is case.syntax


@pytest.mark.parametrize("file", NO_TOOLS)
def test_templates_that_tell_no_tools(file: str) -> None:
    assert recognized(read(file).source(with_tools=True)) is None
    assert not read(file).tells_tools()


def test_a_template_that_writes_no_calls_asks_for_a_format() -> None:
    template = read("ibm-granite-granite-3.3-2B-Instruct")
    assert recognized(template.source(with_tools=True)) is GRANITE_TOKEN
    assert template.tells_tools()


@every_case
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_a_call_is_read_as_it_was_written(case: Case, arguments: dict[str, Any]) -> None:
    if '"' in arguments["text"] and not case.escapes:
        return
    text = case.answer(message(case.told(arguments)))
    check(case, text, "", [("find_places", case.told(arguments))])


@every_case
def test_calls_and_text_beside(case: Case) -> None:
    both = [ARGUMENTS[0], None][: case.most]
    told = [("find_places", ARGUMENTS[0]), ("wait", {})][: case.most]
    check(case, case.answer(message(*both)), "", told)
    check(case, case.answer(message(None)), "", [("wait", {})])
    if case.has_text:
        text = case.answer(message(*both, content="Hm & so."))
        check(case, text, case.keeps or "", told)


@pytest.mark.parametrize(
    "case", [each for each in CASES if each.closes is not None], ids=lambda each: each.file
)
def test_calls_behind_a_thought(case: Case) -> None:
    text = case.answer(message(ARGUMENTS[0], thought="I think."))
    thought, closes, text = text.partition(case.closes or "")
    assert "I think." in thought + closes + text
    check(case, text, "", [("find_places", ARGUMENTS[0])])


@cache
def vocabulary(*texts: str) -> tuple[Tokenizer, Vocabulary]:
    """Return a tokenizer in which some texts are special tokens."""
    fast = byte_level()
    fast.add_special_tokens([AddedToken(text, special=True) for text in texts])
    words = Tokenizer(fast, frozenset([fast.token_to_id(EOS)]))
    return words, Vocabulary.build(words, words.vocab_size, words.eos_token_ids)


@cache
def compiled(case: Case, in_tokens: bool, how: tuple[tuple[str, Any], ...]) -> CompiledGrammar:
    """Return the compiled form of calls."""
    words, tokens = vocabulary(*case.syntax.tokens if in_tokens else ())
    special = {one: words.token_to_id(one) for one in case.syntax.tokens if in_tokens}
    found = {one: token for one, token in special.items() if token is not None}
    form = calls(case.tools, case.syntax, found, **dict(how))
    return compile_grammar(form, tokens, CompileLimits())


def allowed(case: Case, text: str, *, in_tokens: bool, **how: Any) -> bool:
    """Whether a form of calls allows a text, whose marks may be special tokens."""
    words, _ = vocabulary(*case.syntax.tokens if in_tokens else ())
    sequence = compiled(case, in_tokens, tuple(how.items())).sequence(0)
    ids = array("q", words.encode(text, add_special_tokens=False))
    if sequence.num_possible(array("q"), ids) < len(ids):
        return False
    return words.eos_token_ids <= set(ids_of(sequence.masks(ids)[0]))


@every_case
@pytest.mark.parametrize("in_tokens", [True, False])
def test_forced_calls_are_what_a_template_writes(case: Case, in_tokens: bool) -> None:
    for arguments in ARGUMENTS:
        if '"' in arguments["text"] and not case.escapes:
            continue
        text = case.answer(message(case.told(arguments))).strip("\n")
        assert allowed(case, text, in_tokens=in_tokens, several=False), text
        assert allowed(case, text, in_tokens=in_tokens, several=True, forced=False), text
    both = case.answer(message(*[ARGUMENTS[0], None][: case.most])).strip("\n")
    assert allowed(case, both, in_tokens=in_tokens, several=True)
    assert allowed(case, both, in_tokens=in_tokens, several=False) == (case.most == 1)
    wrong = case.answer(message({"text": "a", "yes": 3})).strip("\n")
    for text in (wrong, "Hm & so.", ""):
        assert not allowed(case, text, in_tokens=in_tokens, several=True), text
    wait = case.answer(message(None)).strip("\n")
    assert allowed(case, wait, in_tokens=in_tokens, several=False, name="wait")
    assert not allowed(case, wait, in_tokens=in_tokens, several=False, name="find_places")


@every_case
def test_results_of_calls_are_told(case: Case) -> None:
    """Ids are those of the format, of which a template may ask something."""
    asked = message(*[ARGUMENTS[0], None][: case.most])
    results = []
    for number, each in enumerate(asked["tool_calls"]):
        each["id"] = case.syntax.new_id()
        result = {"role": "tool", "tool_call_id": each["id"], "content": f"RESULT {number}"}
        results.append(result | {"name": each["function"]["name"]})
    prompt = case.prompt(asked, *results)
    places = [prompt.index(result["content"]) for result in results]
    assert prompt.index("Zürich") < places[0]
    assert places == sorted(places)
