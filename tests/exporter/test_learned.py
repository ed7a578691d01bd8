"""OPT, GPT-2, GPT BigCode, GPT-J and Falcon: how configurations and checkpoints read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file, save_file

from onnxport.errors import ArtifactError, CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.positions import places_of_tokens, stream
from onnxport.exporter.rotation import Positions
from onnxport.graphs import contract as names
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled
from tests.exporter.run_graphs import Graph, check_golden

SUMMARY = {
    **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_type": "cls_index"},
    **{"summary_proj_to_labels": True, "summary_use_proj": True},
}
GPT: Mapping[str, Any] = {
    **{"n_embd": 256, "n_head": 4, "n_layer": 3, "n_positions": 512, "vocab_size": 1000},
    **{"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02},
    **{"layer_norm_epsilon": 1e-05, "bos_token_id": 999, "eos_token_id": 999, **SUMMARY},
}
# Keys of the published models' files, in small.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "opt": {
        **{"architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 1000},
        **{"_remove_final_layer_norm": False, "activation_dropout": 0.0, "init_std": 0.02},
        **{"activation_function": "relu", "attention_dropout": 0.0, "dropout": 0.1},
        **{"do_layer_norm_before": True, "ffn_dim": 1024, "hidden_size": 256, "layerdrop": 0.0},
        **{"max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 3},
        **{"prefix": "</s>", "word_embed_proj_dim": 256, "pad_token_id": 1},
    },
    "gpt2": {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **GPT, "n_ctx": 512},
        **{"activation_function": "gelu_new", "task_specific_params": {}},
    },
    "gpt_bigcode": {
        **{"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", **GPT},
        **{"activation_function": "gelu", "n_inner": 768, "multi_query": True},
        **{"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True},
        **{"inference_runner": 0, "max_batch_size": None, "max_sequence_length": None},
        **{"pad_key_length": True, "pre_allocate_kv_cache": False, "scale_attn_weights": True},
        "validate_runner_input": True,
    },
    "gptj": {
        **{"architectures": ["GPTJForCausalLM"], "model_type": "gptj", **GPT, "n_inner": None},
        **{"activation_function": "gelu_new", "rotary": True, "rotary_dim": 32},
        **{"scale_attn_weights": True, "tie_word_embeddings": False},
    },
    "falcon": {
        **{"architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 1000},
        **{"alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False},
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "hidden_size": 256},
        **{"layer_norm_epsilon": 1e-05, "multi_query": True, "new_decoder_architecture": False},
        **{"num_attention_heads": 4, "num_hidden_layers": 3, "parallel_attn": True},
    },
}


def config(family: str, **changes: Any) -> dict[str, Any]:
    """The published model's file in small; None leaves a key out."""
    values = {**CONFIGS[family], **changes}
    return {key: one for key, one in values.items() if one is not None}


@pytest.mark.parametrize("family", CONFIGS)
def test_both_spellings_are_understood(family: str) -> None:
    spec = read(config(family))
    assert spec.family == family
    assert read(respelled(config(family))) == spec
    assert ArchSpec.from_json(spec.to_json()) == spec


def test_opt() -> None:
    spec = read(config("opt"))
    assert (spec.learned_positions, spec.context_length, spec.ropes) == (512, 512, ())
    assert (spec.hidden_act, spec.intermediate_size, spec.ungated) == ("relu", 1024, True)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.norm_biases) == (True,) * 4
    assert (spec.rms_norm_eps, spec.tie_word_embeddings) == (1e-5, True)
    assert (spec.embedding_size, spec.stream_norms, spec.no_final_norm) == (None, None, None)
    absent = dict.fromkeys(("activation_function", "do_layer_norm_before", "word_embed_proj_dim"))
    assert read(config("opt", **absent)) == spec
    assert not read(config("opt", enable_bias=False)).mlp_bias
    assert read(config("opt", _remove_final_layer_norm=True)).no_final_norm
    smaller = read(config("opt"), context_length=100)
    assert (smaller.context_length, smaller.learned_positions) == (100, 512)


def test_opt_350m() -> None:
    spec = read(config("opt", do_layer_norm_before=False, word_embed_proj_dim=128))
    assert (spec.embedding_size, spec.token_size, spec.hidden_size) == (128, 128, 256)
    assert (spec.stream_norms, spec.no_final_norm) == (True, True)


