"""gpt-oss's answers in chats and responses: a real server, and the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from .conftest import RunningServer, _servers
from .harmony import CALL, MARKS, NEXT, RETURN, TEMPLATE, answer, call, message
from .scripted import MODEL, say, write_tokenizer
from .test_reasoning import joined, streamed, whole
from .test_responses import events

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": POINT}}
SUB: Any = {"type": "function", "function": {"name": "sub", "parameters": POINT}}
STRICT: Any = {"type": "function", "function": {**ADD["function"], "strict": True}}
JSON = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
THOUGHT = message("analysis", "hm, é")
DONE = answer(THOUGHT, message("final", "yes"))


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Return a server whose marks are special tokens, of which two end an answer."""
    folder = tmp_path_factory.mktemp("oss")
    write_tokenizer(folder, TEMPLATE, MARKS)
    with _servers(folder) as start:
        yield start(begins=["<|start|>", "assistant"], ends=[RETURN, CALL])


@pytest.fixture(scope="module")
def client(oss: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{oss.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def body(text: str, **more: Any) -> dict[str, Any]:
    ask = {"messages": [{"role": "user", "content": say(text)}], "max_tokens": 400}
    return {"model": MODEL, "temperature": 0, **ask, **more}


def both(server: RunningServer, ask: dict[str, Any]) -> dict[str, Any]:
    """Return the message of an answer and why it ended; the stream says the same."""
    told = whole(server, ask)
    [choice] = told["choices"]
    chunks = streamed(server, ask)
    found = choice["message"]
    assert joined(chunks, "content") == (found["content"] or "")
    assert joined(chunks, "reasoning") == (found["reasoning"] or "")
    calls = [
        (one["function"]["name"], one["function"]["arguments"])
        for chunk in chunks
        for each in chunk["choices"]
        for one in each["delta"].get("tool_calls", ())
    ]
    assert calls == [tuple(each["function"].values()) for each in found.get("tool_calls", ())]
    [last] = [one for c in chunks for one in c["choices"] if one["finish_reason"]]
    assert last["finish_reason"] == choice["finish_reason"]
    usage, details = chunks[-1]["usage"], {"prompt_tokens_details": 0}
    assert usage | details == told["usage"] | details
    return {**found, "calls": calls, "finish_reason": choice["finish_reason"], "usage": usage}


def test_reasoning_and_answer(oss: RunningServer) -> None:
    found = both(oss, body(DONE))
    assert (found["reasoning"], found["content"]) == ("hm, é", "yes")
    assert found["reasoning_content"] == "hm, é"
    assert found["finish_reason"] == "stop"
    num = found["usage"]["completion_tokens"] - len("yes") - 1  # the end token
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
    plain = both(oss, body(message("final", "yes")))
    assert (plain["reasoning"], plain["content"]) == (None, "yes")
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("yes, <b>", None, "yes, <b>"),  # no channel
        ("to be", None, "to be"),
        (answer(THOUGHT, THOUGHT, message("final", "yes")), "hm, é\n\nhm, é", "yes"),
        (
            answer(message("commentary", "See."), THOUGHT, message("final", "a <|")),
            "hm, é",
            "See.\n\na <|",
        ),
        (message("commentary to=browser", "x"), None, "x"),
        (message("analysis to=python code", "x"), "x", ""),
        (answer(call("add", '{"x": 1}')), None, '{"x": 1}'),  # of no function that was offered
        (answer("<|channel|>commentary?commentary?", message("final", "a")), None, "a"),
        ("<|channel|>final yes, I do", None, "final yes, I do"),
    ],
)
def test_messages(oss: RunningServer, text: str, reasoning: str | None, content: str) -> None:
    found = both(oss, body(text))
    assert (found["reasoning"], found["content"] or "") == (reasoning, content)
    assert found["calls"] == []


