"""Reasoning in text: where it is, in pieces of any length, and what a form behind it allows."""

from __future__ import annotations

import re
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from onnxport.errors import RequestError
from onnxport.serving.http.reasoning import ReasoningCounter
from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.reasoning import ReasoningFormat
from onnxport.serving.reasoning_formats import FORMATS, reasoning_format
from onnxport.serving.split import Split
from onnxport.serving.structured.compiler import compile_grammar
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.thoughts import Enclosed, ReasoningSplitter, Thought
from onnxport.serving.tokenizer import Tokenizer
from tests.tiers import examples

from .structured import LIMITS, accepts, compiled, tokenizer, write
from .tokenizers_for_tests import EOS, byte_level

THINK = FORMATS["qwen3"]
FREE, OPEN = (Thought(THINK.opens, THINK.closes, is_open) for is_open in (False, True))
PIECES = ("<think>", "</think>", "\n", " ", "<", "</", "think>", "<thi", "ab", "é")


def split(thought: Thought | None, text: str) -> tuple[str, str]:
    found = ReasoningSplitter(thought).take(text, is_last=True)
    return found.reasoning, found.content


@pytest.mark.parametrize(
    ("thought", "text", "reasoning", "content"),
    [
        (FREE, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),  # the model opens it
        (FREE, "\n<think>hm</think>yes", "hm", "yes"),
        (FREE, "yes", "", "yes"),
        (FREE, " \n yes", "", " \n yes"),
        (FREE, "say <think>hm</think>", "", "say <think>hm</think>"),
        (FREE, "<thinking", "", "<thinking"),
        (FREE, " <thi", "", " <thi"),
        (FREE, "", "", ""),
        (FREE, "<think>\n\n</think>\n\nyes", "", "yes"),
        (FREE, " </think>\n\nyes</think>", "", "yes</think>"),  # nothing was thought
        (FREE, "</think>", "", ""),
        (FREE, "\n</thin", "", "\n</thin"),
        (OPEN, "hm\n</think>\n\nyes", "hm", "yes"),  # the prompt has opened it
        (OPEN, "\n\na\n\nb\n</think>\n\n\nyes", "a\n\nb", "\nyes"),
        (OPEN, "a</think>b</think>\n", "a", "b</think>\n"),
        (OPEN, "hm\n</thin", "hm\n</thin", ""),  # cut
        (OPEN, "hm\n\n", "hm\n\n", ""),
        (OPEN, "hm</think>\n", "hm", ""),
        (OPEN, "\n<think>\nhm</think>yes", "hm", "yes"),  # R1 may write its tag, or leave it out
        (OPEN, "<think>", "", ""),
        (OPEN, "<thi", "<thi", ""),
        (OPEN, "<think><think>hm</think>yes", "<think>hm", "yes"),
        (None, "<think>hm</think>yes", "", "<think>hm</think>yes"),  # the prompt has closed it
    ],
)
def test_where_reasoning_is(
    thought: Thought | None, text: str, reasoning: str, content: str
) -> None:
    assert split(thought, text) == (reasoning, content)
    splitter = ReasoningSplitter(thought)
    pieces = [*map(splitter.feed, text), splitter.finish()]
    assert "".join(each.reasoning for each in pieces) == reasoning
    assert "".join(each.content for each in pieces) == content


@given(st.sampled_from([FREE, OPEN]), st.lists(st.sampled_from(PIECES)), st.data())
@settings(max_examples=examples(300))
def test_any_pieces_give_the_same(thought: Thought, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    reasoning, content = split(thought, text)
    splitter = ReasoningSplitter(thought)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    found = [splitter.feed(text[i:j]) for i, j in pairwise([0, *cuts, len(text)])]
    found.append(splitter.finish())
    assert "".join(each.reasoning for each in found) == reasoning
    assert "".join(each.content for each in found) == content
    ((_, place, _),) = splitter.stretches
    assert text[place:] == content
    before = r"((\s*<think>)?\n*|\s*(?=</think>))"  # all that is not told, with what is behind
    behind = r"(\n*</think>\n{0,2})?"
    assert re.fullmatch(before + re.escape(reasoning) + behind + re.escape(content), text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("hm\n<call>f</call>", "hm", "<call>f</call>"),
        ("<call>f</think>", "", "<call>f</think>"),
        ("hm</think>a<call>", "hm", "a<call>"),
        ("hm <cal", "hm <cal", ""),
        ("hm <calls</think>a", "hm <calls", "a"),
    ],
)
def test_a_thought_ends_before_a_call_if_that_is_said(
    text: str, reasoning: str, content: str
) -> None:
    thought = replace(OPEN, ends_before=("<call>",))
    assert split(thought, text) == (reasoning, content)
    splitter = ReasoningSplitter(thought)
    found = [*map(splitter.feed, text), splitter.finish()]
    assert "".join(each.reasoning for each in found) == reasoning
    assert "".join(each.content for each in found) == content
    ((_, place, _),) = splitter.stretches
    assert text[place:] == content


