"""The fields that change what is sampled, on both endpoints, as OpenAI's client sends them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer
from .fake import Client, FakeEngine
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
Ask = Callable[..., Any]
END = 258  # <|im_end|>; the scripted model gives its next token 20 and all others 0


def letter(char: str) -> int:
    """The token of a printable character."""
    return ord(char) - ord("!")


@pytest.fixture(params=[False, True], ids=["completions", "chat"])
def ask(request: pytest.FixtureRequest, server: RunningServer) -> Any:
    """A function that returns the answer's text; what OpenAI does not know goes as extra."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

        def complete(text: str, **fields: Any) -> str:
            common = {"model": MODEL, "temperature": 0, "max_tokens": 30, **fields}
            if request.param:
                messages: Any = [{"role": "user", "content": say(text)}]
                chat = client.chat.completions.create(messages=messages, **common)
                return chat.choices[0].message.content or ""
            return client.completions.create(prompt=say(text), **common).choices[0].text

        yield complete


def test_logit_bias(ask: Ask) -> None:
    assert ask("abc", logit_bias={str(letter("b")): -21, str(letter("z")): 1}) == "azc"
    assert ask("abc", logit_bias={str(letter("z")): 100}, max_tokens=4) == "zzzz"


def test_frequency_and_presence_penalties(ask: Ask) -> None:
    """20 - 2 a time is 0 after ten times, and 0 is what all others have."""
    found = ask("x" * 20, frequency_penalty=2, max_tokens=12)
    assert found.startswith("x" * 10)
    assert found[10] != "x"
    assert ask("x" * 20, frequency_penalty=0.5) == "x" * 20
    bias = {str(letter("z")): 19}
    assert ask("xxxx", logit_bias=bias, presence_penalty=2, max_tokens=4) == "xzxx"


def test_repetition_penalty(ask: Ask) -> None:
    """The script stands in the prompt, so every token of it is penalized."""
    bias = {str(letter("z")): 15}
    assert ask("ab", logit_bias=bias) == "ab"
    more = {"repetition_penalty": 1.5}
    assert ask("ab", logit_bias=bias, extra_body=more, max_tokens=1) == "z"


def test_min_p(ask: Ask) -> None:
    """At this temperature the likeliest token is only e times as probable as each other."""
    more = {"min_p": 0.4}
    assert ask("abcdef", temperature=20, extra_body=more, seed=1) == "abcdef"
    assert ask("abcdef", temperature=20, seed=1) != "abcdef"


def test_top_n_sigma_and_typical_p(ask: Ask) -> None:
    """The script's token is far from all others, which are alike."""
    more: dict[str, float] = {"top_n_sigma": 5}
    assert ask("abcdef", temperature=20, extra_body=more, seed=1) == "abcdef"
    more = {"typical_p": 0.01, "xtc_probability": 0}
    assert ask("abcdef", temperature=20, extra_body=more, seed=1) != "abcdef"


def test_xtc(ask: Ask) -> None:
    """Two tokens are likely choices; the likelier one is never drawn."""
    bias = {str(letter("z")): 19}
    more = {"xtc_probability": 1, "xtc_threshold": 0.1}
    assert ask("abc", temperature=1, logit_bias=bias, extra_body=more, max_tokens=3) == "zzz"
    assert ask("abc", temperature=1, extra_body=more) == "abc"


