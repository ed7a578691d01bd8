"""Fields of vLLM's requests, and OpenAI's newer ones: what is obeyed, said nothing by, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxport.serving.chat import ChatTemplate
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

from .fake import MODEL, Client, FakeEngine, events

USER = {"role": "user", "content": "ab"}
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "ab"},
    "chat/completions": {"messages": [USER]},
    "responses": {"input": "ab"},
    "messages": {"messages": [USER], "max_tokens": 9},
}
PREDICTED = {"type": "content", "content": "x"}
ALL = tuple(BODIES)
BOTH, CHAT = ALL[:2], ALL[1:2]
OPENAI = ALL[:3]


@pytest.fixture
def client(model_folder: Path) -> Client:
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    return Client(FakeEngine(tokenizer), model_folder)


async def asked(client: Client, path: str, **fields: Any) -> SamplingParams:
    """Return what the engine is asked for."""
    response = await client.post(f"/v1/{path}", model=MODEL, **BODIES[path], **fields)
    assert response.status_code == 200, response.text
    return client.engine.asked[-1].params


@pytest.mark.parametrize(
    ("paths", "name", "values"),
    [
        (ALL, "vllm_xargs", ({}, None)),
        (ALL, "kv_transfer_params", ({}, None, {"do_remote_decode": None})),
        (BOTH, "detokenize", (True, None)),
        (BOTH, "length_penalty", (1, 1.0)),
        (BOTH, "use_beam_search", (False, None)),
        (CHAT + ALL[2:3], "mm_processor_kwargs", ({}, {"max_pixels": 9})),
        (CHAT, "media_io_kwargs", ({}, {"video": {"num_frames": 4}})),
        (CHAT, "prediction", (PREDICTED,)),
        (CHAT, "modalities", (["text"],)),
        (CHAT, "documents", ([], None)),
        (CHAT, "echo", (False, True)),  # which is about a last message of the assistant
        (OPENAI, "service_tier", ("auto", "default", "flex", "scale", "priority")),
        (OPENAI, "prompt_cache_key", ("k",)),
        (OPENAI, "prompt_cache_retention", ("in_memory", "24h")),
        (OPENAI, "prompt_cache_options", ({}, {"mode": "implicit"})),
        (OPENAI, "safety_identifier", ("s",)),
        (ALL, "session_id", ("s", "t")),
        (ALL, "watermarking", (False,)),
        (ALL, "return_weight_versions", (False,)),
        (ALL, "return_token_offsets", (False,)),
        (ALL, "routed_experts_prompt_start", (0,)),
        (ALL, "ec_transfer_params", ({},)),
        (ALL, "mm_payload", ("tensors",)),
        (ALL[2:3], "image", ({"detail": "low"},)),
        (ALL[2:3], "background_options", ({"completion_window": "2h"},)),
        (CHAT + ALL[2:3], "include_reasoning", (True, False)),  # of models that think
        (ALL[2:3], "enable_response_messages", (False,)),
        (ALL[2:3], "previous_input_messages", ([],)),
        (ALL, "skip_special_tokens", (True,)),
        (ALL, "include_stop_str_in_output", (False,)),
        (ALL[2:3], "max_tool_calls", (1, 5)),
        (ALL[2:3], "truncation", ("disabled", "auto")),
    ],
)
async def test_what_changes_nothing(
    client: Client, paths: tuple[str, ...], name: str, values: tuple[Any, ...]
) -> None:
    for path in paths:
        plain = await asked(client, path)
        for value in values:
            assert await asked(client, path, **{name: value}) == plain


@pytest.mark.parametrize(
    ("paths", "name", "value"),
    [
        (ALL, "vllm_xargs", {"my_processor": 1}),
        (ALL, "kv_transfer_params", {"do_remote_decode": True}),
        (ALL, "watermarking", True),
        (ALL, "return_weight_versions", True),
        (ALL, "return_token_offsets", True),
        (ALL, "ec_transfer_params", {"do_remote_encode": True}),
        (ALL[2:3], "access_programs", {"a": "b"}),
        (BOTH, "detokenize", False),
        (BOTH, "detokenize", 1),
        (BOTH, "length_penalty", 0.5),
        (BOTH, "truncation_side", "middle"),
        (ALL, "skip_reading_prefix_cache", "yes"),
        (ALL, "skip_reading_prefix_cache", 1),
        (OPENAI, "service_tier", "gold"),
        (CHAT, "echo", "yes"),
        (CHAT, "documents", [{"text": "a"}]),  # this template does not tell the model of them
        (CHAT, "documents", ["a"]),
        (CHAT, "documents", {"text": "a"}),
        (CHAT, "documents", [{}] * 5000),
        (CHAT, "chat_template", "{{ messages }}"),  # a program; vLLM wants an option for it
        (CHAT, "web_search_options", {}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "verbosity", "low"),
        (ALL[2:3], "enable_response_messages", True),
    ],
)
async def test_what_would_change_something_is_refused(
    client: Client, paths: tuple[str, ...], name: str, value: Any
) -> None:
    for path in paths:
        body = {"model": MODEL, **BODIES[path], name: value}
        response = await client.post(f"/v1/{path}", **body)
        assert response.status_code == 400, (path, response.text)
        assert name in response.json()["error"]["message"]
    assert client.engine.asked == []


async def test_the_prefix_cache_is_not_read(client: Client) -> None:
    for path in ALL:
        for value in (True, False, None):
            params = await asked(client, path, skip_reading_prefix_cache=value)
            assert params.skip_reading_prefix_cache is bool(value)


async def test_answers_begin_with_what_they_go_on_with(client: Client) -> None:
    """By `echo`, where the last message is the assistant's."""
    parts = [{"type": "text", "text": "It "}, {"type": "text", "text": "is "}]
    for content, wanted in (
        ("It is ", "It is ok"),
        (parts, "It \nis ok"),
        ("", "ok"),
        (None, "ok"),
    ):
        messages = [USER, {"role": "assistant", "content": content, "reasoning": "x"}]
        body = {"model": MODEL, "messages": messages, "echo": True, "logprobs": True}
        whole = (await client.post("/v1/chat/completions", **body)).json()["choices"][0]
        assert whole["message"]["content"] == wanted
        assert [one["token"] for one in whole["logprobs"]["content"]] == ["o", "k"]
        stream = events(await client.post("/v1/chat/completions", **body, stream=True))
        deltas = [one["choices"][0]["delta"] for one in stream]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == wanted


