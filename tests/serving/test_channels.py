"""Answers in messages that have channels: what of them is told, in pieces of any length."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from onnxport.serving.channels import (
    BREAK,
    MARKS,
    MOST_HEADER,
    ChannelFormat,
    Channels,
    ChannelSplitter,
    called,
)
from onnxport.serving.http.job import Run
from onnxport.serving.http.reasoning import DeltaSplitter, ReasoningCounter, Thinking
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.tokenizer import Tokenizer
from tests.tiers import examples

from .tokenizers_for_tests import EOS, byte_level

NEXT = "<|end|><|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
FINAL = "<|channel|>final<|message|>"
TO = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
PIECES = (
    *MARKS,
    *(NEXT, ANALYSIS, FINAL, TO, "<|channel|>analysis", "assistant", " to=functions.add"),
    *('{"', '\\"', '"}', "\\"),
    *("to=", "final", "<", "<|", "|>", "<|en", " ", "\n", "a", "é", "x" * MOST_HEADER),
)
Told = list[tuple[str, str]]


def tell(pieces: list[str], functions: tuple[str, ...] = (), begun: str = "") -> Told:
    """Return what pieces of a text give: texts of reasoning (R) and of the answer (A), in turns."""
    splitter = ChannelSplitter(Channels(begun), functions)
    told: Told = []
    for index, piece in enumerate([*pieces, ""]):
        for split in splitter.parts(piece, is_last=index == len(pieces)):
            kind, text = ("R", split.reasoning) if split.reasoning else ("A", split.content)
            if told and told[-1][0] == kind:
                kind, text = kind, told.pop()[1] + text
            told.append((kind, text))
    return told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{ANALYSIS}hm{NEXT}{FINAL}yes", [("R", "hm"), ("A", "yes")]),
        (f"{ANALYSIS}hm{NEXT}{FINAL}yes<|return|>", [("R", "hm"), ("A", "yes")]),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b", [("R", f"a{BREAK}b")]),
        (f"{COMMENTARY}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", [("A", "a"), ("R", "b"), ("A", "\n\nc")]),
        (f"{FINAL}a <|en", [("A", "a <|en")]),
        (f"{FINAL}a<|start|>assistant{FINAL}b", [("A", f"a{BREAK}b")]),
        (f"{FINAL}a{FINAL}b", [("A", f"a{BREAK}b")]),
        (f"{FINAL}a<|message|>b<|constrain|>", [("A", "ab")]),
        (f"{FINAL}a<|end|> b", [("A", f"a{BREAK} b")]),
        (f"{FINAL}a<|end|>\n", [("A", "a")]),
        (f"assistant{FINAL}a", [("A", "a")]),
        (f" <|start|>assistant{FINAL}a", [("A", "a")]),
        ("<|message|>a", [("A", "a")]),
        ("<|channel|>final <|constrain|>json<|message|>{}", [("A", "{}")]),
        ("<|channel|>––analysis<|message|>a", [("R", "a")]),
        ("<|channel|><|channel|>analysis<|message|>a", [("R", "a")]),  # a mark twice
        ("<|channel|> <|channel|><|constrain|>analysis<|message|>a", [("R", "a")]),
        ("<|channel|><|channel|>final<|message|>a", [("A", "a")]),
        ("<|channel|><|message|>a", [("A", "a")]),
        ("<|channel|>commentary to=x<|channel|>commentary<|message|>a", [("A", "a")]),
        (f"<|channel|>??{NEXT}{ANALYSIS}a", [("R", "a")]),
        ("<|channel|>analysis to=functions.add code<|message|>{}", [("R", "{}")]),
        (f"{TO}{{}}<|call|>", [("A", "{}")]),
        ("yes", [("A", "yes")]),  # no header at all
        (" \n", [("A", " \n")]),
        ("", []),
        ("to be", [("A", "to be")]),
        ("assistants", [("A", "assistants")]),
        ("<|channel|>fin", []),  # cut
        ("<|channel|>", []),
        (" to=functions.a", []),
        (f"{FINAL}a{NEXT}<|channel|>an", [("A", "a")]),
        ("<|channel|>this is no header", [("A", "this is no header")]),
        (f"<|channel|>{'a b' * 200}{FINAL}c", [("A", f"{'a b' * 200}{BREAK}c")]),
    ],
)
def test_what_is_told(text: str, told: Told) -> None:
    assert tell([text]) == told
    assert tell(list(text)) == told


def test_calls_of_functions_keep_their_header() -> None:
    for header, kept in (
        ("<|channel|>commentary to=functions.add json", None),
        (" to=functions.add<|channel|>commentary", "to=functions.add<|channel|>commentary"),
        ("<|channel|>analysis to=add code", None),
    ):
        for begin in ("", f"{ANALYSIS}hm{NEXT}"):
            text = f"{begin}{header}<|message|>{{}}<|call|>"
            call = f"<|start|>assistant {kept or header}<|message|>{{}}<|end|>"
            found = [("R", "hm"), ("A", call)] if begin else [("A", call)]
            assert tell([text], ("add",)) == tell(list(text), ("add",)) == found
    assert tell([f"{FINAL}See.{NEXT}{TO}1"], ("add", "ad")) == [
        ("A", f"See.<|start|>assistant {TO}1")  # what parts them is decided when it is read
    ]
    said = f"{FINAL}a{NEXT}{FINAL}b{NEXT}{TO}1{NEXT}{FINAL}c{NEXT}{FINAL}d"
    assert tell(list(said), ("add",)) == [
        ("A", f"a{BREAK}b<|start|>assistant {TO}1<|end|>c{BREAK}d")
    ]


@pytest.mark.parametrize(
    "author", ["user", "system", "tool", "functions.add to=assistant", "browser.search", " user "]
)
def test_messages_of_others_are_not_told(author: str) -> None:
    """A model may go on with what a user says, or make up what a function gives."""
    other = f"<|end|><|start|>{author}<|channel|>commentary<|message|>no"
    text = f"{FINAL}yes{other}{NEXT}{ANALYSIS}hm{NEXT}{FINAL}so"
    for functions in ((), ("add", "assistant")):
        for pieces in ([text], list(text)):
            assert tell(pieces, functions) == [("A", "yes"), ("R", "hm"), ("A", f"{BREAK}so")]
    assert tell([f"{ANALYSIS}hm{other.replace('<|channel|>commentary', '')}<|end|> "]) == [
        ("R", "hm")
    ]


@pytest.mark.parametrize(
    "header", ["", "assistant", " assistant ", "final", "to=x ", "assistant to=x", "<|constrain|>"]
)
def test_a_header_without_another_role_is_the_assistants(header: str) -> None:
    text = f"{FINAL}yes<|end|><|start|>{header}<|message|>so"
    assert tell([text]) == tell(list(text)) == [("A", f"yes{BREAK}so")]


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (" to=functions.add<|channel|>commentary", "add"),
        ("<|channel|>commentary to=functions.add_all ", "add_all"),
        ("<|channel|>commentary to=functions.add", "add"),
        ("<|channel|>analysis to=add code", "add"),
        ("<|channel|>commentary to=functions.a b", "a b"),
        ("<|channel|>commentary to=functions.adder", None),
        ("<|channel|>commentary to=functions_add", None),
        ("<|channel|>commentary go-to=add", None),
        ("<|channel|>commentary", None),
    ],
)
def test_who_is_called(header: str, name: str | None) -> None:
    assert called(header, ("add", "add_all", "a b")) == name
    assert called(header, ()) is None


@pytest.mark.parametrize(
    ("begun", "text", "told"),
    [
        (ANALYSIS, f"hm{NEXT}{FINAL}yes", [("R", "hm"), ("A", "yes")]),
        (FINAL, "to= yes", [("A", "to= yes")]),
    ],
)
def test_a_prompt_may_begin_a_message(begun: str, text: str, told: Told) -> None:
    prompt = f"<|start|>user<|message|>hi<|end|><|start|>assistant{begun}"
    thought = ChannelFormat().thought(f"{prompt}ab", "ab")
    assert thought == ChannelFormat().thought(prompt) == Channels(begun)
    assert (thought.is_thought, thought.is_final) == (begun == ANALYSIS, begun == FINAL)
    assert tell([text], begun=begun) == tell(list(text), begun=begun) == told
    assert ChannelFormat().thought("<|start|>user<|message|>hi<|end|>") == Channels()
    assert ChannelFormat().thought("<|start|>assistant") == Channels()


@given(st.lists(st.sampled_from(PIECES)), st.sampled_from(["", ANALYSIS, FINAL]), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_any_pieces_give_the_same(words: list[str], begun: str, data: st.DataObject) -> None:
    text = "".join(words)
    functions = data.draw(st.sampled_from([(), ("add",)]))
    whole = tell([text], functions, begun)
    assert tell(words, functions, begun) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
    assert tell(pieces, functions, begun) == whole
    for kind, found in whole:  # words of headers are nowhere, and marks in calls alone
        assert kind == "R" or functions or not any(mark in found for mark in MARKS)


@given(st.lists(st.sampled_from(["analysis", "commentary", "final"])), st.data())
def test_headers_are_never_told(channels: list[str], data: st.DataObject) -> None:
    """Wherever a text is cut off."""
    text = NEXT.join(f"<|channel|>{each}<|message|>{index}." for index, each in enumerate(channels))
    end = data.draw(st.integers(0, len(text)))
    while any(mark.startswith(text[max(0, end - n) : end]) for mark in MARKS for n in range(1, 12)):
        end -= 1  # marks are single tokens
        if end <= 0:
            break
    told = tell(list(text[: max(0, end)]))
    assert all(set(found) <= set("0123456789.\n") for _, found in told)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer whose marks are special tokens."""
    folder: Path = tmp_path_factory.mktemp("words")
    fast = byte_level()
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder, frozenset([fast.token_to_id(EOS)]))


