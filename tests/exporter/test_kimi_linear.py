"""Kimi Linear: how its configurations read, what is refused, and what its graphs compute."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from onnxport.errors import ArtifactError, CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec, linear_from_json, linear_to_json
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.cpu.library import find_library
from tests.exporter import checkpoints, configs
from tests.exporter.checkpoints import KIMI
from tests.exporter.run_graphs import Graph, Kind, check_golden, greedy

LINEAR, FULL = "linear_attention", "full_attention"
KERNEL = find_library()
# As published, of eight layers.
CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
LISTS = CONFIG["linear_attn_config"]
# What a file may leave out.
DEFAULTS = (
    *("head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("moe_intermediate_size", "moe_renormalize", "num_expert_group", "topk_group"),
    *("num_experts", "num_experts_per_token", "num_shared_experts", "routed_scaling_factor"),
    *("first_k_dense_replace", "rope_theta", "mla_use_nope", "tie_word_embeddings"),
)
# What transformers writes of it.
WRITTEN = {
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 2,
    "linear_attn_config": None,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    "first_k_dense_replace": None,
    "head_dim": 64,
}


def test_the_published_model() -> None:
    spec = configs.read(CONFIG)
    assert (spec.family, spec.num_layers, spec.context_length) == ("kimi_linear", 8, 1048576)
    assert spec.linear == LinearAttentionSpec(
        key_heads=32,
        value_heads=32,
        key_size=128,
        value_size=128,
        kernel=4,
        layers=(True, True, True, False) * 2,
        gate_rank=128,
    )
    assert spec.latent == LatentSpec(kv_rank=512, nope_size=128, rope_size=64, value_size=128)
    assert (spec.num_kv_heads, spec.head_size, spec.attention_scale) == (1, 576, 1 / math.sqrt(192))
    assert (spec.rms_norm_eps, spec.inner_eps) == (1e-5, 1e-6)
    assert spec.cached_layers == (3, 7)
    assert (spec.ropes, spec.has_gqa_graph) == ((), False)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (256, 8, 1024)
    assert (experts.shared_size, experts.scale, experts.normalized) == (1024, 2.446, True)
    assert (experts.sigmoid, experts.corrected, experts.groups) == (True, True, None)
    assert experts.layers == (False, *[True] * 7)
    assert ArchSpec.from_json(spec.to_json()) == spec


def test_what_a_file_may_leave_out() -> None:
    wanted = configs.read(CONFIG)
    assert configs.read({key: one for key, one in CONFIG.items() if key not in DEFAULTS}) == wanted
    assert configs.read(CONFIG | WRITTEN) == wanted


def test_other_names_of_keys() -> None:
    others = {
        "max_position_embeddings": CONFIG["model_max_length"],
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "n_group": 1,
    }
    own = {"model_max_length", "num_experts", "num_experts_per_token", "num_shared_experts"}
    own |= {"moe_renormalize", "num_expert_group"}
    renamed = {key: one for key, one in CONFIG.items() if key not in own} | others
    assert configs.read(renamed) == configs.read(CONFIG)
    groups = configs.read(CONFIG | {"num_expert_group": 8, "topk_group": 4}).experts
    assert groups is not None
    assert (groups.groups, groups.groups_per_token, groups.group_best) == (8, 4, 2)


def test_every_fourth_layer_has_attention_where_nothing_is_told() -> None:
    """Behind the first one, as transformers counts."""
    linear = configs.read(CONFIG | {"linear_attn_config": None}).linear
    assert linear is not None
    assert [layer for layer, one in enumerate(linear.layers) if not one] == [4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False; supported is True"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate is True; supported is False"),
        ({"moe_router_activation_func": "softmax"}, "activation_func is 'softmax'; supported is"),
        ({"use_grouped_topk": False}, "use_grouped_topk is False"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1; supported is 0"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"num_local_experts": 64}, "num_experts is 256 and num_local_experts is 64"),
        ({"layer_types": [LINEAR] * 7 + [FULL]}, "linear_attn_config says"),
        ({"layer_types": [FULL] * 8, "linear_attn_config": None}, "all of the 8 layers are 'full"),
        ({"layer_types": [FULL, LINEAR]}, "supported are 8 entries"),
        ({"linear_attn_config": {**LISTS, "kda_layers": [1, 2]}}, "each number from 1 to 8 once"),
        ({"linear_attn_config": {**LISTS, "kda_layers": None}}, "lacks the key 'kda_layers'"),
        ({"linear_attn_config": {**LISTS, "gate_lower_bound": -5.0}}, "gate_lower_bound = -5.0"),
        ({"linear_attn_config": {**LISTS, "head_dim": 0}}, "key_size of linear attention must be"),
        ({"attn_res_block_size": 4}, "attn_res_block_size = 4"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        configs.read(CONFIG | changes)


def test_artifacts_of_before_have_no_rank_of_gates() -> None:
    linear = configs.read(CONFIG).linear
    assert linear is not None
    written = linear_to_json(linear)
    assert linear_from_json(written) == linear
    del written["gate_rank"]
    assert "gate_rank" not in linear_to_json(linear_from_json(written))
    with pytest.raises(ArtifactError, match="gate_rank of linear attention must be positive"):
        linear_from_json({**written, "gate_rank": 0})


@pytest.fixture(scope="module", params=KIMI)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Artifact]:
    folder = tmp_path_factory.mktemp(request.param)
    model = checkpoints.make(KIMI[request.param], folder / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(folder / "checkpoint", folder / "artifact", options)
    return model, Artifact.read(path)


@pytest.mark.parametrize("kind", ["decomposed", "custom"])
def test_the_graph_agrees(exported: tuple[PreTrainedModel, Artifact], kind: Kind) -> None:
    if kind == "custom" and KERNEL is None:
        pytest.skip("the C++ kernel was not built")
    model, artifact = exported
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(model, token_ids)
    assert np.ptp(expected) > 2  # logits that say something
    graph = Graph(artifact, kind, KERNEL)
    np.testing.assert_allclose(graph.logits(token_ids), expected, atol=1e-4)
    sequence = graph.sequence()
    chunked = [sequence.step(part) for part in np.split(token_ids, [9, 10, 23])]
    np.testing.assert_allclose(np.concatenate(chunked), expected, atol=1e-4)
    prompt = token_ids[:11]
    assert greedy(graph.sequence(), prompt, 8) == checkpoints.greedy(model, prompt, 8)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("kimi-linear", "int4"), ("kimi-linear-groups", "int8"), ("kimi-linear", "fp16")],
)
def test_other_precisions(name: str, precision: str, tmp_path: Path) -> None:
    checkpoints.make(KIMI[name], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    if precision != "int8":
        check_golden(artifact)
        return
    # ONNX Runtime's experts of 8 bits round what they read, too: tests/serving/test_verify_experts
    with np.load(artifact.path / "golden.npz") as golden:
        found = Graph(artifact, "split").logits(golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(found, golden["logits"], atol=1e-4)


def test_dense_layers_may_have_the_names_that_published_ones_have(tmp_path: Path) -> None:
    """Transformers calls them as experts are called, which it reads in either way."""
    source = tmp_path / "checkpoint"
    checkpoints.make(KIMI["kimi-linear"], source)
    options = ExportOptions(precision="fp32", threads=1)
    written = export_model(source, tmp_path / "written", options)
    tensors = load_file(source / "model.safetensors")
    names = {
        name: name.replace("block_sparse_moe", "mlp") if "layers.0." in name else name
        for name in tensors
    }
    assert len({name for name, other in names.items() if name != other}) == 3
    save_file({names[name]: one for name, one in tensors.items()}, source / "model.safetensors")
    published = export_model(source, tmp_path / "published", options)
    with np.load(written / "golden.npz") as one, np.load(published / "golden.npz") as other:
        np.testing.assert_array_equal(one["logits"], other["logits"])
