"""Beam search in Python: `LLM.beam_search` in vLLM's shape, and `LLM.generate`."""

from __future__ import annotations

import math
from typing import Any

import pytest

import onnxport
from onnxport.errors import CapacityError, RequestError
from onnxport.serving.beam_params import BeamSearchOutput, BeamSearchParams
from onnxport.serving.llm import LLM
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.beams import Text, beams, null_logits, search
from tests.serving.helpers import null_engine
from tests.serving.tokenizers_for_tests import byte_level

PROMPT = [20, 21, 22]


@pytest.fixture
def llm() -> LLM:
    tokenizer = Tokenizer(byte_level(), frozenset({0}))
    engine = null_engine(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, num_blocks=128)
    return LLM.from_engine(engine)


def texts(llm: LLM, prompt: list[int], *args: Any, **more: Any) -> list[Text]:
    size = llm.capabilities.vocab_size
    return search(lambda ids: null_logits(ids, (None,), size), prompt, *args, **more)


def test_it_is_the_public_api() -> None:
    assert onnxport.BeamSearchParams is BeamSearchParams


def test_sequences_are_vllms_the_best_first(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompts: list[Any] = [{"prompt_token_ids": PROMPT}, "the sea", {"prompt": "a"}]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6))
    assert len(outputs) == 3
    for prompt, output in zip(
        (PROMPT, *map(tokenizer.encode, ("the sea", "a"))), outputs, strict=True
    ):
        wanted = texts(llm, prompt, 3, 6, ends=(0,))
        assert [one.tokens for one in output.sequences] == [
            (*prompt, *text.tokens) for text in wanted
        ]
        for one, text in zip(output.sequences, wanted, strict=True):
            assert one.cum_logprob == pytest.approx(text.logprob, abs=1e-4)
            assert one.text == tokenizer.decode(text.tokens)
            assert len(one.logprobs) == len(text.tokens)
            assert one.finish_reason == ("stop" if text.tokens[-1] == 0 else "length")
            assert one.error is None


def test_all_parameters_count(llm: LLM) -> None:
    prompt = {"prompt_token_ids": PROMPT}
    [plain] = llm.beam_search(prompt, BeamSearchParams(2, 5))
    [tempered] = llm.beam_search(prompt, BeamSearchParams(2, 5, temperature=3.0))
    wanted = texts(llm, PROMPT, 2, 5, ends=(0,), temperature=3.0)
    assert [one.tokens[3:] for one in tempered.sequences] == [text.tokens for text in wanted]
    assert tempered.sequences[0].cum_logprob < plain.sequences[0].cum_logprob
    params = BeamSearchParams(4, 3, True, 0.5, -1.0, True)
    assert params.sampling() == SamplingParams(
        temperature=0.5,
        max_tokens=3,
        ignore_eos=True,
        logprobs=0,
        n=4,
        include_stop_str_in_output=True,
        use_beam_search=True,
        length_penalty=-1.0,
    )


def test_there_may_be_fewer_sequences(llm: LLM) -> None:
    [output] = llm.generate({"prompt_token_ids": PROMPT}, beams(4, 2, allowed_token_ids=(40,)))
    assert [one.token_ids for one in output.outputs] == [(40, 40)]
    assert output.finished
    [found] = [BeamSearchOutput.of(output)]
    assert [one.tokens for one in found.sequences] == [(*PROMPT, 40, 40)]


def test_generate_returns_the_best_of_more_beams(llm: LLM) -> None:
    prompt = {"prompt_token_ids": PROMPT}
    [output] = llm.generate(prompt, beams(2, 6, best_of=5))
    wanted = texts(llm, PROMPT, 5, 6, ends=(0,))
    assert [one.token_ids for one in output.outputs] == [text.tokens for text in wanted[:2]]
    assert [one.index for one in output.outputs] == [0, 1]
    assert all(one.logprobs is None for one in output.outputs)
    for one, text in zip(output.outputs, wanted, strict=False):
        assert one.cumulative_logprob == pytest.approx(text.logprob, abs=1e-4)
    [drawn] = llm.generate(prompt, SamplingParams(max_tokens=2))
    assert drawn.outputs[0].cumulative_logprob is None


def test_a_search_that_fails_says_why() -> None:
    with LLM.from_engine(null_engine(fails=lambda number: number == 2)) as llm:
        [output] = llm.beam_search({"prompt_token_ids": PROMPT}, BeamSearchParams(1, 5))
    [sequence] = output.sequences
    assert (sequence.finish_reason, sequence.cum_logprob) == ("error", -math.inf)
    assert "run 2 was told to fail" in (sequence.error or "")


@pytest.mark.parametrize("width", [0, -1, 129, 1.5, True, None, "3"])
def test_widths_have_a_range(width: Any) -> None:
    with pytest.raises(RequestError, match=r"beam_width is .*integer in"):
        BeamSearchParams(width, 5)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"length_penalty": 99.0}, "length_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_other_values_have_ranges(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 5} | fields)
    assert caught.value.param == name


def test_what_cannot_run_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="runs 8 sequences at once"):
        llm.beam_search({"prompt_token_ids": PROMPT}, BeamSearchParams(9, 5))
    with pytest.raises(CapacityError, match="8 beams of 3 prompt tokens"):
        llm.beam_search({"prompt_token_ids": PROMPT}, BeamSearchParams(8, 200))