def test_tokens_that_are_not_of_the_answer_are_counted(words: Tokenizer) -> None:
    parts = (f"{ANALYSIS}hm", f"{NEXT}{COMMENTARY}", "See.", NEXT, f"{ANALYSIS}a{NEXT}{FINAL}", "b")
    ids = [words.encode(each, add_special_tokens=False) for each in parts]
    all_ids = [one for each in ids for one in each]
    # The mark that ends a message is its own.
    beside = len(ids[0]) + len(ids[1]) + len(ids[3]) - 1 + len(ids[4])
    for size in (1, 2, 5, 99):
        counter = ReasoningCounter(Channels(), words)
        told = [counter.add(all_ids[at : at + size]) for at in range(0, len(all_ids), size)]
        runs = [run for each in told for run in each]
        assert sum(run.num_tokens for run in runs) == len(all_ids)
        assert sum(run.num_tokens for run in runs if run.is_thought) == beside
        assert counter.num_tokens == beside
    counter = ReasoningCounter(Channels(), words, ("add",))
    called = f"{ANALYSIS}hm{NEXT}<|channel|>analysis to=add<|message|>", "{}"
    ids_of = [words.encode(each, add_special_tokens=False) for each in called]
    counter.add([one for each in ids_of for one in each])
    assert counter.num_tokens == len(ids_of[0]) - 1  # arguments are of the answer
    other = ReasoningCounter(Channels(), words)
    of_others = f"{ANALYSIS}hm{NEXT}{FINAL}b", "<|end|><|start|>user<|message|>hi"
    ids_of = [words.encode(each, add_special_tokens=False) for each in of_others]
    for each in ids_of:
        other.add(each)
    assert other.num_tokens == sum(map(len, ids_of)) - len("b") - 1
    plain = ReasoningCounter(Channels(), words)
    plain.add([*ids[1][2:], *ids[2]])
    assert plain.num_tokens == 0


