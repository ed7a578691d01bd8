"""What is refused, and how it is said."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from .conftest import RunningServer, StartServer
from .scripted import MODEL, say

COMPLETION = {"model": MODEL, "prompt": say("ok")}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": say("ok")}]}
USER = CHAT["messages"][0]
TOOL = {"type": "function", "function": {"name": "f"}}


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return the error object; checks its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    sizes = set(error) - {"message", "type", "param", "code"}
    if sizes:  # of a prompt that is generated from
        assert sizes == {"n_prompt_tokens", "n_ctx"}
        assert error["code"] == "context_length_exceeded"
    assert len(error) == 4 + len(sizes)
    return error


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty", "2.5; it must be in [-2.0, 2.0]"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "[0.01, 100.0]"),
        ({"repetition_penalty": True}, "repetition_penalty", "valid number"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
        ({"logit_bias": {"5": True}}, "logit_bias.5", "valid number"),
        ({"logit_bias": {"05": 1}}, "logit_bias", "name token ids"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "'-5'"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "name token ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "token 99999"),
        ({"logit_bias": [5]}, "logit_bias", "dictionary"),
        ({"min_p": 1.1}, "min_p", "[0.0, 1.0]"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "max_tokens is 8"),
        ({"bad_words": [""]}, "bad_words", "not empty"),
        ({"bad_words": "x"}, "bad_words", "list"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "name a token"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "token 99999"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"best_of": True}, "best_of", "valid integer"),
        ({"store": True}, "store", "False"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "'json_schema' without",
        ),
        ({"structural_tag": "{}"}, "structural_tag", "leave it out"),
        ({"logprob": 1}, "logprob", "did you mean 'logprobs'"),
        ({"wholly_unknown": 1}, "wholly_unknown", "unknown field 'wholly_unknown'"),
        ({"x" * 9999: 1}, "x" * 79 + "…", "x…'. Remove it."),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "(0.0, 1.0]"),
        ({"top_k": 1.5}, "top_k", "integer"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"stop": [1]}, "stop", "a text or a list of texts"),
        ({"stop": ["x"] * 65}, "stop", "at most 64"),
        ({"stop": ["x", "y" * 1025]}, "stop", "a text of 1025 characters, at most 1024"),
        ({"stop_token_ids": [0] * (2**20 + 1)}, "stop_token_ids", "at most 1048576 items"),
        ({"stop_token_ids": [-1] * 2**20}, "stop_token_ids.0", "greater than or equal to 0"),
        ({"bad_words": [1] * 2**20}, "bad_words.0", "valid string"),
        ({f"x{n}": 1 for n in range(300)}, None, "fields; requests have 256 at most"),
        ({"logit_bias": {str(n): 1 for n in range(2**17 + 1)}}, "logit_bias", "131072 items"),
        ({"seed": 10**30}, "seed", "less than"),
        ({"top_k": 10**30}, "top_k", "less than"),
        ({"temperature": 10**400}, "temperature", "temperature"),
        ({"temperature": math.nan}, "temperature", "nan"),
        ({"logit_bias": {"5": math.inf}}, "logit_bias", "finite"),
        ({"guided_json": {"enum": [1.5, -math.inf]}}, "guided_json", "-inf"),
        ({"guided_json": {"enum": [1.5, 2, -math.inf]}}, "guided_json", "-inf"),
        ({"guided_choice": ["a", "\udc00"]}, "guided_choice", "half of a character"),
        ({"stop": [""]}, "stop", "every stop string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        ({"model": 5}, "model", "string"),
        ({"request_id": "a b"}, "request_id", "1 to 128 visible characters of ASCII"),
        ({"request_id": ""}, "request_id", "1 to 128 visible"),
        ({"request_id": "x" * 129}, "request_id", "1 to 128 visible"),
        ({"request_id": 5}, "request_id", "string"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "set include_usage to true",
        ),
        ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids", "boolean"),
    ],
)
@pytest.mark.parametrize("chat", [False, True])
def test_fields_of_both_endpoints(
    server: RunningServer, fields: dict[str, Any], param: str | None, words: str, chat: bool
) -> None:
    path, body = ("chat/completions", CHAT) if chat else ("completions", COMPLETION)
    sent = json.dumps(body | fields)  # NaN and all
    response = httpx.post(
        f"{server.url}/v1/{path}", content=sent, headers={"Content-Type": "application/json"}
    )
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"suffix": "x"}, "suffix", "no tokens to fill in by"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "remove one"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "stream", "a prompt alone comes as a"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": [[]]}, "prompt", "prompt is empty"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": 5}, "prompt", "a text, a list of token ids, or a list of texts"),
        ({"prompt": ["a", 5]}, "prompt", "a text, a list of token ids, or a list of texts"),
        ({"prompt": [10**6]}, "prompt", "1000000"),
        ({"messages": []}, "messages", "unknown field"),
    ],
)
def test_fields_of_completions(
    server: RunningServer, fields: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(httpx.post(f"{server.url}/v1/completions", json=COMPLETION | fields))
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [USER] * (2**16 + 1)}, "messages", "at most 65536 items"),
        ({"tools": [TOOL] * (2**12 + 1)}, "tools", "at most 4096 items"),
        ({"chat_template_kwargs": {"self": 1}}, None, None),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages", "no content"),
        ({"messages": [{**USER, "mood": "good"}]}, "messages.0.mood", "unknown field"),
        ({"messages": [{**USER, "content": 5}]}, "messages.0.content", "list of content parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "image_url",
        ),
        ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages", "has no text"),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "x", "bold": 1}]}]},
            "messages",
            "bold",
        ),
        ({"messages": [{**USER, "tool_calls": []}]}, None, None),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", '"required"'),
        ({"tools": [TOOL], "tool_choice": {**TOOL, "x": 1}}, "tool_choice", "one of the tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": TOOL}, "tool_choice", "one of the tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"functions": [{}]}, "functions", "not supported yet"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"logprobs": 2}, "logprobs", "boolean"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "Send one"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
        ({"modalities": ["audio"]}, "modalities", "['text']"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "high"),
        ({"chat_template": "x"}, "chat_template", "not supported yet"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "tools"),
        ({"prompt": "x"}, "prompt", "unknown field"),
    ],
)
def test_fields_of_chats(
    server: RunningServer, fields: dict[str, Any], param: str | None, words: str | None
) -> None:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT | fields)
    if words is None:
        assert response.status_code == 200
        return
    error = error_of(response)
    assert error["param"] == param
    assert words in error["message"]


def test_missing_fields(server: RunningServer) -> None:
    error = error_of(httpx.post(f"{server.url}/v1/completions", json={"model": MODEL}))
    assert (error["param"], error["code"]) == ("prompt", "missing_required_parameter")
    error = error_of(httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL}))
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{broken", "not valid JSON"),
        (b"[1]", "one JSON object"),
        (b"", "one JSON object"),
        (b'{"model": "\xff"}', "not UTF-8 at byte 11"),
        (b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"max_tokens": ' + b"1" * 5000 + b"}", "thousands of digits"),
    ],
)
def test_bodies_that_are_no_object(server: RunningServer, content: bytes, words: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("completions", "chat/completions"):
        response = httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers)
        assert words in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "\ud800"}),
        ("completions", {"prompt": ["\ud800"]}),
        ("completions", {"prompt": "a", "stop": ["\ud800"]}),
        ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
        (
            "chat/completions",
            {"messages": [USER], "tools": [TOOL | {"function": {"name": "\ud800"}}]},
        ),
        (
            "chat/completions",
            {
                "messages": [USER],
                "tools": [TOOL | {"function": {"name": "f", "parameters": {"a": "\ud800"}}}],
            },
        ),
        ("chat/completions", {"messages": [USER], "chat_template_kwargs": {"a": "\ud800"}}),
        ("completions", {"prompt": "a", "\ud800": 1}),
    ],
)
def test_halves_of_characters(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    content = json.dumps({"model": MODEL, **fields}, ensure_ascii=True)
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers)
    assert "half of a character" in error_of(response)["message"]


@pytest.mark.parametrize("depth", [65, 900])
def test_nests_that_are_too_deep(server: RunningServer, depth: int) -> None:
    nest = "[" * depth + "]" * depth
    content = f'{{"model": "{MODEL}", "messages": [], "chat_template_kwargs": {{"a": {nest}}}}}'
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=headers)
    assert "64 levels" in error_of(response)["message"]


def test_a_body_of_another_type(server: RunningServer) -> None:
    response = httpx.post(f"{server.url}/v1/completions", data={"prompt": "x"})
    assert "Content-Type: application/json" in error_of(response, 415)["message"]


def test_a_stream_that_cannot_run_has_a_status(server: RunningServer) -> None:
    ask = COMPLETION | {"stream": True, "max_tokens": 10**6}
    error = error_of(httpx.post(f"{server.url}/v1/completions", json=ask))
    assert error["code"] == "context_length_exceeded"


def test_wrong_model(server: RunningServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        for create, body in (
            (client.completions.create, COMPLETION),
            (client.chat.completions.create, CHAT),
        ):
            with pytest.raises(openai.NotFoundError, match="this server has 'null'") as caught:
                create(**body | {"model": "other"})
            assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("some/other")


def test_models(server: RunningServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        [model] = client.models.list().data
        assert model == client.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "onnxport")


def test_health_and_version(server: RunningServer) -> None:
    body = server.health()
    assert (body["status"], body["provider"], body["attention"]) == ("ok", "null", "native")
    assert body["placement"] == {"null": 1}
    assert body["engine"]["num_requests_running"] == 0
    assert body["capabilities"]["max_model_len"] == 4096
    assert httpx.get(f"{server.url}/version").json()["version"] == body["version"]


def test_paths_and_methods(server: RunningServer) -> None:
    message = error_of(httpx.get(f"{server.url}/v2/models"), 404)["message"]
    missing, there = message.split("; there are ")
    assert missing == "there is no such path '/v2/models'"
    paths = there.split(", ")
    assert paths == sorted(set(paths))
    assert {"/v1/chat/completions", "/v1/models/{model}", "/tokenize", "/version"} < set(paths)
    assert httpx.get(f"{server.url}/v1{'x' * 2000}").text.count("x") < 100
    assert "POST" in error_of(httpx.get(f"{server.url}/v1/completions"), 405)["message"]


def test_a_key_is_required(start_server: StartServer) -> None:
    server = start_server(api_keys=["sesame", "schlüssel"])
    url = f"{server.url}/v1/models"
    other = {"Authorization": "Bearer schlüssel".encode()}
    assert httpx.get(url, headers=other).status_code == 200
    assert "no API key" in error_of(httpx.get(url), 401)["message"]
    wrong = httpx.get(url, headers={"Authorization": "Bearer open"})
    assert error_of(wrong, 401)["code"] == "invalid_api_key"
    assert wrong.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/health").status_code == 200
    with OpenAI(base_url=f"{server.url}/v1", api_key="sesame") as client:
        assert client.completions.create(**COMPLETION).choices[0].text == "ok"


def test_pages_of_allowed_origins_alone_may_use_the_server(
    start_server: StartServer, server: RunningServer
) -> None:
    page = {"Origin": "https://chat.example"}
    asks = page | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    open_server = start_server(api_keys=["sesame"], allowed_origins=["https://chat.example"])
    url = f"{open_server.url}/v1/completions"
    may = httpx.options(url, headers=asks)
    assert (may.status_code, may.headers["access-control-allow-origin"]) == (200, page["Origin"])
    assert "authorization" in may.headers["access-control-allow-headers"]
    refused = httpx.post(url, json=COMPLETION, headers=page)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (
        401,
        page["Origin"],
    )
    other = httpx.options(url, headers=asks | {"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert httpx.options(f"{server.url}/v1/completions", headers=asks).is_error
    answer = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, headers=page)
    assert "access-control-allow-origin" not in answer.headers


def test_bodies_may_not_be_too_large(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=1000)
    url = f"{server.url}/v1/completions"
    assert httpx.post(url, json=COMPLETION).status_code == 200
    large = COMPLETION | {"prompt": "x" * 1000}
    assert "1000 bytes" in error_of(httpx.post(url, json=large), 413)["message"]
    headers = {"Content-Type": "application/json"}
    chunks = iter([b"x" * 600, b"x" * 600])  # of a length that is not announced
    error_of(httpx.post(url, content=chunks, headers=headers), 413)