async def test_a_template_tells_the_model_of_documents(model_folder: Path) -> None:
    source = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    template = ChatTemplate({"default": source})
    client = Client(FakeEngine(tokenizer), model_folder, template=template)
    documents = [{"text": "one"}, {"text": "two", "title": "of no use"}]
    for given, wanted in ((documents, "[one][two]ab"), ([], "ab"), (None, "ab")):
        assert (await client.chat(documents=given)).status_code == 200
        assert tokenizer.decode(client.engine.asked[-1].prompt) == wanted
        counted = await client.post("/tokenize", messages=[USER], documents=given)
        assert counted.json()["count"] == len(wanted)
    response = await client.post("/tokenize", prompt="a", documents=documents)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "documents")


async def test_a_template_that_wants_documents(model_folder: Path) -> None:
    source = "{% if not documents %}{{ raise_exception('none') }}{% endif %}{{ documents[0].text }}"
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    client = Client(FakeEngine(tokenizer), model_folder, template=ChatTemplate({"default": source}))
    assert (await client.chat(documents=[{"text": "one"}])).status_code == 200
    assert tokenizer.decode(client.engine.asked[-1].prompt) == "one"
    assert (await client.chat()).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_which_side_of_a_prompt_is_cut(client: Client, stream: bool) -> None:
    tokenizer = client.engine.tokenizer
    for side, wanted in ((None, "ef"), ("left", "ef"), ("right", "ab")):
        how = {"truncation_side": side, "stream": stream}
        for most, kept in ((2, wanted), (6, "abcdef"), (None, "abcdef")):
            given = {**how, "truncate_prompt_tokens": most}
            response = await client.complete("abcdef", **given, echo=True)
            assert response.status_code == 200, response.text
            assert tokenizer.decode(client.engine.asked[-1].prompt) == kept
            if not stream:
                assert response.json()["choices"][0]["text"] == f"{kept}ok"
        await client.chat("abcdef", **how)
        whole = client.engine.asked[-1].prompt
        await client.chat("abcdef", **how, truncate_prompt_tokens=3)
        cut = client.engine.asked[-1].prompt
        assert cut == (whole[:3] if side == "right" else whole[-3:])


async def test_what_is_cut_on_the_right_ends_as_it_was_cut(model_folder: Path) -> None:
    """The template opens a thought at the end of the prompt; without that end there is none."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '</think><think>' }}"
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    client = Client(FakeEngine(tokenizer), model_folder, template=ChatTemplate({"default": source}))
    thought = (await client.chat("abcdef")).json()["choices"][0]["message"]
    assert (thought["content"], thought["reasoning_content"]) == (None, "ok")
    cut = {"truncation_side": "right", "truncate_prompt_tokens": 3}
    answer = (await client.chat("abcdef", **cut)).json()["choices"][0]["message"]
    assert tokenizer.decode(client.engine.asked[-1].prompt) == "abc"
    assert (answer["content"], answer["reasoning_content"]) == ("ok", None)


async def test_a_response_is_sampled_like_a_chat(client: Client) -> None:
    fields = {
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "bad_words": ["a"],
        "allowed_token_ids": [4, 5],
    }
    chat = await asked(client, "chat/completions", **fields)
    assert await asked(client, "responses", **fields) == chat
    assert (chat.min_tokens, chat.bad_words) == (2, ("a",))
    for name, value in (("min_tokens", -1), ("ignore_eos", 1), ("stop_token_ids", 3)):
        body = {"model": MODEL, "input": "a", name: value}
        response = await client.post("/v1/responses", **body)
        assert response.status_code == 400
        assert name in response.json()["error"]["message"]