@given(st.lists(st.integers(0, 60)), st.integers(0, 9))
@settings(max_examples=examples(200), deadline=None)
def test_parts_of_deltas_have_all_tokens_in_order(
    words: Tokenizer, cuts: list[int], lag: int
) -> None:
    """Also where text comes later than its tokens; whatever a step adds, the parts say the same."""
    text = f"{COMMENTARY}See.{NEXT}{ANALYSIS}hm{NEXT}{FINAL}yes"
    ids = words.encode(text, add_special_tokens=False)
    spelled = "".join(map(words.token_text, ids))
    assert spelled == text
    counter = ReasoningCounter(Channels(), words)
    splitter = DeltaSplitter(Thinking(True, Channels()))
    told: Told = []
    tokens: list[int] = []
    shown = 0
    bounds = sorted({0, *(cut for cut in cuts if cut < len(ids)), len(ids)})
    for start, end in pairwise(bounds):
        is_last = end == len(ids)
        certain = len("".join(map(words.token_text, ids[:end]))) - (0 if is_last else lag)
        piece, shown = text[shown : max(certain, shown)], max(certain, shown)
        delta = CompletionDelta(
            "r", 0, piece, tuple(ids[start:end]), None, "stop" if is_last else None
        )
        pieces = splitter.take(delta, counter.add(delta.token_ids))
        assert [one.delta.finish_reason for one in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].delta.finish_reason == delta.finish_reason
        assert not pieces[-1].is_thought
        for is_thought, part in pieces:
            tokens += part.token_ids
            kind = "R" if is_thought else "A"
            if part.text and told and told[-1][0] == kind:
                told[-1] = (kind, told[-1][1] + part.text)
            elif part.text:
                told.append((kind, part.text))
    assert told == [("A", "See."), ("R", "hm"), ("A", "\n\nyes")]
    assert tokens == ids
    assert counter.add([]) in ([], (Run(False, 0),))


@given(
    messages=st.lists(
        st.tuples(
            st.sampled_from((ANALYSIS, COMMENTARY, FINAL, TO)), st.sampled_from(("a b", "{}", "é"))
        ),
        max_size=5,
    ),
    cuts=st.lists(st.integers(0, 400)),
)
def test_where_in_the_text_content_is(messages: list[tuple[str, str]], cuts: list[int]) -> None:
    text = NEXT.join(header + body for header, body in messages)
    splitter = ChannelSplitter(Channels(), ("add",))
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[i:j] for i, j in pairwise(edges)]
    parts = [splitter.parts(one, is_last=False) for one in pieces]
    parts.append(splitter.parts("", is_last=True))
    content = "".join(each.content for found in parts for each in found)
    bodies = [body for header, body in messages if header != ANALYSIS]
    found = [(content[i : i + (n or 0)], text[j : j + (n or 0)]) for i, j, n in splitter.stretches]
    assert found == [(body, body) for body in bodies]


def test_a_text_that_goes_on_within_the_answer() -> None:
    splitter = ChannelSplitter(Channels("<|channel|>final<|message|>"))
    assert splitter.parts("yes", is_last=True)[0].content == "yes"
    assert splitter.stretches == [(0, 0, 3)]