@pytest.mark.parametrize("tools", [None, [ADD]])
def test_an_answer_that_is_cut_anywhere(oss: RunningServer, tools: Any) -> None:
    """What is told is the beginning of it, and never a mark or a word of a header."""
    words = answer(THOUGHT, message("commentary", "See."), call("add", '{"x": 1}'))
    told: list[tuple[str, str, list[Any]]] = []
    most = len("analysis") + 5 + len("hm, é") + 1 + 3 * len("assistant") + 60
    for count in range(1, most, 3):
        ask = body(words + CALL, max_tokens=count, **({"tools": tools} if tools else {}))
        found = whole(oss, ask)["choices"][0]
        found = {**found["message"], "finish_reason": found["finish_reason"]}
        assert "hm, é".startswith(found["reasoning"] or "")
        content = found["content"] or ""
        shown = 'See.\n\n{"x": 1}'
        assert shown.startswith(content)
        told.append((found["reasoning"], content, found.get("tool_calls", [])))
    assert told[0] == (None, "", [])
    assert told[-1][0] == "hm, é"
    assert told[-1][1] == ("See." if tools else shown)
    assert len(told[-1][2]) == bool(tools)


@pytest.mark.parametrize(
    "written",
    [
        call("add", '{"x": 1}'),
        ' to=functions.add<|channel|>commentary json<|message|>{"x": 1}',
        message("analysis to=functions.add code", '{"x": 1}'),
        message("commentary to=functions.add", '\n{\n  "x": 1\n}\n'),
    ],
)
@pytest.mark.parametrize("skips", [True, False])
def test_calls(oss: RunningServer, written: str, skips: bool) -> None:
    first = message("commentary", "See. ")
    ask = body(answer(THOUGHT, first, written) + CALL, tools=[ADD], skip_special_tokens=skips)
    found = both(oss, ask)
    assert (found["reasoning"], found["content"]) == ("hm, é", "See.")
    assert found["calls"] == [("add", '{"x": 1}')]
    assert found["finish_reason"] == "tool_calls"
    alone = both(oss, body(written + CALL, tools=[ADD, SUB]))
    assert (alone["content"], alone["calls"]) == (None, [("add", '{"x": 1}')])


def test_marks_in_arguments_are_text(oss: RunningServer) -> None:
    given = '{"x": 1, "t": "a \\"<|end|>"}'
    found = both(oss, body(call("add", given) + CALL, tools=[ADD]))
    assert [json.loads(arguments) for _, arguments in found["calls"]] == [json.loads(given)]
    assert found["content"] is None


def test_several_calls(oss: RunningServer) -> None:
    text = answer(call("add", '{"x": 1}'), THOUGHT, call("sub", '{"x": 2}'))
    found = both(oss, body(text, tools=[ADD, SUB]))
    assert found["calls"] == [("add", '{"x": 1}'), ("sub", '{"x": 2}')]
    assert (found["reasoning"], found["content"]) == ("hm, é", None)


def test_what_is_no_call_is_content_without_its_header(oss: RunningServer) -> None:
    for text, content in (
        (call("mul", '{"x": 1}'), '{"x": 1}'),
        (call("add", "x = 1"), "x = 1"),
        (message("final", "to=functions.add"), "to=functions.add"),
    ):
        for skips in (True, False):
            found = both(oss, body(f"{text}{NEXT}", tools=[ADD], skip_special_tokens=skips))
            assert (found["content"], found["calls"]) == (content, [])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("said", [message("commentary", "no!"), call("add", '{"y": 1}')])