BLOCK = Enclosed("<call>", "{", "</call>")
AROUND_CALLS = ("<call>", "</call>", "{", " ", "\n", "a", "<", "<ca", "</think>")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("a\n<call>{}</call>", "a", "<call>{}</call>"),
        ("a<call>{}</call> \n<call> {1}</call>\n", "a", "<call>{}</call> \n<call> {1}</call>\n"),
        ("<call>{}</call>b<call>{}</call>", "<call>{}</call>b", "<call>{}</call>"),
        ("<call><call>{}</call>", "<call>", "<call>{}</call>"),
        ("<call>{}</call><call>f</call>", "<call>{}</call><call>f</call>", ""),
        ("<call>{}</call><call>{", "<call>{}</call><call>{", ""),
        ("<call>{}</call> </think>b", "<call>{}</call> ", "b"),
    ],
)
def test_calls_that_nothing_follows_end_a_thought(text: str, reasoning: str, content: str) -> None:
    thought = replace(OPEN, ends_with=(BLOCK,))
    assert split(thought, text) == (reasoning, content)
    splitter = ReasoningSplitter(thought)
    found = [*map(splitter.feed, text), splitter.finish()]
    assert "".join(each.reasoning for each in found) == reasoning
    assert "".join(each.content for each in found) == content


@given(st.lists(st.sampled_from(AROUND_CALLS)), st.data())
@settings(max_examples=examples(300))
def test_calls_end_a_thought_alike_in_any_pieces(words: list[str], data: st.DataObject) -> None:
    thought, text = replace(OPEN, ends_with=(BLOCK,)), "".join(words)
    splitter = ReasoningSplitter(thought)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    found = [splitter.feed(text[i:j]) for i, j in pairwise([0, *cuts, len(text)])]
    found.append(splitter.finish())
    told = "".join(e.reasoning for e in found), "".join(e.content for e in found)
    assert told == split(thought, text)


@pytest.mark.parametrize(
    ("thought", "text", "size"),
    [
        (replace(OPEN, ends_with=(BLOCK,)), '<call>{"a": 1}</call>\n' * 2000, 6),
        (replace(OPEN, frames=("<|f|>", "<|g|>")), "</think>" + "a<|f|>" * 70000, 10**6),
    ],
)
def test_many_calls_and_frames_are_not_looked_at_again(
    thought: Thought, text: str, size: int
) -> None:
    splitter, began = ReasoningSplitter(thought), process_time()
    for start in range(0, len(text), size):
        splitter.feed(text[start : start + size])
    splitter.finish()
    assert process_time() - began < 5  # it takes a few tenths, and was more than ten


