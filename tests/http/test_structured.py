"""The fields that ask for a form of the text, over HTTP; forced calls of tools."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel

from onnxport.serving.params import SamplingParams
from onnxport.serving.structured.spec import StructuredOutputs

from .conftest import RunningServer
from .fake import Client, FakeEngine, events
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
COLOR = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "blue"]}, "depth": {"type": "integer", "maximum": 99}},
    "required": ["name"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR, "strict": True}}
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"color": {"$ref": "#/$defs/color"}},
                "required": ["color"],
                "additionalProperties": False,
                "$defs": {"color": {"enum": ["red", "blue"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "wash", "parameters": {"const": {"warm": True}}}},
]
TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": COLOR, "end": "</function>"}],
    "triggers": ["<function="],
}
NOTHING_FITS: dict[str, Any] = {
    "type": "triggered_tags",
    "triggers": ["<"],
    "tags": [
        {"begin": "<a>", "content": {"type": "regex", "pattern": pattern}, "end": ""}
        for pattern in ("a", r"a[^\s\S]")
    ],
}
NEWER: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "tags_with_separator",
        "tags": [
            {"type": "tag", "begin": "<c>", "end": "</c>"}
            | {"content": {"type": "json_schema", "json_schema": COLOR}}
        ],
        "separator": ",",
        "at_least_one": True,
        "stop_after_first": True,
    },
}
FORMS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": NAMED}, {"json": COLOR}),
    ({"response_format": {"type": "json_object", "schema": COLOR}}, {"json": COLOR}),
    ({"response_format": {"type": "json_schema", "schema": COLOR}}, {"json": COLOR}),
    ({"response_format": {"type": "json_object", "value": COLOR}}, {"json": COLOR}),  # TGI's
    (  # which closes objects as OpenAI asks for it
        {"response_format": {**NAMED, "json_schema": {**NAMED["json_schema"], "schema": OPEN}}},
        {"json": {**OPEN, "additionalProperties": False}},
    ),
    ({"response_format": {"type": "json_schema", "schema": OPEN}}, {"json": OPEN}),
    (
        {"structured_outputs": {"json": OPEN, "disable_additional_properties": True}},
        {"json": {**OPEN, "additionalProperties": False}},
    ),
    (
        {"structured_outputs": {"json": OPEN, "disable_additional_properties": False}},
        {"json": OPEN},
    ),
    (
        {"structured_outputs": {"regex": "a+", "disable_additional_properties": False}},
        {"regex": "a+"},
    ),
    ({"structured_outputs": {"json": COLOR}}, {"json": COLOR}),
    ({"structured_outputs": {"json": json.dumps(COLOR), "regex": None}}, {"json": COLOR}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        {"json": {}, "disable_any_whitespace": True},
    ),
    ({"guided_json": COLOR, "response_format": {"type": "text"}}, {"json": COLOR}),
    (
        {"guided_json": json.dumps(COLOR), "guided_whitespace_pattern": " ?"},
        {"json": COLOR, "whitespace_pattern": " ?"},
    ),
    ({"response_format": TAGS}, {"structural_tag": TAGS}),
    ({"response_format": NEWER}, {"structural_tag": NEWER}),
    ({"structured_outputs": {"structural_tag": TAGS}}, {"structural_tag": TAGS}),
    ({"structured_outputs": {"structural_tag": json.dumps(NEWER)}}, {"structural_tag": NEWER}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a"]}, {"choice": ("a",)}),
    (
        {"guided_grammar": 'start: "a"', "guided_decoding_backend": "auto"},
        {"grammar": 'start: "a"'},
    ),
]


def form_of(folder: Path, chat: bool, **fields: Any) -> StructuredOutputs | None:
    """Return what the engine is asked for; checks that it is compiled before."""
    from onnxport.serving.tokenizer import Tokenizer

    engine = FakeEngine(Tokenizer.from_folder(folder, frozenset()))
    client = Client(engine, folder)
    response = asyncio.run((client.chat if chat else client.complete)(**fields))
    assert response.status_code == 200, response.text
    params: SamplingParams = engine.asked[0].params
    assert engine.compiled == ([params.structured_outputs] if params.structured_outputs else [])
    return params.structured_outputs


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("fields", "wanted"), FORMS)
def test_fields(
    model_folder: Path, fields: dict[str, Any], wanted: dict[str, Any] | None, chat: bool
) -> None:
    found = form_of(model_folder, chat, **fields)
    assert found == (None if wanted is None else StructuredOutputs(**wanted))


NOT_ENFORCED = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
UNSUPPORTED = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": NOT_ENFORCED, "strict": True},
}
BROKEN = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "text"}}}
SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": UNSUPPORTED}, SCHEMA, "keyword 'uniqueItems'"),
        ({"response_format": BROKEN}, SCHEMA, "#/type"),
        (
            {"response_format": {"type": "json_object", "schema": {"$ref": "#/x"}}},
            "response_format.schema",
            "no schema",
        ),
        (
            {"response_format": {**NAMED, "schema": COLOR}},
            "response_format.json_schema",
            "with json_schema and schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "without"),
        (
            {"response_format": {"type": "text", "schema": COLOR}},
            "response_format.schema",
            "'text' with schema",
        ),
        (
            {"response_format": {**NAMED, "type": "json_object"}},
            "response_format.json_schema",
            "'json_object' with json_schema",
        ),
        ({"structured_outputs": {"json": NOT_ENFORCED}}, "structured_outputs.json", "uniqueItems"),
        ({"guided_json": NOT_ENFORCED}, "guided_json", "uniqueItems"),
        ({"structured_outputs": {"json": {}, "strict": False}}, "structured_outputs.strict", ""),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "is for json",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}
            | {"stream": True, "structured_outputs": {"regex": "a"}},
            "response_format",
            "send one of them",
        ),
        (
            {
                "response_format": {
                    **NAMED,
                    "json_schema": {"name": "x", "schema": {"oneOf": [{}, {}]}, "strict": True},
                }
            },
            SCHEMA,
            "oneOf",
        ),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, None, ""),
        (
            {"response_format": {"type": "structural_tag"}},
            "response_format",
            "'structures' and 'triggers'",
        ),
        (
            {"response_format": {**TAGS, "triggers": ["<x"]}},
            "response_format",
            "begins with none of the triggers",
        ),
        (
            {"response_format": {**TAGS, "type": "text"}},
            "response_format.structures",
            "'text' with structures and triggers",
        ),
        (
            {"response_format": {**TAGS, "schema": COLOR}},
            "response_format.schema",
            "'structural_tag' with schema",
        ),
        (
            {"structured_outputs": {"structural_tag": {**TAGS, "format": {}}}},
            "structured_outputs.structural_tag",
            "'format', 'structures', 'triggers'",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {**NAMED, "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
            "pattern",
        ),
        (
            {"response_format": {**NAMED, "json_schema": {"name": "x"}}},
            SCHEMA,
            "missing",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"param": "x"}}, "structured_outputs.param", "not supported"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            "structured_outputs.structural_tag",
            "JSON",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": NOTHING_FITS}},
            "response_format",
            "no text fits format.tags[1].content of the structural tag",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": "(", "choice": ["a"]}}, "structured_outputs", "exactly"),
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(", "stream": True}, "guided_regex", "unclosed group"),
        ({"guided_grammar": "x"}, "guided_grammar", "cannot be compiled"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "'guidance'"),
    ],
)
def test_what_is_refused(
    server: RunningServer, fields: dict[str, Any], param: str | None, words: str, chat: bool
) -> None:
    text = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    path = "chat/completions" if chat else "completions"
    response = httpx.post(f"{server.url}/v1/{path}", json={"model": MODEL, **text, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "asked",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT_ENFORCED}},
        {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": NOT_ENFORCED, "strict": False},
        },
        {"type": "json_schema", "schema": NOT_ENFORCED},
        {"type": "json_object", "schema": NOT_ENFORCED},
    ],
)
def test_without_strict_what_cannot_be_enforced_is_left_out(
    model_folder: Path, asked: dict[str, Any], chat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = form_of(model_folder, chat, response_format=asked)
    left = {name: value for name, value in NOT_ENFORCED.items() if name != "uniqueItems"}
    assert found == StructuredOutputs(json=left)
    [told] = [record.getMessage() for record in caplog.records if "prepared" in record.name]
    assert "response_format" in told
    assert "'#/uniqueItems'" in told


def test_responses_know_strict(server: RunningServer) -> None:
    body = {"model": MODEL, "input": "x", "max_output_tokens": 200, "temperature": 0}
    for strict, status in ((None, 200), (False, 200), (True, 400)):
        format_ = {"type": "json_schema", "name": "x", "schema": NOT_ENFORCED, "strict": strict}
        response = httpx.post(
            f"{server.url}/v1/responses", json=body | {"text": {"format": format_}}
        )
        assert response.status_code == status, response.text
        if status == 400:
            assert response.json()["error"]["param"] == "text.format.schema"


@pytest.fixture
def client(server: RunningServer) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def test_the_text_has_the_form(client: OpenAI) -> None:
    for seed in range(4):
        more: Any = {"model": MODEL, "max_tokens": 300, "seed": seed, "n": 2}
        messages: Any = [{"role": "user", "content": f"{seed}"}]
        chat = client.chat.completions.create(
            messages=messages,
            response_format=NAMED,
            **more,  # type: ignore[arg-type]
        )
        for choice in chat.choices:
            assert choice.finish_reason == "stop"
            found = json.loads(choice.message.content or "")
            assert found["name"] in ("red", "blue")
            assert found.keys() <= {"name", "depth"}
        extra = {"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}
        plain = client.completions.create(prompt=f"{seed}", extra_body=extra, **more)
        assert all(re.fullmatch("[a-f]{4}-[0-9]{2}", choice.text) for choice in plain.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_structural_tags(server: RunningServer, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 300, "n": 4, "seed": 1, "stream": stream}
    response = httpx.post(f"{server.url}/v1/completions", json=body | {"response_format": NEWER})
    texts = dict.fromkeys(range(4), "")
    for answer in events(response) if stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    for text in texts.values():
        found = json.loads(text.removeprefix("<c>").removesuffix("</c>"))
        assert found["name"] in ("red", "blue")
        assert text.startswith("<c>")
        assert text.endswith("</c>")


def test_structural_tags_and_tools(server: RunningServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    url = f"{server.url}/v1/chat/completions"
    error = httpx.post(url, json=body | {"response_format": TAGS}).json()["error"]
    assert "would hide calls of tools" in error["message"]
    assert error["param"] == "response_format"
    body |= {"response_format": NEWER, "tool_choice": "none", "max_tokens": 300}
    text = httpx.post(url, json=body).json()["choices"][0]["message"]["content"]
    assert text.startswith("<c>")


def test_openai_parses_into_a_class(client: OpenAI) -> None:
    class Answer(BaseModel):
        done: bool
        steps: list[int] | None

    messages: Any = [{"role": "user", "content": say('{"done": true, "steps": [3, 4]}')}]
    chat = client.chat.completions.parse(
        model=MODEL, messages=messages, response_format=Answer, temperature=0
    )
    assert chat.choices[0].message.parsed == Answer(done=True, steps=[3, 4])


def test_streams(server: RunningServer) -> None:
    body = {
        "model": MODEL,
        "prompt": "x",
        "stream": True,
        "n": 2,
        "max_tokens": 200,
        "seed": 1,
        "structured_outputs": {"choice": ["naïve", "日本"]},
    }
    texts = {0: "", 1: ""}
    for event in events(httpx.post(f"{server.url}/v1/completions", json=body)):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert set(texts.values()) <= {"naïve", "日本"}


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_of_what_is_not_strict_keep_what_can_be_enforced(
    client: OpenAI, stream: bool
) -> None:
    function = {"name": "pick", "parameters": {"properties": {"a": NOT_ENFORCED}, "if": True}}
    function["parameters"] |= {"required": ["a"], "additionalProperties": False}  # type: ignore[operator]
    for seed in range(4):
        more: Any = {"model": MODEL, "max_tokens": 300, "seed": seed}
        asked = client.chat.completions.create(
            messages=[{"role": "user", "content": f"{seed}"}],
            tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
            tool_choice="required",
            stream=stream,  # type: ignore[arg-type]
            **more,
        )
        for call in calls_of(asked, "required", stream):
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() == {"a"}
            assert set(arguments["a"]) <= {1, 2}


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls(client: OpenAI, stream: bool) -> None:
    for seed in range(4):
        more: Any = {"model": MODEL, "max_tokens": 300, "seed": seed, "tools": TOOLS}
        messages: Any = [{"role": "user", "content": f"{seed}"}]
        for choice, names in (
            ("required", {"paint", "wash"}),
            ({"type": "function", "function": {"name": "wash"}}, {"wash"}),
        ):
            asked = client.chat.completions.create(
                messages=messages, tool_choice=choice, stream=stream, **more
            )
            calls = [call.function for call in calls_of(asked, choice, stream)]
            assert calls
            assert names != {"wash"} or len(calls) == 1
            for call in calls:
                assert call.name in names
                arguments = json.loads(call.arguments)
                if call.name == "wash":
                    assert arguments == {"warm": True}
                else:
                    assert arguments["color"] in ("red", "blue")


def test_strict_functions_are_called_as_they_say(client: OpenAI) -> None:
    strict: Any = [{**one, "function": {**one["function"], "strict": True}} for one in TOOLS]
    for choice in ("required", {"type": "function", "function": {"name": "wash"}}):
        asked = [
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "x"}],
                max_tokens=300,
                seed=1,
                tools=tools,
                tool_choice=choice,  # type: ignore[arg-type]
            )
            for tools in (strict, TOOLS)
        ]
        # The model is not told, so that the text is the same.
        first, second = ([call.function for call in calls_of(one, choice, False)] for one in asked)
        assert first == second
        for call in first:
            assert json.loads(call.arguments).keys() <= {"warm", "color"}


def calls_of(asked: Any, choice: Any, stream: bool) -> list[Any]:
    """Return the calls of an answer whose text is nothing else; checks its end."""
    reason = "tool_calls" if choice == "required" else "stop"
    if not stream:
        [answer] = asked.choices
        assert answer.finish_reason in (reason, "length")
        assert not (answer.message.content or "").strip() or answer.finish_reason == "length"
        return list(answer.message.tool_calls)
    choices = [chunk.choices[0] for chunk in asked]
    assert choices[-1].finish_reason in (reason, "length")
    return [call for one in choices for call in one.delta.tool_calls or ()]


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tool_choice": "required", "guided_json": COLOR}, "tool_choice", "another one"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"if": True}},
                    }
                ],
            },
            "tools.0.function.parameters",
            "'if'",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
                ],
            },
            "tools.0.function.parameters",
            "exclude everything",
        ),
    ],
)
def test_forced_calls_that_are_refused(
    server: RunningServer, more: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    response = httpx.post(f"{server.url}/v1/chat/completions", json={**body, **more})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
