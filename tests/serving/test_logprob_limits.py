"""How many log probabilities may be asked for, and what all of the vocabulary is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onnxport import LLM, SamplingParams
from onnxport.errors import CapacityError, RequestError
from onnxport.serving import logprob_limits
from onnxport.serving.config import EngineConfig
from onnxport.serving.logprob_limits import check_total, counted, with_counts
from onnxport.serving.prompts import TokensPrompt
from tests.serving.helpers import null_engine
from tests.serving.test_sampling_engine import null_logits

VOCAB = 512
PROMPT = [7, 3, 3, 9, 300]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.mark.parametrize(
    ("count", "limit", "wanted"),
    [
        (0, 0, 0),
        (20, 20, 20),
        (21, None, 21),
        (-1, None, VOCAB),
        (-1, VOCAB, VOCAB),
        (VOCAB + 5, None, VOCAB),
        (20, None, 20),
    ],
)
def test_counts(count: int, limit: int | None, wanted: int) -> None:
    assert counted("logprobs", count, limit, VOCAB) == wanted


@pytest.mark.parametrize(
    ("count", "limit", "words"),
    [
        (21, 20, "x is 21, and at most 20 of the likeliest.*--max-logprobs"),
        (-1, 20, "x is -1, that is all 512 tokens, and at most 20"),
        (-1, VOCAB - 1, "at most 511"),
        (1, 0, "at most 0"),
        (-2, None, "x is -2; give 0 or more, or -1 for all tokens"),
    ],
)
def test_counts_that_are_refused(count: int, limit: int | None, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        counted("x", count, limit, VOCAB)
    assert caught.value.param == "x"


def test_parameters_with_counts() -> None:
    params = replace(GREEDY, logprobs=3)
    assert with_counts(params, 20, VOCAB) is params
    assert with_counts(GREEDY, 0, VOCAB) is GREEDY
    found = with_counts(replace(params, prompt_logprobs=-1), None, VOCAB)
    assert (found.logprobs, found.prompt_logprobs) == (3, VOCAB)
    with pytest.raises(RequestError, match="prompt_logprobs is 4") as caught:
        with_counts(replace(GREEDY, prompt_logprobs=4), 3, VOCAB)
    assert caught.value.param == "prompt_logprobs"


Engine = Callable[..., LLM]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_the_engine_refuses_more_than_its_limit_before_anything_waits(name: str) -> None:
    for limit, count in ((None, 21), (3, 4), (0, 1), (20, -1)):
        engine = null_engine(**{} if limit is None else {"max_logprobs": limit})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="--max-logprobs") as caught:
            engine.prepare("a", PROMPT, replace(GREEDY, **{name: count}))
        assert caught.value.param == name
        assert not engine.has_work
    engine = null_engine(max_logprobs=0)
    engine.prepare("a", PROMPT, replace(GREEDY, **{name: 0}))
    engine.prepare("a", PROMPT, replace(GREEDY, best_of=2))  # which looks at the drawn tokens alone
    engine.prepare("a", PROMPT, replace(GREEDY, logprob_token_ids=(3, 4)))  # not of the likeliest


@pytest.mark.parametrize("limit", [-1, None])
def test_all_of_the_vocabulary(limit: int | None) -> None:
    params = replace(GREEDY, logprobs=-1, prompt_logprobs=-1)
    with LLM.from_engine(null_engine(max_logprobs=limit)) as llm:
        [output] = llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params)
    [one] = output.outputs
    assert one.logprobs is not None
    assert output.prompt_logprobs is not None
    told = [*output.prompt_logprobs[1:], *one.logprobs]
    sequence = [*PROMPT, *one.token_ids]
    assert len(told) == len(sequence) - 1
    for logits, entry in zip(null_logits(sequence, VOCAB).astype(np.float64), told, strict=False):
        assert entry is not None
        order = np.argsort(-logits, kind="stable").tolist()
        assert list(entry) == order
        assert [one.rank for one in entry.values()] == list(range(1, VOCAB + 1))
        total = sum(np.exp(one.logprob) for one in entry.values())
        assert total == pytest.approx(1.0)
        values = logits[order] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert [one.logprob for one in entry.values()] == pytest.approx(values, abs=1e-5)


def test_more_than_memory_should_hold_is_refused() -> None:
    asked = replace(GREEDY, logprobs=100_000, prompt_logprobs=150_000)
    check_total(asked, 7, 31)  # 7 * 150_000 + 31 * 100_000 = 4_150_000
    with pytest.raises(RequestError, match="one request may have 4194304") as caught:
        check_total(asked, 8, 31)
    assert "150000 (prompt_logprobs) x 8 tokens + 100000 (logprobs) x 31" in str(caught.value)
    assert caught.value.param == "prompt_logprobs"
    several = replace(GREEDY, logprobs=100_000, best_of=3)
    check_total(several, 4, 13)
    with pytest.raises(RequestError, match=r"x 42 tokens are 4200000") as caught:
        check_total(several, 4, 14)
    assert caught.value.param == "logprobs"
    usual = replace(GREEDY, logprobs=20, prompt_logprobs=20, n=128)
    check_total(usual, 1_000_000, 1_000_000)


def test_named_tokens_count() -> None:
    named = tuple(range(128))
    many = SamplingParams(n=128, max_tokens=8192, logprob_token_ids=named)
    with pytest.raises(RequestError, match=r"128 \(logprobs and logprob_token_ids\)") as caught:
        check_total(many, 0, 8192)
    assert caught.value.param == "logprobs"
    few = SamplingParams(n=128, max_tokens=8192, logprob_token_ids=named[:19], logprobs=1)
    check_total(few, 0, 8192)


def test_the_engine_refuses_more_than_memory_should_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_limits, "MOST_LOGPROBS", 4 * VOCAB)
    engine = null_engine(max_logprobs=-1, max_model_len=20)
    engine.prepare("a", PROMPT, replace(GREEDY, prompt_logprobs=-1))
    for more in ({"prompt_logprobs": -1, "logprobs": 21}, {"logprobs": -1, "max_tokens": None}):
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, **more}
        with pytest.raises(RequestError, match="log probabilities, and one request may have 2048"):
            engine.prepare("b", PROMPT, SamplingParams(**params))


@pytest.mark.parametrize("value", [-2, 1.5, True, "all"])
def test_what_is_no_limit_is_refused(value: Any) -> None:
    with pytest.raises(CapacityError, match="max_logprobs is"):
        EngineConfig(max_logprobs=value)


def test_limits() -> None:
    assert EngineConfig().max_logprobs == 20
    assert EngineConfig(max_logprobs=-1).max_logprobs is None
