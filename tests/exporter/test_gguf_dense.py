"""What metadata of GGUF files of dense models would be in a `config.json`, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf.architectures import read_config
from onnxport.exporter.gguf.dense import activations
from onnxport.exporter.gguf.layouts import layout
from onnxport.exporter.gguf.metadata import Metadata
from onnxport.exporter.gguf.reranker import score_head
from onnxport.graphs.growth_spec import GrowthSpec
from tests.exporter.test_gguf_config import facts, spec

YARN: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 8.0,
    "rope__scaling__original_context_length": 32,
}
ROWS = "cls.output.weight"


def test_glm_rotates_a_part_of_each_head() -> None:
    for architecture in ("chatglm", "glm4"):
        half = spec(facts(architecture, rope__dimension_count=8))
        assert (half.rope.rotary_dim, half.rope.interleaved, half.qkv_bias) == (8, True, False)
        assert spec(facts(architecture, "blk.0.attn_qkv.bias")).qkv_bias


def test_what_guesses_further_tokens_of_glm_4_is_behind_the_last_layer() -> None:
    assert spec(facts("glm4", block_count=3, nextn_predict_layers=1)).num_layers == 2


def test_ministral_is_mistral_whose_queries_grow() -> None:
    assert spec(facts("mistral3")).family == "mistral"
    grows = facts("mistral3", attention__temperature_scale=0.1, **YARN)
    read = spec(grows)
    assert (read.family, read.context_length) == ("ministral3", 256)
    assert read.query_growth == GrowthSpec(strength=0.1, interval=32, offset=0, without_rope=False)
    own = 0.1 * math.log(8) + 1
    assert read.rope.attention_factor == pytest.approx(own)
    told: dict[str, Any] = {
        "attention__temperature_scale": 0.1,
        "rope__scaling__yarn_log_multiplier": 0.5,
    }
    read = spec(facts("mistral3", **told, **YARN))
    assert read.rope.attention_factor == pytest.approx(own / (0.05 * math.log(8) + 1))


def test_norms_of_command_r_plus() -> None:
    assert spec(facts("command-r", "blk.0.attn_q_norm.weight")).qk_norm
    assert not spec(facts("command-r")).qk_norm


def test_the_window_that_older_files_of_gemma_2_do_not_tell() -> None:
    assert spec(facts("gemma2", attention__sliding_window=None)).sliding_window == (4096, None)


def test_hunyuan_has_one_expert_of_a_kind() -> None:
    assert spec(facts("hunyuan-dense", expert_count=1, expert_used_count=1)).experts is None
    with pytest.raises(UnsupportedModelError, match=r"hunyuan-dense\.expert_count is 8"):
        read_config(facts("hunyuan-dense", expert_count=8))


def test_norms_of_nemotron_have_one_epsilon_of_two() -> None:
    assert spec(facts("nemotron", attention__layer_norm_rms_epsilon=0.5)).rms_norm_eps == 1e-5


@pytest.mark.parametrize("architecture", ["granite", "granitemoe"])
def test_granite_without_a_rotation(architecture: str) -> None:
    read_config(facts(architecture, rope__scaling__finetuned=True))
    with pytest.raises(UnsupportedModelError, match=r"rope\.scaling\.finetuned is False"):
        read_config(facts(architecture, rope__scaling__finetuned=False))


@pytest.mark.parametrize("told", [None, 1.0, 0.1 * math.log(8) + 1])
def test_a_magnitude_that_yarn_has_anyway(told: float | None) -> None:
    read = spec(facts("qwen3", rope__scaling__yarn_attn_factor=told, **YARN))
    assert read.rope.attention_factor == pytest.approx(0.1 * math.log(8) + 1)


def test_another_magnitude() -> None:
    """DeepSeek-R1-0528-Qwen3-8B's, which transformers, vLLM and llama.cpp take for two things."""
    with pytest.raises(UnsupportedModelError, match=r"is 0\.8278.*; supported is 1\.20794, which"):
        read_config(facts("qwen3", rope__scaling__yarn_attn_factor=0.8278, **YARN))


def xielu(**values: Any) -> Metadata:
    found = {name: [0.5, 0.25] for name in ("alpha_p", "alpha_n")} | {"beta": 0.5, "eps": 0.125}
    keys = {f"xielu.{name}": one for name, one in (found | values).items()}
    return Metadata({"general.architecture": "apertus", **keys}, Path("model.gguf"))


def test_numbers_of_activations() -> None:
    """Of each layer, or one for all of them; other architectures have none."""
    found = activations(xielu(), 2, "layers.{}.")
    assert len(found) == 8
    np.testing.assert_array_equal(found["layers.1.alpha_p"], np.array([0.25], np.float32))
    assert (found["layers.1.eps"].shape, float(found["layers.0.eps"])) == ((), 0.125)
    assert activations(facts("llama").metadata, 2, "layers.{}.") == {}


@pytest.mark.parametrize("given", [None, [0.5], [0.5, "a"], 3])
def test_numbers_of_activations_that_are_missing(given: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"xielu\.alpha_n is .* a number for each of 2 layers"
    ):
        activations(xielu(alpha_n=given), 2, "layers.{}.")


def test_joined_products_of_attention() -> None:
    assert layout("llama", joins_qkv=True).qkv == ("attn_qkv",)
    assert len(layout("llama", joins_qkv=False).qkv) == 3
    # Whose layers without attention have a tensor that is called so.
    assert len(layout("qwen3next", joins_qkv=True).qkv) == 3


def reranker(labels: list[str] | None = None, rows: int = 2, kind: str = "qwen3") -> Any:
    own = {"pooling_type": 4, "classifier__output_labels": labels or ["yes", "no"]}
    found = facts(kind, numbers={ROWS: [1.0, 3.0, 0.5, 0.25]}, **own)
    assert isinstance(found.shapes, dict)
    found.shapes[ROWS] = (rows, 2)
    return found


def test_a_reranker() -> None:
    _, values = read_config(reranker())
    assert values["architectures"] == ["Qwen3ForSequenceClassification"]
    assert values["id2label"] == {"0": "yes"}
    head = score_head(reranker())
    np.testing.assert_array_equal(head["score.weight"], [[0.5, 2.75]])
    assert score_head(facts("qwen3")) == {}


def test_rerankers_that_are_not_supported() -> None:
    with pytest.raises(UnsupportedModelError, match="supported are two, of which the first"):
        read_config(reranker(["relevance"]))
    with pytest.raises(CheckpointError, match=r"cls\.output\.weight is \[3, 2\], expected a row"):
        read_config(reranker(rows=3))
    with pytest.raises(UnsupportedModelError, match=r"llama\.classifier\.output_labels"):
        read_config(reranker(kind="llama"))