def test_forced_calls(oss: RunningServer, choice: Any, said: str) -> None:
    """The model says something else, and is kept from it; thoughts are its own."""
    ask = {"tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
    found = both(oss, body(answer(THOUGHT, said), **ask))
    assert (found["reasoning"], found["content"]) == ("hm, é", None)
    [(name, arguments)] = found["calls"]
    assert name == "add"
    assert isinstance(json.loads(arguments)["x"], int)
    assert found["finish_reason"] == ("tool_calls" if choice == "required" else "stop")


def test_strict_functions(oss: RunningServer) -> None:
    said = answer(THOUGHT, message("commentary", "See."), call("add", '{"y": 1}'))
    found = both(oss, body(said + CALL, tools=[STRICT], parallel_tool_calls=False))
    assert (found["reasoning"], found["content"]) == ("hm, é", "See.")
    assert isinstance(json.loads(found["calls"][0][1])["x"], int)
    free = both(oss, body(DONE, tools=[STRICT]))
    assert (free["content"], free["calls"]) == ("yes", [])


@pytest.mark.parametrize(
    "said",
    [
        answer(THOUGHT, message("final", '{"y": "<"}')),
        answer(THOUGHT, message("final <|constrain|>json", '{"y": 1}')),
        message("final", "yes"),
    ],
)
def test_a_form_is_that_of_the_final_channel(oss: RunningServer, said: str) -> None:
    found = both(oss, body(said, response_format=JSON))
    assert found["reasoning"] == ("hm, é" if THOUGHT in said else None)
    assert isinstance(json.loads(found["content"])["x"], int)
    assert found["finish_reason"] == "stop"


def test_other_forms(oss: RunningServer) -> None:
    for form, right in (({"choice": ["ja", "no"]}, ("ja", "no")), ({"regex": "[a-c]"}, "abc")):
        found = both(oss, body(DONE, structured_outputs=form))
        assert found["reasoning"] == "hm, é"
        assert found["content"] in right


def test_a_form_beside_tools(oss: RunningServer) -> None:
    ask = {"tools": [ADD], "response_format": JSON}
    found = both(oss, body(answer(THOUGHT, message("final", '{"x": 2}')), **ask))
    assert (found["content"], found["calls"]) == ('{"x": 2}', [])
    found = both(oss, body(answer(THOUGHT, call("add", '{"x": 1}')) + CALL, **ask))
    assert (found["content"], found["calls"]) == (None, [("add", '{"x": 1}')])


def test_an_answer_goes_on(oss: RunningServer) -> None:
    messages = [
        {"role": "user", "content": say(message("final", "It is yes"))},
        {"role": "assistant", "content": "It is"},
    ]
    ask = {**body(""), "messages": messages, "continue_final_message": True}
    assert both(oss, ask)["content"] == " yes"
    form = {"structured_outputs": {"choice": [" no", " never"]}}
    assert both(oss, {**ask, **form})["content"] in (" no", " never")


def test_efforts(oss: RunningServer) -> None:
    sizes = {
        effort: both(oss, body(DONE, reasoning_effort=effort))["usage"]["prompt_tokens"]
        for effort in ("low", "medium")
    }
    assert sizes["medium"] - sizes["low"] == len("medium") - len("low")
    for effort in ("none", "minimal"):
        ask = body(DONE, reasoning_effort=effort)
        response = httpx.post(f"{oss.url}/v1/chat/completions", json=ask)
        assert response.status_code == 400
        assert "low, medium, high" in response.json()["error"]["message"]
        asked = {"model": MODEL, "input": "a", "reasoning": {"effort": effort}}
        response = httpx.post(f"{oss.url}/v1/responses", json=asked)
        assert response.json()["error"]["param"] == "reasoning.effort"


@pytest.mark.parametrize("include", [True, False])
def test_log_probabilities_are_of_all_tokens_in_their_order(
    oss: RunningServer, include: bool
) -> None:
    text = answer(message("commentary", "See."), THOUGHT, message("final", "yes"))
    ask = body(text, logprobs=True, include_reasoning=include, return_token_ids=True)
    [choice] = whole(oss, ask)["choices"]
    assert (choice["message"]["reasoning"] is None) == (not include)
    told = choice["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in told).decode() == text + RETURN
    chunks = [each for one in streamed(oss, ask) for each in one["choices"]]
    pieces = [one for each in chunks if each["logprobs"] for one in each["logprobs"]["content"]]
    assert [one["bytes"] for one in pieces] == [one["bytes"] for one in told]
    assert [one for each in chunks for one in each.get("token_ids", ())] == choice["token_ids"]


def test_completions_have_no_marks(oss: RunningServer) -> None:
    ask = {"model": MODEL, "prompt": say(DONE), "max_tokens": 200, "temperature": 0}
    told = httpx.post(f"{oss.url}/v1/completions", json=ask).json()["choices"][0]["text"]
    assert not any(mark in told for mark in MARKS)


def test_responses(oss: RunningServer) -> None:
    """Each message is an item of its own, in order; log probabilities are those of its text."""
    texts = (message("commentary", "See."), THOUGHT, message("final", "yes"))
    ask = {
        "model": MODEL,
        "input": say(answer(*texts, call("add", '{"x": 1}')) + CALL),
        "tools": [{"type": "function", "name": "add", "parameters": POINT, "strict": False}],
        "include": ["message.output_text.logprobs"],
    }
    found = events(httpx.post(f"{oss.url}/v1/responses", json={**ask, "stream": True}).text)
    output = found[-1]["response"]["output"]
    kinds = ["message", "reasoning", "message", "function_call"]
    assert [item["type"] for item in output] == kinds
    parts = [item["content"][0] for item in output[:3]]
    assert [part["text"] for part in parts] == ["See.", "hm, é", "yes"]
    for part in (parts[0], parts[2]):
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    assert output[3]["arguments"] == '{"x": 1}'
    done = httpx.post(f"{oss.url}/v1/responses", json=ask).json()
    for one, other in zip(done["output"], output, strict=True):
        assert one["type"] == other["type"]
        assert one.get("content") == other.get("content")
        assert one.get("arguments") == other.get("arguments")


def test_the_client_puts_a_stream_together(client: OpenAI) -> None:
    """It follows each event, and refuses those that do not fit."""
    texts = (message("commentary", "See. "), THOUGHT, call("add", '{"x": 1}'), THOUGHT)
    tool: Any = {"type": "function", "name": "add", "parameters": POINT, "strict": False}
    ask: Any = {
        "model": MODEL,
        "input": say(answer(*texts, call("add", "x = 1"), message("final", "yes"))),
        "tools": [tool],
        "max_output_tokens": 600,
    }
    done = client.responses.create(**ask)
    kinds = ["message", "reasoning", "function_call", "reasoning", "message"]
    assert [item.type for item in done.output] == kinds
    snapshots: dict[int, str] = {}
    with client.responses.stream(**ask) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                snapshots[event.output_index] = event.snapshot
        final = stream.get_final_response()
    assert [item.type for item in final.output] == kinds
    assert snapshots == {0: "See. ", 4: "x = 1\n\nyes"}
    assert final.output_text == done.output_text == "".join(snapshots.values())


def test_what_a_response_said_can_be_sent_back(client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "add", "parameters": POINT, "strict": False}
    text = say(answer(THOUGHT, call("add", '{"x": 1}')) + CALL)
    given: Any = {"model": MODEL, "tools": [tool], "temperature": 0}
    first = client.responses.create(input=text, **given)
    reasoning, called = first.output
    assert (reasoning.type, called.type) == ("reasoning", "function_call")
    assert first.status == "completed"
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "2"}
    output = [item.model_dump() for item in first.output]
    items: Any = [{"role": "user", "content": "a"}, *output, result]
    again = client.responses.create(input=items, max_output_tokens=1, **given)
    function = {"name": "add", "arguments": '{"x": 1}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "hm, é", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, tools=[ADD], max_tokens=1)
    assert again.usage is not None
    assert chat.usage is not None
    assert again.usage.input_tokens == chat.usage.prompt_tokens


def test_servers_that_are_told_otherwise(tmp_path: Any) -> None:
    write_tokenizer(tmp_path, TEMPLATE, MARKS)
    begun: Any = {"begins": ["<|start|>", "assistant"], "ends": [RETURN, CALL]}
    ask = body(answer(THOUGHT, call("add", '{"x": 1}')) + CALL, tools=[ADD])
    with _servers(tmp_path) as start:
        found = whole(start(reasoning_parser="none", **begun), ask)["choices"][0]["message"]
        assert found["content"] == "hm, é"  # all of the text, and no header
        assert [each["function"]["name"] for each in found["tool_calls"]] == ["add"]
        found = whole(start(tool_call_parser="hermes", **begun), ask)["choices"][0]["message"]
        assert (found["reasoning"], found["content"]) == ("hm, é", '{"x": 1}')
