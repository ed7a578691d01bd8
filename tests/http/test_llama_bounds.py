"""What bodies of `/completion` may have of texts, parts and biases, and what answers tell of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnxport.errors import CapacityError, RequestError
from onnxport.serving.http import llama_answer
from onnxport.serving.http.llama_answer import settings_told
from onnxport.serving.http.llama_completion import LlamaRequest
from onnxport.serving.http.llama_prompts import biases, encoded
from onnxport.serving.http.llama_settings import generation_settings
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

from .fake import Client, FakeEngine

pytestmark = pytest.mark.timeout(60)


def letter(char: str) -> int:
    """The token of a printable character."""
    return ord(char) - ord("!")


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([f"t{number}" for number in range(512)], None),
        ([f"t{number}" for number in range(513)], "logit_bias has 513 texts; it may have 512"),
        (["a" * 1024], None),
        (["a" * 1025], "logit_bias has a text of 1025 characters"),
        ([f"{number:0>1023}t" for number in range(64)], None),
        ([f"{number:0>1023}t" for number in range(65)], "texts of 66560 characters"),
    ],
)
def test_texts_of_biases_are_bounded(texts: list[str], found: str | None) -> None:
    for given in ([[text, 1.0] for text in texts], dict.fromkeys(texts, 1.0)):
        if found is None:
            assert biases(given) == tuple((text, 1.0) for text in texts)
            continue
        with pytest.raises(RequestError, match=found) as caught:
            biases(given)
        assert caught.value.param == "logit_bias"
    assert biases([[number, 1.0] for number in range(1000)]) is not None  # ids are no texts


async def test_texts_of_biases_are_encoded_in_a_thread(
    tokenizer: Tokenizer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def watched(texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        threads.append(threading.current_thread())
        return encode_all(texts, add_special_tokens=add_special_tokens)

    client = Client(FakeEngine(tokenizer), model_folder)
    encode_all = tokenizer.encode_all
    monkeypatch.setattr(tokenizer, "encode_all", watched)
    biased = {"b": False, str(letter("z")): 2, "zz": 1}
    assert (await client.post("/completion", prompt=[1], logit_bias=biased)).status_code == 200
    expected = {letter("b"): -math.inf, letter("z"): 4.0}
    assert dict(client.engine.asked[-1].params.logit_bias) == expected
    assert threads
    assert threading.current_thread() not in threads
    answer = await client.post("/completion", prompt=[1], logit_bias={"\ud800": 1})
    assert (answer.status_code, "half of a character" in answer.text) == (400, True), answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_settings_are_made_once(
    tokenizer: Tokenizer, model_folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    made = []

    def watched(params: SamplingParams, *, stream: bool) -> dict[str, Any]:
        made.append(params)
        return generation_settings(params, stream=stream)

    monkeypatch.setattr(llama_answer, "generation_settings", watched)
    client = Client(FakeEngine(tokenizer, ("ab", "cd")), model_folder)
    fields = {"prompt": [[1], [2], [3]], "n": 2, "stream": stream, "t_max_predict_ms": 90_000}
    answer = await client.post("/completion", **fields, logit_bias=[[5, 1.5]])
    assert answer.status_code == 200, answer.text
    assert answer.text.count('"logit_bias":[{"token":5,"bias":1.5}]') == 6
    assert answer.text.count('"t_max_predict_ms":90000') == 6
    assert len(made) == 1


def test_biases_are_not_told_endlessly() -> None:
    """An answer by itself may tell what it was given, and several together as much as two."""
    params = SamplingParams(logit_bias=dict.fromkeys(range(1 << 17), 1.0))
    settings = "generation_settings"
    for num_answers, names, is_refused in (
        (1, None, False),
        (2, None, False),
        (3, None, True),
        (3, [], True),
        (3, ["content", settings], True),
        (3, [f"{settings}/logit_bias"], True),
        (3, ["content", f"{settings}/seed"], False),
    ):
        body = LlamaRequest.model_validate({"prompt": "a", "response_fields": names})
        if not is_refused:
            assert len(settings_told(body, params, num_answers)["logit_bias"]) == 1 << 17
            continue
        with pytest.raises(RequestError, match=r"3 answers.*131072 biases.*262144") as caught:
            settings_told(body, params, num_answers)
        assert caught.value.param == "logit_bias"
    many = settings_told(LlamaRequest(prompt="a"), SamplingParams(logit_bias={1: 2.0}), 1 << 16)
    assert many["logit_bias"] == [{"token": 1, "bias": 2.0}]


async def test_biases_of_many_answers(tokenizer: Tokenizer, model_folder: Path) -> None:
    client = Client(FakeEngine(tokenizer), model_folder)
    pairs = [[token, 1] for token in range(50_000)]
    answer = await client.post("/completion", prompt=["a", "b", "c"], n=2, logit_bias=pairs)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")
    assert not client.engine.asked


class Counted:
    """A tokenizer that counts what it encodes, and has two tokens more for a text that begins."""

    def __init__(self) -> None:
        self.encoded = 0

    def check_length(self, text: str, most_tokens: int) -> None:
        assert most_tokens == 8

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded += 1
        return [0] * (len(text) + 2 * add_special_tokens)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "count"),
    [
        ("x" * 6, None, 1),
        ("x" * 7, "9 tokens,", 1),
        ([1] * 8, None, 0),
        ([1] * 9, "9 token ids and texts", 0),
        ([""] * 9, "9 token ids and texts", 0),
        (["", 1, "", "abcde"], None, 3),
        (["a", "bcd", "efgh", "i", "j", "k"], "10 tokens at least,", 3),
    ],
)
def test_a_prompt_is_encoded_as_far_as_it_fits(
    prompt: Any, num_tokens: str | None, count: int
) -> None:
    tokenizer = Counted()
    limits = SimpleNamespace(max_model_len=8)
    service: Any = SimpleNamespace(tokenizer=tokenizer, engine=SimpleNamespace(capabilities=limits))
    if num_tokens is None:
        assert len(encoded(service, [prompt])[0].token_ids) == 8
    else:
        with pytest.raises(CapacityError, match=f"{num_tokens}.* is 8 tokens"):
            encoded(service, [prompt])
    assert tokenizer.encoded == count
