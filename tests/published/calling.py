"""Conversations that call tools, as published templates render them, and what the model wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any, Final

from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.registry import recognized
from onnxport.serving.reasoning import ReasoningFormat
from onnxport.serving.reasoning_formats import AUTO, reasoning_format
from onnxport.serving.thoughts import ReasoningSplitter
from tests.published.places import TEMPLATES

Calls = Sequence[tuple[str, Mapping[str, Any]]]

JSON: Final = '{"a": "\\"b\\"", "c": ["</d>", null]}'
TEXTS: Final = [
    'say "hi"\\n',
    "one\ntwo\n\n three",
    "größe 東京 🙂",
    "a < b && c > d",
    JSON,
    "12",
    "",
]
EMPTY: Final[Mapping[str, Any]] = {}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """Return a tool with these parameters, all of which are needed."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    told = {"name": name, "description": f"does {name}", "parameters": parameters}
    return {"type": "function", "function": told}


NESTED: Final = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "near": {"type": "array", "items": {"type": "number"}},
        "deep": {"type": "object", "properties": {"is": {"type": "boolean"}}},
    },
}
TOOLS: Final = [
    tool("write_file", path={"type": "string"}, text={"type": "string"}),
    tool("set", count={"type": "integer"}, ratio={"type": "number"}, is_on={"type": "boolean"}),
    tool("set_all", tags={"type": "array", "items": {"type": "string"}}, at=NESTED),
    tool("now"),
    tool(
        "maybe",
        word={"anyOf": [{"type": "string"}, {"type": "null"}]},
        other={"anyOf": [{"type": "string"}, {"type": "null"}]},
        some={"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "or none"},
    ),
]
FUNCTIONS: Final = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
FLAT: Final = {"count": -3, "ratio": 0.25, "is_on": True}
VALUES: Final = {
    "tags": ["a b", "<c>", 'd"e'],
    "at": {"place": "x & y", "near": [1, 2.5], "deep": {"is": False}},
}
ONE: Final[Calls] = [("write_file", {"path": "a.txt", "text": TEXTS[1]})]
CALLS: Final[Mapping[str, Calls]] = {
    "flat": [("set", FLAT)],
    "nested": [("set_all", VALUES)],
    "empty": [("now", EMPTY)],
    "maybe": [("maybe", {"word": "so", "other": None, "some": 5})],
    **{f"text{n}": [("write_file", {"path": "a b.txt", "text": t})] for n, t in enumerate(TEXTS)},
}
PARALLEL: Final[Calls] = [*ONE, ("set", FLAT), ("now", EMPTY)]


@cache
def template(name: str) -> ChatTemplate:
    """Return a published template."""
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, {"bos_token": "<bos>", "eos_token": "<eos>"})


def format_of(name: str) -> ToolFormat:
    """Return the format that a published template has the model write."""
    found = recognized(template(name).source(with_tools=True))
    assert found is not None, name
    return found


@dataclass(frozen=True, slots=True)
class Said:
    """What the assistant says in a turn.

    Attributes:
        calls: of functions.
        content: ahead of them.
        thought: ahead of both.
    """

    calls: Calls
    content: str = ""
    thought: str = ""

    def message(self) -> dict[str, Any]:
        """Return it as a message of a chat."""
        calls = [
            {
                "id": f"functions.{name}:{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)},
            }
            for index, (name, given) in enumerate(self.calls)
        ]
        message = {"role": "assistant", "content": self.content or None, "tool_calls": calls}
        return message | ({"reasoning_content": self.thought} if self.thought else {})


USER: Final = {"role": "user", "content": "Hello."}


def conversation(said: Said, *, has_results: bool = True) -> list[dict[str, Any]]:
    """Return a chat in which the assistant says something, and the results of its calls."""
    message = said.message()
    results = [
        {"role": "tool", "content": f"RESULT{n}", "tool_call_id": each["id"]}
        for n, each in enumerate(message["tool_calls"])
    ]
    return [USER, message, *(results if has_results else [])]


def written(name: str, said: Said, end: str, **variables: Any) -> tuple[str, str]:
    """Return a prompt, and what a model wrote behind it up to the end of its turn, by a template.

    A template may write the thought of an earlier turn otherwise than the prompt begins one; the
    prompt ends before that then, if the turn does not close the thought that the prompt opens.
    """
    render = template(name).render
    prompt = render([USER], TOOLS, **variables)
    whole = render(conversation(said), TOOLS, add_generation_prompt=False, **variables)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
    start = sum(1 for _ in same)
    if start < len(prompt) and ">" not in whole[(tag := whole.rfind("<", 0, start)) : start]:
        start = tag  # they part within a tag
    assert len(prompt) - start < 20, (prompt[-200:], whole[start:][:200])
    turn, found, _ = whole[start:].partition(end)
    assert found, whole
    closes = "</think>" in turn or "</mm:think>" in turn
    return (prompt if closes else whole[:start]), turn


def answer(name: str, prompt: str, text: str) -> str:
    """Return what of a text is not reasoning."""
    return splitter_of(name, prompt).take(text, is_last=True).content.strip()


def splitter_of(name: str, prompt: str) -> ReasoningSplitter:
    """Return what parts reasoning from the answer, as the server does behind a prompt."""
    known = reasoning_format(AUTO, [template(name).source(with_tools=True)])
    assert known is None or isinstance(known, ReasoningFormat)
    return ReasoningSplitter(None if known is None else known.thought(prompt))


def parts(name: str, prompt: str, *pieces: str) -> tuple[str, str, list[ParsedCall]]:
    """Return reasoning, content and calls of a text in pieces, as the server tells them apart."""
    splits = splitter_of(name, prompt)
    parser = ToolCallParser(FUNCTIONS, format_of(name))
    thought, content, calls = "", "", list[ParsedCall]()
    for index, piece in enumerate((*pieces, "")):
        is_last = index == len(pieces)
        split = splits.take(piece, is_last=is_last)
        parsed = parser.take(split.content, is_last=is_last)
        thought, content = thought + split.reasoning, content + parsed.content
        calls += parsed.calls
    return thought, content, calls


def cuts(text: str) -> Iterator[list[str]]:
    """Yield a text as a whole, and in pieces of several sizes."""
    for size in (len(text) or 1, 1, 3, 7, 16):
        yield [text[at : at + size] for at in range(0, len(text), size)]


def plain(calls: Sequence[ParsedCall]) -> list[tuple[str, Any]]:
    """Return calls as names and values."""
    return [(each.name, json.loads(each.arguments)) for each in calls]
