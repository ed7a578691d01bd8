"""Reasoning in answers of chats and responses: a real server, and the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from onnxport.serving.http.job import Run
from onnxport.serving.http.reasoning import DeltaSplitter, TextFilter, Thinking
from onnxport.serving.outputs import CompletionDelta, FinishReason
from onnxport.serving.reasoning_formats import FORMATS

from .conftest import RunningServer, StartServer, _servers
from .scripted import CHAT_TEMPLATE, MODEL, say, write_tokenizer
from .test_responses import events as response_events

# What the template opens is the beginning of what the model is told to say.
TEMPLATE = (
    CHAT_TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}",
    )
    + "{% if enable_thinking is defined and add_generation_prompt %}<think>\n"
    "{% if not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
TAGS = ("<think>", "</think>")
THOUGHTS = "<think>\nhm, é\n</think>\n\n"
WAYS = [None, True, False]  # the model opens the thoughts, the template does, it closes them
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": POINT, "strict": True},
}
GOOD, BAD = (
    f'<tool_call>\n{{"name": "add", "arguments": {{"x": {value}}}}}\n</tool_call>'
    for value in (1, '"1"')
)
JSON = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    folder = tmp_path_factory.mktemp("thinking")
    write_tokenizer(folder, TEMPLATE, TAGS)
    with _servers(folder) as start:
        yield start


@pytest.fixture(scope="module")
def thinker(start: StartServer) -> RunningServer:
    """Return a server whose tags are tokens, special ones that are made text."""
    return start(texts=TAGS)


@pytest.fixture(scope="module")
def client(thinker: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{thinker.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def body(text: str, thinks: bool | None = None, **more: Any) -> dict[str, Any]:
    """Return a request for an answer."""
    ask = {"messages": [{"role": "user", "content": say(text)}], "max_tokens": 300}
    way = {} if thinks is None else {"enable_thinking": thinks}
    return {"model": MODEL, "temperature": 0, **ask, "chat_template_kwargs": way, **more}


def whole(server: RunningServer, ask: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=ask)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


def streamed(server: RunningServer, ask: dict[str, Any]) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = httpx.post(f"{server.url}/v1/chat/completions", json={**ask, **options})
    *chunks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def joined(chunks: list[dict[str, Any]], name: str, index: int = 0) -> str:
    deltas = [each["delta"] for one in chunks for each in one["choices"] if each["index"] == index]
    return "".join(delta.get(name) or "" for delta in deltas)


@pytest.mark.parametrize("thinks", WAYS)
def test_reasoning_and_answer(thinker: RunningServer, thinks: bool | None) -> None:
    text = "<think>\n\n</think>\n\nyes" if thinks is False else f"{THOUGHTS}yes"
    reasoning = None if thinks is False else "hm, é"
    told = whole(thinker, body(text, thinks))
    [choice] = told["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
    }
    assert choice["finish_reason"] == "stop"
    answer = len("yes") + 1  # the end token
    num = told["usage"]["completion_tokens"] - answer
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
    chunks = streamed(thinker, body(text, thinks))
    for name in ("reasoning_content", "reasoning"):
        assert joined(chunks, name) == (reasoning or "")
    assert joined(chunks, "content") == "yes"
    usage = chunks[-1]["usage"]
    details = "prompt_tokens_details"
    assert {**usage, details: 0} == {**told["usage"], details: 0}


def test_an_answer_without_reasoning(thinker: RunningServer) -> None:
    message = whole(thinker, body("say <think>"))["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("say <think>", None)
    assert whole(thinker, body(""))["choices"][0]["message"]["content"] == ""
    assert joined(streamed(thinker, body(" yes")), "content") == " yes"


@pytest.mark.parametrize("thinks", [None, True])
def test_cut_within_the_reasoning(thinker: RunningServer, thinks: bool | None) -> None:
    ask = body(f"<think>\n{'hm ' * 9}\n</think>\n\nyes", thinks, max_tokens=8)
    [choice] = whole(thinker, ask)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == "hm hm hm"[: 6 if thinks is None else 8]
    chunks = streamed(thinker, ask)
    assert joined(chunks, "content") == ""
    assert joined(chunks, "reasoning") == choice["message"]["reasoning"]
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 8}


def test_the_openai_client(client: OpenAI) -> None:
    ask: Any = body(f"{THOUGHTS}yes")
    template = {"chat_template_kwargs": ask.pop("chat_template_kwargs")}
    done = client.chat.completions.create(**ask, extra_body=template)
    message = done.choices[0].message
    assert (message.content, message.reasoning_content) == ("yes", "hm, é")  # type: ignore[attr-defined]
    assert done.usage is not None
    assert done.usage.completion_tokens_details is not None
    assert done.usage.completion_tokens_details.reasoning_tokens
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "yes"


def test_reasoning_that_is_not_wanted(thinker: RunningServer) -> None:
    ask = body(f"{THOUGHTS}yes", include_reasoning=False)
    message = whole(thinker, ask)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("yes", None)
    chunks = streamed(thinker, ask)
    assert not any("reasoning" in each["delta"] for one in chunks for each in one["choices"])
    assert joined(chunks, "content") == "yes"
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(("effort", "told"), [("low", "hm, é"), ("none", None)])
def test_an_effort_says_whether_the_model_thinks(
    thinker: RunningServer, effort: str, told: str | None
) -> None:
    """In chats and responses; the template has but the variable that vLLM sets for it."""
    text = f"{THOUGHTS}yes" if told else "<think>\n\n</think>\n\nyes"
    chat = whole(thinker, body(text, reasoning_effort=effort))
    message = chat["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("yes", told)
    ask = {"model": MODEL, "input": say(text), "reasoning": {"effort": effort}}
    response = httpx.post(f"{thinker.url}/v1/responses", json=ask).json()
    assert [item["type"] for item in response["output"]] == ["reasoning"] * bool(told) + ["message"]
    assert response["reasoning"] == {"effort": effort, "summary": None}
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    asked = body(text, told is None, reasoning_effort=effort)  # what the request says itself counts
    assert whole(thinker, asked)["usage"]["prompt_tokens"] != chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("include", [None, False])
def test_thoughts_that_are_asked_for_beside_no_effort_are_told(
    thinker: RunningServer, include: bool | None
) -> None:
    """The variable of the template says more exactly what is wanted, and nothing is hidden."""
    more = {} if include is None else {"include_reasoning": include}
    ask = body(f"{THOUGHTS}yes", True, reasoning_effort="none", **more)
    message = whole(thinker, ask)["choices"][0]["message"]
    told = "hm, é" if include is None else None
    assert (message["content"], message["reasoning"]) == ("yes", told)
    asked = {"enable_thinking": True}
    ask = {"model": MODEL, "input": say(f"{THOUGHTS}yes"), "chat_template_kwargs": asked}
    response = httpx.post(
        f"{thinker.url}/v1/responses", json={**ask, "reasoning": {"effort": "none"}}
    ).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]


def test_an_effort_that_the_template_does_not_know_is_refused(server: RunningServer) -> None:
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json=body("a", reasoning_effort="low")
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize("include", [True, False])
def test_log_probabilities_are_of_all_tokens_in_their_order(
    thinker: RunningServer, include: bool
) -> None:
    text = f"{THOUGHTS}yes"
    ask = body(text, logprobs=True, include_reasoning=include, return_token_ids=True, n=2)
    for choice in whole(thinker, ask)["choices"]:
        told = choice["logprobs"]["content"]
        spelled = b"".join(bytes(each["bytes"]) for each in told).decode()
        assert spelled == f"{text}<|im_end|>"
        chunks = [
            each
            for one in streamed(thinker, ask)
            for each in one["choices"]
            if each["index"] == choice["index"]
        ]
        pieces = [each["logprobs"]["content"] for each in chunks if each["logprobs"]]
        assert [each["bytes"] for piece in pieces for each in piece] == [
            each["bytes"] for each in told
        ]
        assert [one for each in chunks for one in each.get("token_ids", ())] == choice["token_ids"]


def test_several_answers(thinker: RunningServer) -> None:
    ask = body(f"{THOUGHTS}yes", n=3)
    told = whole(thinker, ask)
    assert [each["message"]["reasoning"] for each in told["choices"]] == ["hm, é"] * 3
    chunks = streamed(thinker, ask)
    for index in range(3):
        assert joined(chunks, "reasoning", index) == "hm, é"
        assert joined(chunks, "content", index) == "yes"
    tokens = told["usage"]["completion_tokens"] - 3 * (len("yes") + 1)
    for usage in (told["usage"], chunks[-1]["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == tokens


@pytest.mark.parametrize("thinks", [None, True])
def test_a_call_that_nothing_follows_ends_a_thought(
    thinker: RunningServer, thinks: bool | None
) -> None:
    loose = {"type": "function", "function": {"name": "add", "parameters": POINT}}
    ask = body(f"<think>\nI call.\n{GOOD}", thinks, tools=[loose])
    [choice] = whole(thinker, ask)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I call.", None)
    assert [each["function"]["arguments"] for each in choice["message"]["tool_calls"]] == [
        '{"x": 1}'
    ]
    chunks = streamed(thinker, ask)
    assert (joined(chunks, "reasoning"), joined(chunks, "content")) == ("I call.", "")
    calls = [each for one in chunks for each in one["choices"] if each["delta"].get("tool_calls")]
    assert len(calls) == 1
    [choice] = whole(thinker, {**ask, "tools": None})["choices"]
    assert choice["message"]["reasoning"] == f"I call.\n{GOOD}"


def test_calls_are_behind_the_reasoning(thinker: RunningServer) -> None:
    loose = {"type": "function", "function": {"name": "add", "parameters": POINT}}
    for tool in (TOOL, loose):
        ask = body(f"<think>\nI call {BAD}\n</think>\n\nSee: {GOOD}", tools=[tool])
        [choice] = whole(thinker, ask)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == (f"I call {BAD}", "See:")
        assert [each["function"]["arguments"] for each in message["tool_calls"]] == ['{"x": 1}']
        chunks = streamed(thinker, ask)
        assert joined(chunks, "reasoning") == f"I call {BAD}"
        assert joined(chunks, "content") == "See:"
        calls = [
            call
            for one in chunks
            for each in one["choices"]
            for call in each["delta"].get("tool_calls", ())
        ]
        assert [call["function"]["arguments"] for call in calls] == ['{"x": 1}']


@pytest.mark.parametrize("thinks", WAYS)
def test_a_form_is_behind_the_reasoning(thinker: RunningServer, thinks: bool | None) -> None:
    """The model says what the form forbids, thoughts but for those that the prompt has closed."""
    before = "<think>\n\n</think>\n\n" if thinks is False else '<think>\n{"x": ?\n</think>\n\n'
    for said, more in (
        ('{"x": 5}', {"response_format": JSON}),
        ('{"y": 5}', {"response_format": JSON}),
        ("?", {"structured_outputs": {"choice": ["yes", "no"]}}),
        ("12a", {"structured_outputs": {"regex": "[0-9]{3}"}}),
        ("x", {"structured_outputs": {"grammar": 'start: "(" /[a-c]{2}/ ")"'}}),
    ):
        ask = body(before + said, thinks, **more)
        [choice] = whole(thinker, ask)["choices"]
        message = choice["message"]
        assert message["reasoning"] == (None if thinks is False else '{"x": ?')
        assert choice["finish_reason"] == "stop"
        if "response_format" in more:
            assert isinstance(json.loads(message["content"])["x"], int)
        elif said == "?":
            assert message["content"] in ("yes", "no")
        elif said == "x":
            assert message["content"][:1] + message["content"][-1:] == "()"
        else:
            assert message["content"].isdigit()
        chunks = streamed(thinker, ask)
        assert joined(chunks, "content") == message["content"]
        assert joined(chunks, "reasoning") == (message["reasoning"] or "")


def test_a_form_without_reasoning(thinker: RunningServer) -> None:
    """A model that may think may as well not do so, unless the prompt has begun it."""
    said = body('{"x": 5}', response_format=JSON)
    message = whole(thinker, said)["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ('{"x": 5}', None)


@pytest.mark.parametrize("thinks", [None, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls_are_behind_the_reasoning(
    thinker: RunningServer, thinks: bool | None, choice: Any
) -> None:
    ask = body(f"{THOUGHTS}no call", thinks, tools=[TOOL], tool_choice=choice)
    [told] = whole(thinker, ask)["choices"]
    assert told["message"]["reasoning"] == "hm, é"
    assert told["message"]["content"] is None
    arguments = told["message"]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(json.loads(arguments)["x"], int)


def test_reasoning_can_be_sent_back(thinker: RunningServer) -> None:
    """By each of its names, and with its message or alone."""

    def prompt(**message: Any) -> str:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", **message}]
        told = httpx.post(
            f"{thinker.url}/tokenize",
            json={"model": MODEL, "messages": messages, "add_generation_prompt": False},
        )
        assert told.status_code == 200, told.text
        ids = {"model": MODEL, "tokens": told.json()["tokens"]}
        text: str = httpx.post(f"{thinker.url}/detokenize", json=ids).json()["prompt"]
        return text.partition("assistant\n")[2]

    for fields in (
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
    ):
        assert prompt(content="b", **fields) == "<think>hm</think>b<|im_end|>\n"
        assert prompt(content=None, **fields) == "<think>hm</think><|im_end|>\n"
    messages = [{"role": "assistant", "content": "b", "reasoning": "a", "reasoning_content": "c"}]
    ask = {"model": MODEL, "messages": messages}
    response = httpx.post(f"{thinker.url}/v1/chat/completions", json=ask)
    assert response.status_code == 400
    assert "other texts" in response.json()["error"]["message"]


def test_a_message_that_goes_on_says_where_it_is(thinker: RunningServer) -> None:
    """A continued thought ends, and what follows a finished one is the answer."""
    start = f"<|say|>{THOUGHTS}yes<|over|>"
    for text, reasoning, content in (
        ("<think>\nh", "m, é", "yes"),
        (f"{THOUGHTS}y", None, "es"),
    ):
        messages = [{"role": "user", "content": start}, {"role": "assistant", "content": text}]
        ask = {**body(""), "messages": messages, "continue_final_message": True}
        message = whole(thinker, ask)["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (reasoning, content)


@pytest.mark.parametrize("thinks", [None, True])
def test_responses(thinker: RunningServer, client: OpenAI, thinks: bool | None) -> None:
    """Events are openai's types; log probabilities are those of the message alone."""
    ask: dict[str, Any] = {
        "model": MODEL,
        "input": say(f"{THOUGHTS}yes\n{GOOD}"),
        "tools": [{"type": "function", "name": "add", "parameters": POINT, "strict": False}],
        "include": ["message.output_text.logprobs"],
        "chat_template_kwargs": {} if thinks is None else {"enable_thinking": True},
    }
    told = httpx.post(f"{thinker.url}/v1/responses", json={**ask, "stream": True})
    found = response_events(told.text)
    assert [one["type"].removeprefix("response.") for one in found if "delta" not in one] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    deltas = [one["delta"] for one in found if one["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm, é"
    last = found[-1]["response"]
    reasoning, message, call = last["output"]
    assert reasoning["id"].startswith("rs_")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm, é"}]
    assert (reasoning["summary"], reasoning["status"]) == ([], "completed")
    [part] = message["content"]
    names = "".join(each["token"] for each in part["logprobs"])
    assert names == "yes"
    assert call["arguments"] == '{"x": 1}'
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] > len("hm, é")
    done = httpx.post(f"{thinker.url}/v1/responses", json=ask).json()
    assert [item["type"] for item in done["output"]] == ["reasoning", "message", "function_call"]
    assert done["output"][0]["content"] == reasoning["content"]


def test_responses_that_end_within_the_reasoning(client: OpenAI) -> None:
    done = client.responses.create(model=MODEL, input=say(THOUGHTS), max_output_tokens=4)
    [item] = done.output
    assert item.type == "reasoning"
    assert item.status == done.status == "incomplete"
    assert item.content is not None
    assert item.content[0].text == "hm"
    assert done.output_text == ""


def test_a_form_of_a_response(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "point", "schema": POINT}}
    done = client.responses.create(
        model=MODEL, input=say(f'{THOUGHTS}{{"y": 1}}'), text=form, temperature=0
    )
    assert isinstance(json.loads(done.output_text)["x"], int)
    assert done.usage is not None
    assert done.usage.output_tokens_details.reasoning_tokens > 0


