"""Sampling defaults come from the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnxport.errors import ArtifactError, RequestError
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.completion_request import CompletionRequest


def read(folder: Path, **config: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return SamplingDefaults.read(folder)


def test_without_a_file_they_are_openais(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults(1.0, 1.0, None)


def test_the_models_own(tmp_path: Path) -> None:
    config = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 1}
    assert read(tmp_path, **config) == SamplingDefaults(0.7, 0.8, 20)
    assert read(tmp_path, do_sample=False, temperature=0.7) == SamplingDefaults(0.0)
    assert read(tmp_path, temperature=None) == SamplingDefaults()
    found = read(tmp_path, repetition_penalty=1.1, min_p=0.05)
    assert found == SamplingDefaults(min_p=0.05, repetition_penalty=1.1)
    found = read(tmp_path, repetition_penalty=1.1, min_p=0.05, do_sample=False)
    assert found == SamplingDefaults(0.0, repetition_penalty=1.1)


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    found = read(tmp_path, no_repeat_ngram_size=3, num_beams=1, repetition_penalty=1.1)
    assert found.left_out == {"no_repeat_ngram_size": 3}
    assert "typical_p 1.0; not supported yet and left out: no_repeat_ngram_size 3" in str(found)


@pytest.mark.parametrize(
    "config", [{"temperature": -1}, {"top_k": "x"}, {"top_p": 2}, {"min_p": 2}]
)
def test_bad_values(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="--generation-config none"):
        read(tmp_path, **config)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ArtifactError):
        SamplingDefaults.read(tmp_path)


def test_what_is_laid_over_them(tmp_path: Path) -> None:
    read(tmp_path, temperature=0.7, top_k=20, num_beams=2)
    own = SamplingDefaults.of(tmp_path)
    assert own == SamplingDefaults(0.7, top_k=20, left_out={"num_beams": 2})
    found = SamplingDefaults.of(tmp_path, "auto", {"top_k": None, "min_p": 0.1})
    assert found == SamplingDefaults(0.7, min_p=0.1, left_out={"num_beams": 2})
    assert SamplingDefaults.of(tmp_path, "none") == SamplingDefaults()
    assert SamplingDefaults.of(tmp_path, "none", {"top_k": 0}) == SamplingDefaults()
    assert SamplingDefaults.of(tmp_path, "none", {"top_p": 0.5}) == SamplingDefaults(top_p=0.5)


def test_greedy_models_can_be_sampled(tmp_path: Path) -> None:
    read(tmp_path, do_sample=False, temperature=0.7)
    assert SamplingDefaults.of(tmp_path, override={"temperature": 0.5}).temperature == 0.5


@pytest.mark.parametrize(
    ("source", "override", "words"),
    [
        ("vllm", {}, "generation_config is 'vllm'; give 'auto'"),
        ("auto", {"temprature": 1, "max_new_tokens": 5}, "'temprature', 'max_new_tokens', which"),
        ("none", {"do_sample": False}, "allowed are temperature, top_p, top_k, min_p"),
        ("none", {"temperature": -1}, "temperature is -1"),
        ("none", {"temperature": None}, "temperature is None"),
        ("none", {"top_k": 2.5}, "top_k is 2.5"),
        ("none", {"top_p": True}, "top_p is True"),
    ],
)
def test_what_cannot_be_laid_over_them(
    tmp_path: Path, source: Any, override: dict[str, Any], words: str
) -> None:
    (tmp_path / "generation_config.json").write_text("[]")  # which is told only later
    with pytest.raises(RequestError, match=words):
        SamplingDefaults.of(tmp_path, source, override)


def test_they_fill_what_was_not_given() -> None:
    given = {"temperature": None, "top_k": 0, "min_p": 0.0, "seed": 3}
    assert SamplingDefaults(0.7, 0.8, 20, 0.05).filled(given) == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "typical_p": 1.0,
    }


def test_a_request_goes_before_the_defaults() -> None:
    defaults = SamplingDefaults(0.7, 0.8, 20, 0.05, 1.1)
    params = CompletionRequest(model="m", prompt="p").sampling_params(defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.8, 20)
    assert (params.min_p, params.repetition_penalty) == (0.05, 1.1)
    given = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    params = CompletionRequest(model="m", prompt="p", **given).sampling_params(defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 1.0, None)
    assert (params.min_p, params.repetition_penalty) == (0, 1)
