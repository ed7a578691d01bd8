"""What is done to prompts before they are run: messages gone on with, truncation, ids told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.tokenizer import Tokenizer

from .fake import Client, FakeEngine, events

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
CHAT = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "It is  "}]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer, ("hey",))


@pytest.fixture
def client(engine: FakeEngine, model_folder: Path) -> Client:
    return Client(engine, model_folder)


def text_of(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(engine.asked[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize("source", [PLAIN, TRIMMED])
@pytest.mark.parametrize("last", ["It is", "  It is \n", "a <|end|> b", "x", "It is It is"])
def test_a_message_is_gone_on_with_as_transformers_does(
    model_folder: Path, source: str, last: str
) -> None:
    peer = PreTrainedTokenizerFast(tokenizer_file=str(model_folder / "tokenizer.json"))
    peer.chat_template = source
    messages = [CHAT[0], {"role": "assistant", "content": last}]
    wanted = peer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    template = ChatTemplate({"default": source})
    found = template.render(messages, None, False, continue_final_message=True)
    assert found == wanted
    whole = template.render(messages, None, False)
    assert whole.startswith(found)
    assert len(whole) > len(found)


@pytest.mark.parametrize(
    ("source", "messages", "begins", "reason"),
    [
        (PLAIN, CHAT, True, "add_generation_prompt"),
        (PLAIN, [CHAT[0], {"role": "assistant", "content": ""}], False, "no text"),
        ("{{ messages[0].content }}", CHAT, False, "as it is"),
    ],
)
def test_what_cannot_be_gone_on_with(
    source: str, messages: Sequence[dict[str, Any]], begins: bool, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        ChatTemplate({"default": source}).render(
            messages, None, begins, continue_final_message=True
        )


async def test_a_chat_goes_on(client: Client, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    ask: dict[str, Any] = {"model": "fake", "messages": CHAT, "continue_final_message": True}
    for more in ({}, {"add_generation_prompt": False}):
        response = await client.post("/v1/chat/completions", **ask, **more)
        assert response.json()["choices"][0]["message"]["content"] == "hey"
        assert text_of(engine, tokenizer).endswith("<|im_start|>assistant\nIt is  ")
    found = await client.post("/tokenize", messages=CHAT, continue_final_message=True)
    assert tuple(found.json()["tokens"]) == engine.asked[-1].prompt
    refused = await client.post("/v1/chat/completions", **ask, add_generation_prompt=True)
    assert refused.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_a_prompt(
    client: Client, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = tokenizer.encode("abcdef")
    for prompt in ("abcdef", ids):
        for most, wanted in ((2, "ef"), (6, "abcdef"), (100, "abcdef")):
            ask = {"truncate_prompt_tokens": most, "stream": stream}
            response = await client.complete(prompt, **ask, echo=True)
            assert response.status_code == 200
            assert text_of(engine, tokenizer) == wanted
            if not stream:
                assert response.json()["choices"][0]["text"] == f"{wanted}hey"
    await client.chat("abcdef", truncate_prompt_tokens=3)
    assert len(engine.asked[-1].prompt) == 3


async def test_as_much_of_a_prompt_as_there_is_room_for(client: Client, engine: FakeEngine) -> None:
    most = engine.capabilities.max_model_len
    await client.complete("x" * (2 * most), truncate_prompt_tokens=-1, max_tokens=10)
    assert len(engine.asked[-1].prompt) == most - 10
    await client.chat("x" * (2 * most), truncate_prompt_tokens=-1)
    assert len(engine.asked[-1].prompt) == most - 1


@pytest.mark.parametrize("most", [0, -2, "5"])
async def test_no_way_to_truncate(client: Client, most: Any) -> None:
    response = await client.complete("abc", truncate_prompt_tokens=most)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_log_probabilities_of_a_truncated_prompt(client: Client) -> None:
    """Their offsets count from the text that is echoed."""
    ask = {"truncate_prompt_tokens": 2, "echo": True, "max_tokens": 3}
    response = await client.complete("abcdef", **ask)
    assert response.json()["choices"][0]["text"] == "efhey"
    assert response.json()["usage"]["prompt_tokens"] == 2


async def test_ids_are_told(client: Client, engine: FakeEngine) -> None:
    ids = [ord(char) for char in "hey"]  # as the engine says them
    whole = (await client.complete("ab", return_token_ids=True, n=1)).json()["choices"][0]
    assert whole["token_ids"] == ids
    assert tuple(whole["prompt_token_ids"]) == engine.asked[-1].prompt
    chat = (await client.chat("ab", return_token_ids=True)).json()
    assert chat["choices"][0]["token_ids"] == ids
    assert tuple(chat["prompt_token_ids"]) == engine.asked[-1].prompt
    for plain in (await client.complete("ab"), await client.chat("ab", return_token_ids=False)):
        body = plain.json()
        of_prompt = body if "prompt_text" in body else body["choices"][0]
        assert of_prompt["prompt_token_ids"] is body["choices"][0]["token_ids"] is None
        assert of_prompt["prompt_logprobs"] is None


async def test_the_text_of_a_chat_s_prompt_is_told(client: Client, engine: FakeEngine) -> None:
    plain = await client.chat("abc")
    assert plain.json()["prompt_text"] is None
    for fields, most in (({}, None), ({"truncate_prompt_tokens": 3}, 3)):
        whole = (await client.chat("abc", return_prompt_text=True, **fields)).json()
        wanted = client.engine.tokenizer.decode(engine.asked[-1].prompt, skip_special_tokens=False)
        assert whole["prompt_text"] == wanted
        assert "abc" in wanted or most == len(engine.asked[-1].prompt)
        stream = events(await client.chat("abc", return_prompt_text=True, stream=True, **fields))
        assert [one.get("prompt_text") for one in stream] == [wanted, *[None] * (len(stream) - 1)]
    refused = await client.complete("abc", return_prompt_text=True)
    assert refused.status_code == 400


async def test_what_is_cut_from_a_chat_is_not_read_again_unasked(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Sequence[int]] = []
    decode = Tokenizer.decode

    def watched(self: Tokenizer, ids: Sequence[int], **more: Any) -> str:
        read.append(tuple(ids))
        return decode(self, ids, **more)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    cut = {"truncate_prompt_tokens": 3}
    assert (await client.chat("abc", **cut)).status_code == 200
    assert read == []
    assert (await client.chat("abc", return_prompt_text=True, **cut)).status_code == 200
    assert [len(ids) for ids in read] == [3]


async def test_ids_of_a_stream(client: Client, engine: FakeEngine) -> None:
    ask = {"return_token_ids": True, "stream": True}
    for send in (client.complete, client.chat):
        chunks = events(await send("ab", **ask))
        told = [choice.get("token_ids", []) for chunk in chunks for choice in chunk["choices"]]
        assert [one for ids in told for one in ids] == [ord(char) for char in "hey"]
        places = [*chunks, *(choice for chunk in chunks for choice in chunk["choices"])]
        [prompt] = [one["prompt_token_ids"] for one in places if "prompt_token_ids" in one]
        assert tuple(prompt) == engine.asked[-1].prompt


async def test_ids_of_a_call_are_told_as_they_come(client: Client, engine: FakeEngine) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine.answers = (text,)
    tool = {"type": "function", "function": {"name": "f"}}
    chunks = events(await client.chat("ab", tools=[tool], return_token_ids=True, stream=True))
    told = [choice.get("token_ids", []) for chunk in chunks for choice in chunk["choices"]]
    assert [one for ids in told for one in ids] == [ord(char) for char in text]