def test_reasoning_of_a_response_can_be_sent_back(thinker: RunningServer) -> None:
    """It is a part of the message that it came with, and nothing where it has no text."""
    first = {"model": MODEL, "input": say(f"{THOUGHTS}yes")}
    output = httpx.post(f"{thinker.url}/v1/responses", json=first).json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    bare = [{"type": "reasoning", "id": "rs_1", "summary": []}, output[1]]
    user = {"role": "user", "content": "a"}
    said = {"role": "assistant", "content": "yes"}
    second = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]}
    for items, message in (
        (output, {**said, "reasoning": "hm, é"}),
        (bare, said),
        ([output[0], second, output[1]], {**said, "reasoning": "hm, é\nso"}),
        ([output[0], bare[0], second, output[1]], {**said, "reasoning": "hm, é\nso"}),
    ):
        ask = {"model": MODEL, "input": [user, *items, user], "max_output_tokens": 1}
        given = httpx.post(f"{thinker.url}/v1/responses", json=ask)
        assert given.status_code == 200, given.text
        messages = [user, message, user]
        chat = whole(thinker, {"model": MODEL, "messages": messages, "max_tokens": 1})
        assert given.json()["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    ask = {"model": MODEL, "input": [user, hidden, user]}
    response = httpx.post(f"{thinker.url}/v1/responses", json=ask)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input.1.encrypted_content"


def test_a_server_that_leaves_reasoning_in_the_text(start: StartServer) -> None:
    server = start(texts=TAGS, reasoning_parser="none")
    told = whole(server, body(f"{THOUGHTS}yes"))
    assert told["choices"][0]["message"]["content"] == f"{THOUGHTS}yes"
    assert "reasoning" not in told["choices"][0]["message"]
    assert "completion_tokens_details" not in told["usage"]


def test_other_models_have_no_reasoning(server: RunningServer) -> None:
    message = whole(server, body("<think>hm</think>yes"))["choices"][0]["message"]
    assert message["content"] == "<think>hm</think>yes"
    assert "reasoning" not in message


def test_tags_of_more_than_one_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TEMPLATE)
    with _servers(tmp_path) as start:
        server = start()
        ask = body(f'{THOUGHTS}{{"y": 1}}', response_format=JSON)
        message = whole(server, ask)["choices"][0]["message"]
        assert message["reasoning"] == "hm, é"
        assert isinstance(json.loads(message["content"])["x"], int)
        chunks = streamed(server, ask)
        assert joined(chunks, "reasoning") == "hm, é"
        assert joined(chunks, "content") == message["content"]