def test_dry(ask: Ask) -> None:
    """The prompt spells the answer out; "ab" is a repetition of one of its tokens."""
    bias = {str(letter("z")): 15}
    more: dict[str, Any] = {"dry_multiplier": 10, "dry_allowed_length": 1}
    assert ask("abab", logit_bias=bias) == "abab"
    assert "bab" not in ask("abab", logit_bias=bias, extra_body=more)
    more |= {"dry_penalty_last_n": 0}
    assert ask("abab", logit_bias=bias, extra_body=more) == "abab"


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"xtc_threshold": 3}, "xtc_threshold"),
        ({"dry_sequence_breakers": "ab"}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_allowed_length": 1.5}, "dry_allowed_length"),
        ({"mirostat": 3}, "mirostat"),
        ({"adaptive_target": 1.5}, "adaptive_target"),
        ({"adaptive_decay": 1}, "adaptive_decay"),
        ({"dynatemp_range": -0.5}, "dynatemp_range"),
    ],
)
def test_llama_cpp_s_fields_that_are_refused(ask: Ask, field: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequestError, match=told):
        ask("abc", extra_body=field)


def test_llama_cpp_s_fields_that_change_nothing(ask: Ask) -> None:
    more = {"mirostat": 0, "mirostat_tau": 5, "dynatemp_range": 0, "repeat_penalty": 1.0}
    more |= {"cache_prompt": True, "id_slot": -1, "n_probs": 0, "typical_p": 1, "top_n_sigma": -1}
    more |= {"adaptive_target": -1, "adaptive_decay": 0.9}
    assert ask("abc", extra_body=more) == "abc"


def test_bad_words(ask: Ask) -> None:
    assert "lo" not in ask("hello", extra_body={"bad_words": ["lo"]})
    assert ask("hello", extra_body={"bad_words": ["lol"]}) == "hello"


def test_allowed_token_ids(ask: Ask) -> None:
    allowed = [letter("a"), letter("b"), END]
    assert ask("abba", extra_body={"allowed_token_ids": allowed}) == "abba"
    found = ask("xyz", extra_body={"allowed_token_ids": allowed}, max_tokens=3)
    assert {*found} <= {"a", "b"}


def test_min_tokens(ask: Ask) -> None:
    more = {"min_tokens": 6}
    assert len(ask("ab", extra_body=more, max_tokens=6)) == 6
    assert ask("abab", extra_body={"min_tokens": 2}, stop="b") == "aba"
    assert ask("abab", stop="b") == "a"


def test_what_ends_a_text_can_be_kept(ask: Ask) -> None:
    more = {"include_stop_str_in_output": True}
    assert ask("abcdef", stop=["de"], extra_body=more) == "abcde"
    more["stop_token_ids"] = [letter("c")]  # type: ignore[assignment]
    assert ask("abcdef", stop=["de"], extra_body=more) == "abc"
    assert ask("abcdef", extra_body={"stop_token_ids": [letter("c")]}) == "ab"


def test_when_nothing_is_left_it_is_the_request_that_is_wrong(ask: Ask) -> None:
    """It is no error of the server, after which clients would ask again."""
    more = {"allowed_token_ids": [letter("a")], "guided_choice": ["ab"]}
    with pytest.raises(BadRequestError, match="allowed_token_ids and the grammar forbid all"):
        ask("ab", extra_body=more)
    with pytest.raises(BadRequestError, match=r"room for|max_tokens is 16"):
        ask("ab", extra_body={"min_tokens": 10**9}, max_tokens=None)


@pytest.mark.asyncio
@pytest.mark.parametrize("chat", [False, True])
async def test_what_the_engine_is_asked_for(model_folder: Path, chat: bool) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder)
    send: Any = client.chat if chat else client.complete
    fields = {
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "bad_words": ["a", "b"],
        "allowed_token_ids": [4, 5],
        "min_tokens": 2,
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
    }
    assert (await send(**fields, logit_bias={"4": -1.5, "10": 3})).status_code == 200
    wanted = SamplingParams(**fields, logit_bias={4: -1.5, 10: 3})  # type: ignore[arg-type]
    assert engine.asked[-1].params == wanted
    nothing = dict.fromkeys([*fields, "logit_bias", "add_special_tokens"]) | {"max_tokens": 9}
    if chat:
        nothing["add_generation_prompt"] = None
    assert (await send(**nothing)).status_code == 200
    assert engine.asked[-1].params == SamplingParams(max_tokens=9)