def test_gpt2() -> None:
    spec = read(config("gpt2"))
    assert (spec.num_layers, spec.num_heads, spec.hidden_size) == (3, 4, 256)
    assert (spec.intermediate_size, spec.hidden_act) == (1024, "gelu_tanh")
    assert (spec.learned_positions, spec.scale_of(2)) == (512, pytest.approx(1 / 8))
    assert (spec.attention_scale, spec.inverse_layer_scale) == (None, None)
    plain = read(config("gpt2", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True))
    assert [plain.scale_of(layer) for layer in range(3)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert read(config("gpt2", reorder_and_upcast_attn=True, n_inner=1024)) == spec
    assert read(config("gpt2", architectures=["GPT2Model"])) == spec


def test_gpt_bigcode() -> None:
    spec = read(config("gpt_bigcode"))
    assert (spec.num_kv_heads, spec.intermediate_size, spec.hidden_act) == (1, 768, "gelu")
    assert read(config("gpt_bigcode", multi_query=False)).num_kv_heads == 4
    assert read(config("gpt_bigcode", scale_attn_weights=False)).scale == 1.0


def test_gptj() -> None:
    spec = read(config("gptj"))
    assert (spec.rope.rotary_dim, spec.rope.interleaved, spec.learned_positions) == (32, True, None)
    assert (spec.parallel_layers, spec.parallel_norms, spec.head_bias) == (True, None, True)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (False, False, True)
    assert read(config("gptj", rotary_dim=None)).rope.rotary_dim == 64
    assert read({**config("gptj", rotary_dim=None), "rotary_dim": None}).rope.rotary_dim == 64


def test_falcon() -> None:
    spec = read(config("falcon"))
    assert (spec.num_kv_heads, spec.intermediate_size, spec.context_length) == (1, 1024, 2048)
    assert (spec.parallel_layers, spec.parallel_norms, spec.hidden_act) == (True, None, "gelu")
    assert read(config("falcon", num_kv_heads=4)) == spec  # which is not read then
    large = {"new_decoder_architecture": True, "num_kv_heads": 2}
    new = read(config("falcon", **large))
    assert (new.num_kv_heads, new.parallel_norms) == (2, True)
    assert read(config("falcon", **large, num_ln_in_parallel_attn=1)).parallel_norms is None
    turns = read(config("falcon", parallel_attn=False, multi_query=False, rope_theta=5e5))
    assert (turns.parallel_layers, turns.num_kv_heads, turns.rope.theta) == (None, 4, 5e5)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("opt", {"layer_norm_elementwise_affine": False}, "LayerNorms without weights"),
        ("opt", {"num_key_value_heads": 2}, "num_key_value_heads is 2; of opt each of 4"),
        ("opt", {"hidden_act": "gelu"}, "activation_function is 'relu' and hidden_act is 'gelu'"),
        ("opt", {"activation_function": "tanh"}, "hidden_act is 'tanh'"),
        ("gptj", {"n_embd": 0}, "rotary_dim 0 must be positive"),
        ("gptj", {"n_embd": 3, "rotary_dim": None}, "rotary_dim 0 must be positive"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim is 0"),
        ("opt", {"scale_embeddings": True}, "scale_embeddings is True"),
        ("opt", {"layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06; transformers"),
        ("gpt2", {"rope_theta": 5e5}, "rope_theta = 500000.0"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = true"),
        ("gpt2", {"hidden_size": 512}, "n_embd is 256 and hidden_size is 512"),
        ("gpt2", {"num_key_value_heads": 1}, "num_key_value_heads is 1; of gpt2 each of 4"),
        ("gpt2", {"n_head": 6}, "supported is hidden_size / num_attention_heads"),
        ("gpt2", {"head_dim": 32}, "head_dim is 32"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention = true"),
        ("gptj", {"tie_word_embeddings": True}, "the head has a bias and the embedding none"),
        ("gptj", {"rotary_dim": 128}, "rotary_dim 128 exceeds head_size 64"),
        ("falcon", {"alibi": True}, "alibi is True, so that the distance of tokens is added"),
        ("falcon", {"apply_residual_connection_post_layernorm": True}, "the norm of the stream"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads is 2 of 4 heads"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2, which no model"),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn False",
        ),
    ],
)
def test_what_would_change_the_result_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read({**config(family), **changes})


@pytest.mark.parametrize(
    ("family", "further"),
    [
        ("gpt2", {"n_special": 0, "predict_special_tokens": True, "output_past": True}),
        ("gpt2", {"_num_labels": 1}),
        ("opt", {"learned_embeddings": True, "scale_embeddings": False, "enable_bias": True}),
    ],
)
def test_what_published_files_say_besides(family: str, further: dict[str, Any]) -> None:
    assert read({**config(family), **further}) == read(config(family))


@pytest.mark.parametrize("family", ["opt", "gpt2", "gpt_bigcode"])
def test_there_are_no_positions_behind_the_table(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"600 .*512"):
        read(config(family), context_length=600)


def test_a_table_is_as_long_as_contexts_may_be() -> None:
    spec = read(config("gpt2"))
    with pytest.raises(ArtifactError, match="is 512, and learned_positions are 100"):
        ArchSpec.from_json({**spec.to_json(), "learned_positions": 100})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotated_layers": None}, "learned_positions do not go with RoPE"),
        ({"learned_positions": 0}, "learned_positions must be positive"),
        ({"embedding_size": 0}, "embedding_size must be positive"),
        ({"stream_norms": True, "layer_norms": None, "norm_biases": None}, "are LayerNorms"),
        ({"stream_norms": True, "parallel_layers": True}, "does not go with parallel_layers"),
        ({"stream_scale": 2.0}, "learned_positions does not go with stream_scale"),
        ({"no_final_norm": True, "logits_scale": 2.0}, "logits_scale is of the final norm"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(read(config("gpt2")), **changes)


def test_tokens_that_pad_a_step_stay_within_the_table() -> None:
    """Two sequences, the second at the end of its context, and two tokens behind both."""
    g = GraphBuilder("test")
    g.input(names.INPUT_IDS, TensorProto.INT64, ["tokens"])
    for name in (names.CUMULATIVE_SEQUENCE_LENGTHS, names.PAST_SEQUENCE_LENGTHS):
        g.input(name, TensorProto.INT32, [name])
    table = g.constant(np.arange(8, dtype=np.float32)[:, None], "table")
    nothing = g.constant(np.zeros((1, 1), np.float32), "nothing")

    def embed(_: str = "", ids: str = "") -> str:
        return g.node("Gather", [table, ids]) if ids else nothing

    spec = SimpleNamespace(learned_positions=8, embedding_size=None)
    positions = Positions(places_of_tokens(g))
    decoder = SimpleNamespace(g=g, spec=spec, embed=embed, positions=positions)
    made = stream(decoder)  # type: ignore[arg-type]
    g.output("rows", TensorProto.FLOAT, ["tokens", 1])
    g.node("Identity", [made], outputs=["rows"])
    session = ort.InferenceSession(g.build().SerializeToString())
    feeds = {
        names.INPUT_IDS: np.zeros(7, np.int64),
        names.CUMULATIVE_SEQUENCE_LENGTHS: np.array([0, 3, 5], np.int32),
        names.PAST_SEQUENCE_LENGTHS: np.array([0, 6], np.int32),
    }
    (rows,) = session.run(None, feeds)
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 2, 6, 7, 7, 7])


def test_the_whole_context_is_served(tmp_path: Path) -> None:
    """Up to the last row of the table, in chunks."""
    case = checkpoints.Case(
        "opt", {**checkpoints.CASES["opt"].config, "max_position_embeddings": 40}
    )
    model = checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    token_ids = checkpoints.tokens(count=40)
    expected = checkpoints.logits(model, token_ids)
    for kind in ("gqa", "decomposed"):
        sequence = Graph(Artifact.read(path), kind).sequence()
        found = [sequence.step(part) for part in np.split(token_ids, [17, 39])]
        np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "prefix", "further"),
    [
        ("gpt2", "transformer.", ("h.0.attn.bias", "h.1.attn.masked_bias")),
        ("opt", "model.", ()),
    ],
)
def test_checkpoints_of_the_model_without_its_head(
    case: str, prefix: str, further: tuple[str, ...], tmp_path: Path
) -> None:
    """As gpt2 was published, with masks of attention, and OPT's first files."""
    whole, bare = tmp_path / "whole", tmp_path / "bare"
    model = checkpoints.make(checkpoints.CASES[case], whole)
    model.config.save_pretrained(bare)
    model.generation_config.save_pretrained(bare)
    tensors = {
        name.removeprefix(prefix): one
        for name, one in model.state_dict().items()
        if name != "lm_head.weight"
    }
    masks = {name: torch.ones(1, 1, 4, 4) for name in further}
    save_file({**tensors, **masks}, bare / "model.safetensors")
    options = ExportOptions(precision="fp32", threads=1)
    logits = [
        np.load(export_model(one, tmp_path / f"{one.name}-artifact", options) / "golden.npz")
        for one in (whole, bare)
    ]
    np.testing.assert_array_equal(logits[0]["logits"], logits[1]["logits"])


def test_a_bias_too_many_is_refused(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["opt-plain"], tmp_path)
    checkpoints.edit_config(tmp_path, enable_bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not any(name.endswith("fc1.bias") for name in tensors)
    with pytest.raises(CheckpointError, match=r"fc1\.bias|proj\.bias"):
        export_model(tmp_path, tmp_path / "artifact", ExportOptions(precision="fp32"))


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        *(("opt", "int8"), ("opt-350m", "int4"), ("gpt2", "int4"), ("gpt-bigcode", "fp16")),
        *(("gptj", "int4"), ("falcon", "int8"), ("falcon-new", "int4")),
    ],
)
def test_precisions(case: str, precision: str, tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES[case], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    check_golden(Artifact.read(path))
