"""Names of tokens in log probabilities: parts of characters, and texts that several tokens have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.serving.detokenizer import ByteDetokenizer
from onnxport.serving.http.logprobs import CompletionLogprobs, chat_logprobs
from onnxport.serving.outputs import Logprob, TokenLogprobs
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.tokenizers_for_tests import EOS, byte_fallback, byte_level
from tests.tiers import examples

from .conftest import RunningServer
from .fake import events
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
BYTES = Tokenizer(byte_level())
FALLBACK = Tokenizer(byte_fallback())


def byte(value: int, tokenizer: Tokenizer = BYTES) -> int:
    """Return the token of one byte."""
    name = f"<0x{value:02X}>"
    if tokenizer is BYTES:
        name = next(char for char, one in BYTES._alphabet.items() if one == value)
    token_id = tokenizer.token_to_id(name)
    assert token_id is not None
    return token_id


def entries(*token_ids: int, tokenizer: Tokenizer = BYTES) -> TokenLogprobs:
    """Return candidates, the likeliest first."""
    return {
        one: Logprob(-float(rank), rank, tokenizer.token_text(one))
        for rank, one in enumerate(token_ids, 1)
    }


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
def test_parts_of_characters_have_names_of_their_own(tokenizer: Tokenizer) -> None:
    first, second, third = (byte(one, tokenizer) for one in (0xE2, 0x82, 0xAC))
    candidates = entries(first, second, third, tokenizer=tokenizer)
    body = CompletionLogprobs(tokenizer).body([(second, candidates)])
    assert body == {
        "tokens": ["bytes:\\x82"],
        "token_logprobs": [-2.0],
        "top_logprobs": [{"bytes:\\xe2": -1.0, "bytes:\\x82": -2.0, "bytes:\\xac": -3.0}],
        "text_offset": [0],
    }
    [told] = chat_logprobs(tokenizer, [(second, candidates)], 2)["content"]
    assert (told["token"], told["bytes"]) == ("\\x82", [0x82])
    assert [(one["token"], one["bytes"]) for one in told["top_logprobs"]] == [
        ("\\xe2", [0xE2]),
        ("\\x82", [0x82]),
    ]


def test_text_beside_a_part_is_readable_and_the_character_itself_a_text() -> None:
    class Known:
        """A tokenizer of tokens that are their own bytes."""

        known = (b" a\xe2\x82", b"\\xe2\x82", b"\n\xe2", "\N{REPLACEMENT CHARACTER}".encode())

        def token_text(self, token_id: int) -> str:
            return self.known[token_id].decode(errors="replace")

        def token_bytes(self, token_id: int) -> bytes:
            return self.known[token_id]

        def detokenizer(
            self, prompt: Sequence[int], *, skip_special_tokens: bool = True
        ) -> ByteDetokenizer:
            return ByteDetokenizer(self.token_bytes)

    known: Any = Known()
    candidates = {one: Logprob(-1.0, one + 1, known.token_text(one)) for one in range(4)}
    [top] = CompletionLogprobs(known).body([(0, candidates)])["top_logprobs"]
    assert list(top) == [
        "bytes: a\\xe2\\x82",
        "bytes:\\\\xe2\\x82",
        "bytes:\\x0a\\xe2",
        "\N{REPLACEMENT CHARACTER}",
    ]


def test_of_tokens_with_one_text_none_is_lost() -> None:
    """Such as those beyond a tokenizer's, which have none: the sampled one keeps its name."""
    size = BYTES.vocab_size
    body = CompletionLogprobs(BYTES).body([(size + 1, entries(size, size + 1, size + 2))])
    assert body["tokens"] == [""]
    assert body["top_logprobs"] == [
        {f"token_id:{size}": -1.0, "": -2.0, f"token_id:{size + 2}": -3.0}
    ]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=examples(100), deadline=None)
