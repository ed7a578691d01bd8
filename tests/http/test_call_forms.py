"""Forms of texts that call tools: what a model may write of them, and what it then did."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.hermes import HERMES
from tests.serving.structured import accepts, compiled

from .conftest import RunningServer
from .scripted import MODEL, say


@pytest.fixture
def client(server: RunningServer) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as opened:
        yield opened


def function(name: str, strict: bool | None, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    told = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": told}


ADD = function("add", True, a={"type": "integer"})
FIND = function("find", None, text={"type": "string"})
TOOLS: Any = [ADD, FIND]
UNHELD = function("f", True, a={"not": {"type": "string"}})  # no form can hold it
NAMED = {"name": "f"}
ANY_OBJECT = {"type": "json_object"}
NO_OBJECT = {"type": "function", "function": {**NAMED, "parameters": {"type": "string"}}}


def call(name: str, **arguments: Any) -> str:
    told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{told}\n</tool_call>"


GOOD, LOOSE = call("add", a=1), call("find", txt=5)  # `find` is not strict


@pytest.mark.parametrize(
    ("text", "free", "free_once", "forced", "forced_once"),
    [
        ("", True, True, False, False),
        ("text\n<tool", True, True, False, False),
        (GOOD, True, True, True, True),
        (f"{GOOD}\n{GOOD}", True, False, True, False),
        (f"Let me see.\n{GOOD}", True, True, False, False),
        (f"Let me see.\n{GOOD}\n{LOOSE} Done.", True, False, False, False),
        (LOOSE, True, True, False, False),
        (call("find", text="</tool_call>"), True, True, True, True),
        (call("add", a="1"), False, False, False, False),
        (call("sub", a=1), False, False, False, False),
        ("a <tool_call> b", False, False, False, False),
        (GOOD.removesuffix("</tool_call>"), False, False, False, False),
    ],
)
def test_what_may_be_written(
    text: str, free: bool, free_once: bool, forced: bool, forced_once: bool
) -> None:
    found = [
        accepts(compiled(calls(TOOLS, HERMES, several=several, forced=must)), text)
        for must in (False, True)
        for several in (True, False)
    ]
    assert found == [free, free_once, forced, forced_once]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "integer"}, {"type": "object"}]},
        {"$ref": "#/$defs/one", "$defs": {"one": {"properties": {"a": {"type": "integer"}}}}},
    ],
)
def test_arguments_are_an_object_whatever_parameters_allow(parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    form = compiled(calls([tool], HERMES, several=False))
    assert accepts(form, GOOD)
    for other in ("5", "null", '"a"', "[]"):
        assert not accepts(form, GOOD.replace('{"a": 1}', other))


def test_a_function_without_parameters_gets_no_arguments() -> None:
    for function, may in (({"name": "f"}, False), ({"name": "f", "parameters": {}}, True)):
        tool = {"type": "function", "function": function}
        form = compiled(calls([tool], HERMES, several=False))
        assert accepts(form, call("f"))
        assert accepts(form, call("f", a=1)) is may


def test_names_are_written_as_the_model_reads_them() -> None:
    tools = [function("größe🙂", True, über={"type": "string"})]
    assert accepts(compiled(calls(tools, HERMES, several=False)), call("größe🙂", über="é"))


@pytest.mark.parametrize("stream", [False, True])
def test_strict_functions_are_enforced_where_the_model_may_call(
    client: OpenAI, stream: bool
) -> None:
    """The model says `a` is a text, and is kept from it; what else it says is its own."""
    for text, content, arguments in (
        ("no call", "no call", None),
        (f"See: {GOOD}", "See:", [{"a": 1}]),
        (f"{GOOD}\n{LOOSE}", "", [{"a": 1}, {"txt": 5}]),
        (f"{GOOD} after", " after", [{"a": 1}]),
    ):
        told = answer(client, say(text), stream=stream, tools=TOOLS)
        assert told == (content, arguments or [])
    for text in (call("add", a="1"), call("add", b=1)):
        _, [arguments] = answer(client, say(text), stream=stream, tools=TOOLS)
        assert arguments.keys() == {"a"}
        assert isinstance(arguments["a"], int)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format_is_that_of_answers_and_not_of_calls(
    client: OpenAI, stream: bool
) -> None:
    """As OpenAI has it. Agents send both with each turn."""
    schema = {"name": "x", "schema": ADD["function"]["parameters"]}
    ask: Any = {"stream": stream, "response_format": {"type": "json_schema", "json_schema": schema}}
    for tools in (TOOLS, [FIND]):
        assert answer(client, say('{"a": 5}'), tools=tools, **ask) == ('{"a": 5}', [])
        told = answer(client, say(f"{LOOSE}\n{LOOSE}"), tools=tools, **ask)
        assert told == ("", [{"txt": 5}] * 2)
    once = answer(client, say(f"{LOOSE}\n{LOOSE}"), tools=TOOLS, parallel_tool_calls=False, **ask)
    assert once == ("", [{"txt": 5}])
    _, [arguments] = answer(client, say(call("add", a="1")), tools=TOOLS, **ask)
    assert isinstance(arguments["a"], int)  # `add` is strict
    content, found = answer(client, say(LOOSE), tools=TOOLS, tool_choice="none", **ask)
    assert (json.loads(content).keys(), found) == ({"a"}, [])


def test_a_response_has_the_form_of_its_text_or_calls(client: OpenAI) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": ADD["function"]["parameters"]}
    tool: Any = {"type": "function", **FIND["function"]}
    for said, kind in ((LOOSE, "function_call"), ('{"a": 5}', "message")):
        done = client.responses.create(
            model=MODEL,
            input=say(said),
            tools=[tool],
            text={"format": schema},  # type: ignore[typeddict-item]
            temperature=0,
        )
        assert [item.type for item in done.output] == [kind]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_call_at_most(client: OpenAI, stream: bool, choice: str) -> None:
    said = say(f"{GOOD}\n{call('find', text='x')}\nmore")
    ask: Any = {"stream": stream, "tools": TOOLS, "tool_choice": choice}
    assert answer(client, said, parallel_tool_calls=False, **ask) == ("", [{"a": 1}])
    if choice == "auto":
        content, found = answer(client, said, parallel_tool_calls=True, **ask)
        assert (content, found) == ("\nmore", [{"a": 1}, {"text": "x"}])


def test_without_tools_there_is_nothing_to_enforce(client: OpenAI) -> None:
    for tools in ([], None):
        more: Any = {"tools": tools} if tools is not None else {}
        assert answer(client, say("hi"), parallel_tool_calls=False, **more) == ("hi", [])
    assert answer(client, say(f"{GOOD}"), tools=[*TOOLS, ADD]) == ("", [{"a": 1}])  # ADD again
    none: Any = {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False}
    assert answer(client, say(call("add", a="1")), **none) == (call("add", a="1"), [])


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"tools": [function("", None)]}, "tools.0.function.name", "at least 1"),
        ({"tools": [ADD, FIND, function("add", True)]}, "tools.2.function.name", "'add'"),
        ({"tools": TOOLS, "guided_regex": "a"}, "tools", "another one"),
        ({"tools": [FIND], "parallel_tool_calls": False, "guided_regex": "a"}, "tools", "strict"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "boolean"),
        (
            {"tools": [FIND, UNHELD], "response_format": ANY_OBJECT},
            "tools.1.function.parameters",
            "'not'",
        ),
        (
            {"tools": [FIND], "tool_choice": "required", "guided_json": {}},
            "tool_choice",
            "another one",
        ),
        ({"tools": [UNHELD]}, "tools.0.function.parameters", "'not'"),
        (
            {"tools": [NO_OBJECT], "tool_choice": "required"},
            "tools.0.function.parameters",
            "'string'",
        ),
        (
            {"tools": [FIND, UNHELD], "tool_choice": {"type": "function", "function": NAMED}},
            "tools.1.function.parameters",
            "'not'",
        ),
    ],
)
def test_what_is_refused(
    server: RunningServer, more: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **more}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert words in response.json()["error"]["message"]


def answer(
    client: OpenAI, content: str, *, stream: bool = False, **ask: Any
) -> tuple[str, list[dict[str, Any]]]:
    """Return the content of an answer and the arguments of its calls; checks its end."""
    messages: Any = [{"role": "user", "content": content}]
    more: Any = {"model": MODEL, "messages": messages, "max_tokens": 300, "temperature": 0, **ask}
    if stream:
        choices = [one.choices[0] for one in client.chat.completions.create(stream=True, **more)]
        told = "".join(one.delta.content or "" for one in choices)
        found = [each for one in choices for each in one.delta.tool_calls or ()]
        reason = choices[-1].finish_reason
    else:
        [choice] = client.chat.completions.create(**more).choices
        told, found = choice.message.content or "", list(choice.message.tool_calls or ())
        reason = choice.finish_reason
    assert reason == ("tool_calls" if found else "stop")
    return told, [json.loads(each.function.arguments) for each in found]