def test_tags_around_the_answer(tmp_path: Path) -> None:
    """As Granite 3.3 and ERNIE 4.5 write them; the template says so."""
    write_tokenizer(tmp_path, TEMPLATE + "{# <think></think> and <response></response> #}", TAGS)
    with _servers(tmp_path) as start:
        server = start(texts=TAGS)
        for ending in ("\n</response>\n", "\n</response>", ""):
            ask = body(f"{THOUGHTS}<response>\nyes{ending}", logprobs=True)
            message = whole(server, ask)["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == ("hm, é", "yes")
            assert joined(streamed(server, ask), "content") == "yes"


def test_markers_of_calls_that_are_special_tokens_are_not_in_reasoning(tmp_path: Path) -> None:
    """They are spelled so that calls are found."""
    marker = "[TOOL_CALLS]"
    write_tokenizer(tmp_path, f"{TEMPLATE}{{# {marker} #}}", (*TAGS, marker))
    with _servers(tmp_path) as start, OpenAI(base_url="http://unused", api_key="unused") as client:
        server = start(texts=TAGS)
        says = f"<think>\nno{marker} call\n</think>\n\nyes{marker}"
        for skips, thought, answer in (
            (True, "no call", "yes"),
            (False, f"no{marker} call", f"yes{marker}"),
        ):
            ask = body(
                says, tools=[TOOL | {"function": {"name": "add"}}], skip_special_tokens=skips
            )
            message = whole(server, ask)["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == (thought, answer)
            chunks = streamed(server, ask)
            assert joined(chunks, "reasoning") == thought
            assert joined(chunks, "content") == answer
        own = client.with_options(base_url=f"{server.url}/v1")
        tool: Any = {"type": "function", "name": "add", "parameters": {}, "strict": False}
        response = own.responses.create(model=MODEL, input=say(says), tools=[tool], store=False)
        assert response.output[0].content[0].text == "no call"  # type: ignore[union-attr, index]
        assert response.output_text == "yes"


@pytest.mark.parametrize("name", ["qwen3", "ernie45", "granite"])
def test_reasoning_that_ends_as_a_marker_begins_comes_before_the_answer(name: str) -> None:
    """The answer may be in tags of its own, up to the end of all."""
    known = FORMATS[name]
    around = known.around or ("", "")
    text = f"{known.opens[0]}hm[{known.closes[0]}\n\n{around[0]}yes{around[1]}"
    splitter = DeltaSplitter(Thinking(True, known.thought("a prompt"), hidden=("[TOOL_CALLS]",)))
    told: list[tuple[str, str]] = []
    for char in (*text, ""):
        reason: FinishReason | None = None if char else "stop"
        delta = CompletionDelta("r", 0, char, (1,), None, reason)
        parts = [
            ("thought" if is_thought else "answer", piece.text)
            for is_thought, piece in splitter.take(delta, [Run(False, 1)])
        ]
        told += [part for part in parts if part[1]]
    kinds = [kind for kind, _ in told]
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(part for kind, part in told if kind == "thought") == "hm["
    assert "".join(part for kind, part in told if kind == "answer") == "yes"


def test_a_filter_keeps_back_what_may_be_hidden() -> None:
    found = TextFilter(("[A]", "[BC]"))
    pieces = ["a[", "B", "C]b", "[A", "x[", "A]", "[B"]
    told = [found.take(one, is_last=one == pieces[-1]) for one in pieces]
    assert told == ["a", "", "b", "", "[Ax", "", "[B"]


@given(st.lists(st.sampled_from(["<a>", "</a>", "<", "a", ">", "/", "<</a>a>"]), max_size=6))
def test_a_filter_takes_the_same_out_of_whole_texts_and_of_pieces(pieces: list[str]) -> None:
    text, hidden = "".join(pieces), ("<a>", "</a>")
    whole = TextFilter(hidden).take(text, is_last=True)
    for given_in in (pieces, [*text]):
        found = TextFilter(hidden)
        told = [found.take(one, is_last=False) for one in given_in]
        assert "".join([*told, found.take("", is_last=True)]) == whole


def test_a_marker_in_reasoning_is_hidden_also_where_it_is_cut() -> None:
    thinking = Thinking(True, FORMATS["qwen3"].thought("<think>"), hidden=("[TOOL_CALLS]",))
    splitter = DeltaSplitter(thinking)
    deltas = [CompletionDelta("r", 0, char, (1,), None, None) for char in "a[TOOL_CALLS]b</think>c"]
    pieces = [one for delta in deltas for one in splitter.take(delta, [Run(True, 1)])]
    assert "".join(one.delta.text for one in pieces if one.is_thought) == "ab"
    assert "".join(one.delta.text for one in pieces if not one.is_thought) == "c"