def test_offsets_count_the_characters_of_the_text(text: str) -> None:
    """Bytes one by one: each has the place of its character, in whatever pieces they come."""
    token_ids = [byte(one) for one in text.encode()]
    lists = CompletionLogprobs(BYTES)
    found = [lists.body([(one, entries(one))])["text_offset"][0] for one in token_ids]
    wanted = [place for place, char in enumerate(text) for _ in char.encode()]
    assert found == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_over_http(server: RunningServer, stream: bool) -> None:
    said = "é日a"
    body = {"model": MODEL, "prompt": say(said), "temperature": 0, "logprobs": 5, "stream": stream}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    answers = events(response) if stream else [response.json()]
    parts = [one["choices"][0]["logprobs"] for one in answers]
    tokens = [token for part in parts for token in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    top = [one for part in parts for one in part["top_logprobs"]]
    spelled = [f"bytes:\\x{one:02x}" for one in "é日".encode()]
    assert tokens[:-1] == [*spelled, "a"]
    assert offsets == [0, 0, 1, 1, 1, 2, 3]
    assert all(5 <= len(one) <= 6 for one in top)
    assert all(token in one for token, one in zip(tokens, top, strict=True))


def test_of_a_prompt_that_is_told_too(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "é日a", "max_tokens": 0, "echo": True, "logprobs": 2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    logprobs = answer["choices"][0]["logprobs"]
    spelled = [f"bytes:\\x{one:02x}" for one in "é日".encode()]
    assert logprobs["tokens"] == [*spelled, "a"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 2]


def test_offsets_of_a_prompt_and_its_completion_count_characters(server: RunningServer) -> None:
    """Not tokens, of which `hi` is one and `日` three; not bytes, of which `日` has three, too."""
    body = {"model": MODEL, "prompt": "é" + say("日hi"), "echo": True, "logprobs": 0}
    [choice] = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    assert choice["text"] == "é<|say|>日hi<|over|>日hi"
    prompt, answer = [0, 0, 1, 8, 8, 8, 9, 11], [19, 19, 19, 20, 22]  # the last one ends it
    assert choice["logprobs"]["text_offset"] == prompt + answer


def test_special_tokens_of_an_answer_are_no_characters_of_its_text() -> None:
    end = BYTES.token_to_id(EOS)
    assert end is not None
    ids = [byte(ord("a")), end, byte(ord("b"))]
    lists = CompletionLogprobs(BYTES)
    assert lists.body([(one, entries(one)) for one in ids])["text_offset"] == [0, 1, 1]


def test_a_token_behind_a_broken_character_is_where_its_text_is() -> None:
    ids = [byte(0xE2), byte(ord("a")), byte(ord("b"))]
    told = CompletionLogprobs(BYTES).body([(one, entries(one)) for one in ids])
    text = BYTES.decode(ids)
    assert [text[at] for at in told["text_offset"]] == ["\N{REPLACEMENT CHARACTER}", "a", "b"]


def test_words_keep_the_space_before_them() -> None:
    """Of decoders that drop the first one: in names, bytes and offsets."""
    ids = [FALLBACK.token_to_id(one) or 0 for one in ("▁the", "▁sea", "▁", "s", "▁is")]
    assert FALLBACK.decode(ids) == "the sea s is"
    tokens = [(one, entries(one, tokenizer=FALLBACK)) for one in ids]
    told = CompletionLogprobs(FALLBACK).body(tokens)
    assert told["tokens"] == [" the", " sea", " ", "s", " is"]
    assert told["text_offset"] == [0, 3, 7, 8, 9]
    behind = CompletionLogprobs(FALLBACK, ids[:1]).body(tokens[1:])
    assert behind["text_offset"] == [0, 4, 5, 6]
    chat = chat_logprobs(FALLBACK, tokens[1:], 0)["content"]
    assert bytes(one for part in chat for one in part["bytes"]) == b" sea s is"


def test_a_prompt_has_as_many_likeliest_as_each_of_two_fields_asks_for(
    server: RunningServer,
) -> None:
    body = {"model": MODEL, "prompt": "hi there", "echo": True, "max_tokens": 0}
    for first, second in ((5, 1), (1, 5)):
        fields = {**body, "logprobs": first, "prompt_logprobs": second}
        [choice] = httpx.post(f"{server.url}/v1/completions", json=fields).json()["choices"]
        for field, count in (
            (choice["logprobs"]["top_logprobs"], first),
            (choice["prompt_logprobs"], second),
        ):
            assert all(count <= len(one) <= count + 1 for one in field[1:])
