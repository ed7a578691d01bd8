"""Beam search of real models: transformers' beams where the rules are the same, and the demo's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.serving.beam_params import BeamSearchParams
from onnxport.serving.llm import LLM
from onnxport.serving.outputs import RequestOutput
from onnxport.serving.params import SamplingParams
from tests.exporter import checkpoints
from tests.serving.beams import Logits, beams, search

DEMO = Path(__file__).parents[2] / "demo" / "model"
FAMILIES = ("llama", "qwen2", "mistral-window", "gemma2")
Pair = tuple[PreTrainedModel, LLM]


def loaded(checkpoint: Path, folder: Path, **options: Any) -> LLM:
    path = export_model(checkpoint, folder, ExportOptions(precision="fp32", threads=1))
    return LLM(path, provider="cpu", threads=1, kv_cache_tokens=2048, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    model = checkpoints.make(checkpoints.CASES[request.param], folder / "checkpoint")
    with loaded(
        folder / "checkpoint", folder / "artifact", max_num_seqs=8, max_num_batched_tokens=24
    ) as llm:
        yield model, llm


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    with loaded(DEMO, tmp_path_factory.mktemp("demo") / "artifact") as llm:
        yield model, llm


def theirs(
    model: PreTrainedModel, prompt: Sequence[int], width: int, max_tokens: int, **more: Any
) -> list[list[int]]:
    """Outputs of transformers' beam search, of `max_tokens` each: nothing ends one before."""
    config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **more,
    )
    model.generation_config = config
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids))
    return [one[len(prompt) :].tolist() for one in found]


def ours(output: RequestOutput) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_random_models_have_transformers_beams(pair: Pair, width: int) -> None:
    model, llm = pair
    prompts = [checkpoints.tokens(seed, count).tolist() for seed, count in ((1, 5), (2, 33))]
    params = beams(width, 10, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [ours(one) for one in outputs] == [theirs(model, one, width, 10) for one in prompts]


def chats(llm: LLM, count: int) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    texts = ["Once upon a time", "The capital of", "What is onnxport?", "1 2 3 4"]
    return [tokenizer.encode(text) for text in texts[:count]]


@pytest.mark.parametrize("width", [2, 5])
def test_the_demo_has_transformers_beams(demo: Pair, width: int) -> None:
    model, llm = demo
    prompts = chats(llm, 4)
    params = beams(width, 16, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [ours(one) for one in outputs] == [theirs(model, one, width, 16) for one in prompts]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_the_demo_ends_as_the_rules_of_vllm_say(demo: Pair, penalty: float) -> None:
    model, llm = demo

    def logits_of(token_ids: tuple[int, ...]) -> Logits:
        with torch.no_grad():
            found = model(torch.tensor([list(token_ids)])).logits[0, -1]
        return found.double().numpy()

    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ends = sorted(tokenizer.eos_token_ids)
    for prompt in chats(llm, 3):
        params = BeamSearchParams(3, 20, length_penalty=penalty)
        [output] = llm.beam_search([{"prompt_token_ids": prompt}], params)
        texts = search(logits_of, prompt, 3, 20, ends=ends, length_penalty=penalty)
        assert [one.tokens for one in output.sequences] == [
            (*prompt, *text.tokens) for text in texts
        ]
        for one, text in zip(output.sequences, texts, strict=True):
            assert one.cum_logprob == pytest.approx(text.logprob, abs=1e-3)
            told = sum(
                entry[token_id].logprob
                for token_id, entry in zip(text.tokens, one.logprobs, strict=True)
            )
            assert one.cum_logprob == pytest.approx(told, abs=1e-3)
            output_ids = [token_id for token_id in text.tokens if token_id not in ends]
            assert one.text == tokenizer.decode(output_ids)


def test_the_best_beam_is_at_least_as_likely_as_the_greedy_text(demo: Pair) -> None:
    _, llm = demo
    for prompt in chats(llm, 4):
        asked = {"prompt_token_ids": prompt}
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
        [greedy] = llm.generate([asked], params)
        [best] = llm.generate([asked], beams(4, 16, ignore_eos=True))
        sums = [
            entry[token_id].logprob
            for token_id, entry in zip(
                greedy.outputs[0].token_ids, greedy.outputs[0].logprobs or (), strict=True
            )
        ]
        assert best.outputs[0].cumulative_logprob is not None
        assert best.outputs[0].cumulative_logprob >= np.sum(sums) - 1e-4