def test_text_comes_as_early_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(FREE)
    given = ("<th", "ink>a", "b\n", "c</", "d</think>", "\n", "e")
    found = [splitter.feed(each) for each in given]
    assert found == [
        Split(),
        Split("a"),
        Split("b"),
        Split("\nc"),
        Split("</d"),
        Split(),
        Split("", "e"),
    ]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("hm\n</think>\n\n\n<response>\nyes\n</response>\n", "yes"),
        ("hm\n</think>\nyes", "yes"),
        ("hm</think><response>a</response>\nb</response>", "a</response>\nb"),
        ("hm</think><response>a\n\n</respons", "a\n\n</respons"),
        ("hm</think>\n\n\n<resp", "\n<resp"),
        ("hm</think>a <response>", "a <response>"),
        ("hm</think>a</response>", "a</response>"),
        ("hm</think>\n", ""),
        ("hm</think><response></response>", ""),
    ],
)
def test_tags_around_an_answer_are_not_told(text: str, content: str) -> None:
    thought = FORMATS["ernie45"].thought("<think>\n")
    assert split(thought, text) == ("hm", content)
    for size in (1, 2, 3, 5, 7):
        splitter = ReasoningSplitter(thought)
        found = [splitter.feed(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(one.content for one in (*found, splitter.finish())) == content
        ((start, place, length),) = splitter.stretches
        assert (start, length) == (0, None)
        assert text.startswith(content, place)
        assert text[:place].rstrip("\n").endswith((">", "hm"))


def test_granite_says_it_in_words() -> None:
    granite = FORMATS["granite"].thought("")
    text = "Here's my thought process: hm, Here is my\n\nHere is my response: yes"
    assert split(granite, text) == (" hm, Here is my", " yes")


@pytest.mark.parametrize(
    ("prompt", "continued", "thought"),
    [
        ("<|im_start|>assistant\n", None, FREE),
        ("What is <think>?<|im_start|>assistant\n", None, FREE),
        ("<|im_start|>assistant\n<think>\n", None, OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, None),
        ("<think>\nhm", "<think>\nhm", OPEN),
        ("<think>\nhm</think> a", "<think>\nhm</think> a", None),
        ("What is <think>?<|im_start|>assistant\nIt", "It", None),
    ],
)
def test_the_prompt_says_how_an_answer_begins(
    prompt: str, continued: str | None, thought: Thought | None
) -> None:
    assert THINK.thought(prompt, continued) == thought


def test_deepseek_r1_thinks_always() -> None:
    r1 = FORMATS["deepseek_r1"]
    assert r1.thought("<｜Assistant｜>") == OPEN
    assert r1.thought("<｜Assistant｜><think>\n\n</think>\n\n") is None


@pytest.mark.parametrize(
    ("name", "template", "found"),
    [
        ("auto", "{{ m.content.split('</think>')[-1] }}", THINK),
        ("auto", "<mm:think> {{ '<think>' }}", FORMATS["minimax_m3"]),
        ("auto", "<seed:think> {{ '<think>' }}", FORMATS["seed_oss"]),
        ("auto", "between <think></think>, between <response></response>", FORMATS["ernie45"]),
        ("auto", "write after 'Here is my response:'", FORMATS["granite"]),
        ("auto", "{{ m.content }}", None),
        ("auto", "<think></think>{{ m }}<response>{{ m }}</response>", THINK),  # of a tool
        ("auto", "{{ '<|eom|>' }}", None),  # Llama 4's
        ("none", "<think>", None),
        ("seed_oss", "", FORMATS["seed_oss"]),
    ],
)
def test_the_format_is_chosen(name: str, template: str, found: ReasoningFormat | None) -> None:
    assert reasoning_format(name, ["{{ m }}", template]) == found


def test_unknown_names_are_refused() -> None:
    with pytest.raises(
        RequestError, match="no reasoning parser 'qwen9'; use one of auto, none, qw"
    ):
        reasoning_format("qwen9", ())


@pytest.mark.parametrize(
    ("thought", "text", "num"),
    [
        (OPEN, "hm</think>\n\nyes", len("hm</think>\n\n")),
        (FREE, "<think>hm</think>yes", len("<think>hm</think>")),
        (FREE, " yes", 0),
        (OPEN, "hm", 2),
        (None, "yes", 0),
    ],
)
def test_tokens_before_the_answer_are_counted(thought: Thought, text: str, num: int) -> None:
    """However many come at once; each character is a token here."""
    words = tokenizer()
    ids = [words.encode(each, add_special_tokens=False)[0] for each in text]
    for size in (1, 3, 99):
        counter = ReasoningCounter(thought, words)
        told = [counter.add(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert counter.num_tokens == num
        if thought is OPEN:
            assert sum(run.num_tokens for runs in told for run in runs if run.is_thought) == num
        assert sum(run.num_tokens for runs in told for run in runs) == len(ids)


def test_tags_that_are_special_tokens_can_be_text(tmp_path: Path) -> None:
    fast = byte_level()
    fast.add_special_tokens([AddedToken(tag, special=True) for tag in THINK.tags])
    fast.save(str(tmp_path / "tokenizer.json"))
    ends = frozenset([fast.token_to_id(EOS)])
    hidden = Tokenizer.from_folder(tmp_path, ends)
    shown = Tokenizer.from_folder(tmp_path, ends, THINK.tags)
    ids = hidden.encode("<think>a</think>b", add_special_tokens=False)
    assert len(ids) == 4
    assert shown.encode("<think>a</think>b", add_special_tokens=False) == ids
    assert (hidden.decode(ids), shown.decode(ids)) == ("ab", "<think>a</think>b")
    pieces = shown.detokenizer([])
    assert "".join(map(pieces.add, ids)) == "<think>a</think>b"
    assert shown.is_special(min(ends))

    read = Vocabulary.build(shown, shown.vocab_size, ends)
    form = StructuredOutputs(choice=("b",), thought=FREE)
    grammar = compile_grammar(form, read, LIMITS).sequence(0)
    assert grammar.num_possible(array("q"), ids) == 4


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
GOOD, BAD = (
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {value}}}}}\n</tool_call>'
    for value in (1, '"1"')
)
FORMS = {
    "json": (StructuredOutputs(json={"type": "object"}), '{"a": 1}', "a"),
    "regex": (StructuredOutputs(regex="[ab<]+"), "<ab", "c"),
    "newline": (StructuredOutputs(regex="\\na"), "\na", "a"),
    "choice": (StructuredOutputs(choice=("yes", "no")), "no", "ye"),
    "lark": (StructuredOutputs(grammar='start: "x" y\ny: /a|}b/'), "x}b", "x"),
    "gbnf": (StructuredOutputs(grammar='root ::= "x" [ab]+'), "xab", "y"),
    "forced": (calls([TOOL], HERMES, several=True), GOOD, f"See: {GOOD}"),
    "free": (calls([TOOL], HERMES, several=True, forced=False), f"See: {GOOD}", BAD),
    "once": (calls([TOOL], HERMES, several=False, forced=False), f"See: {GOOD}", BAD),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_begins_behind_the_reasoning(name: str) -> None:
    """Whatever is thought, calls and answers among it, and however the tag is separated."""
    form, good, bad = FORMS[name]
    free, opened = (compiled(replace(form, thought=thought)) for thought in (FREE, OPEN))
    for thoughts in ("", "\n", "hm\n", f"{good}{bad}\n<think> </thi"):
        for space in ("", "\n\n") if name != "newline" else ("\n\n",):
            assert accepts(opened, f"{thoughts}</think>{space}{good}")
            assert accepts(free, f"<think>{thoughts}</think>{space}{good}")
            assert not accepts(opened, f"{thoughts}</think>{space}{bad}")
            assert not accepts(free, f"<think>{thoughts}</think>{space}{bad}")
        assert not accepts(opened, thoughts)
        assert not accepts(free, f"<think>{thoughts}")
    assert accepts(free, good)
    assert not accepts(free, bad)
    assert not accepts(opened, good)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_random_model_writes_has_its_form(seed: int) -> None:
    """Its thoughts end with letters here, which come soon; ends of lines belong to them."""
    thought = Thought(("#",), ("e", "}"), is_open=True)
    form = StructuredOutputs(regex="\\n?[0-9]{2}", thought=thought)
    text = write(compiled(form).sequence(3), seed)
    assert text is not None
    _, content = split(thought, text)
    assert content.removeprefix("\n").isdigit()


def test_an_impossible_form_is_refused_at_once() -> None:
    for form in (
        StructuredOutputs(json={"type": "integer", "minimum": 5, "maximum": 1}, thought=OPEN),
        StructuredOutputs(grammar="start: unknown", thought=OPEN),
    ):
        with pytest.raises(RequestError):
            compiled(form)


def test_requests_cannot_say_where_reasoning_is() -> None:
    with pytest.raises(RequestError, match="thought"):
        StructuredOutputs.from_mapping({"regex": "a", "thought": None})
