"""Models with state spaces: the reference is transformers', and what configurations mean.

Graphs run in `test_hybrid_graphs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx.helper import get_node_attr_value
from transformers.models.bamba import modeling_bamba as peer

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.export import export_model
from onnxport.exporter.families import FAMILIES, nemotron_h
from onnxport.exporter.linear_reference import state_space
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.linear_spec import StateSpaceSpec
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.state_slots import use_state_slots
from tests.exporter import checkpoints, configs
from tests.exporter.checkpoints import SPACES

TOKENS = 150  # more than two chunks of transformers'
FLOAT32 = 1


@pytest.mark.parametrize("name", SPACES)
def test_the_numpy_reference_agrees(name: str, tmp_path: Path) -> None:
    model = checkpoints.make(SPACES[name], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    with np.load(path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        assert np.ptp(expected) > 2  # logits that say something
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 1), (6, 3)])
def test_long_sequences(heads: int, groups: int) -> None:
    space = StateSpaceSpec(
        heads=heads,
        head_size=12,
        groups=groups,
        state_size=16,
        kernel=4,
        conv_bias=False,
        layers=(True, False),
    )
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> Any:
        return random.standard_normal(shape).astype(np.float32)

    values = numbers(TOKENS, heads, 12)
    given, taken = numbers(2, TOKENS, groups, 16)
    steps = random.uniform(0.0, 0.5, (TOKENS, heads)).astype(np.float32)
    rate = -random.uniform(0.0, 0.2, heads).astype(np.float32)  # so that memory is long
    found = state_space(space, values * steps[..., None], given, taken, np.exp(steps * rate))
    inputs = (torch.from_numpy(one)[None] for one in (values, steps))
    both = (torch.from_numpy(one)[None] for one in (given, taken))
    expected = peer.mamba2_chunk_scan(*inputs, torch.from_numpy(rate), *both, chunk_size=64)
    np.testing.assert_allclose(found, expected[0].numpy(), atol=1e-4)


@pytest.mark.parametrize("name", SPACES)
def test_transformers_own_files_are_understood(name: str, tmp_path: Path) -> None:
    """Infinity, too, that limits nothing."""
    case = SPACES[name]
    config = checkpoints.configuration(case)
    config.architectures = [one.architecture for one in FAMILIES if one.name == case.family]
    config.save_pretrained(tmp_path)
    spec = configs.spec_of(Config.read(tmp_path))
    kinds = [one for one in config.layers_block_type if one != "mlp"]
    assert spec.linear_layers == tuple(
        i for i, one in enumerate(kinds) if "linear" in one or one == "hybrid"
    )
    written = json.loads(config.to_json_string(use_diff=False))
    again = configs.read({key: one for key, one in written.items() if key != "_name_or_path"})
    assert again == spec


# What is known of published files: no hub is at hand.
GRANITE: dict[str, Any] = {  # Granite-4.0-H-Tiny
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "init_method": "mup",
    "initializer_range": 0.1,
    "intermediate_size": 512,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "output_router_logits": False,
    "pad_token_id": 100256,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.0001,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0",
    "use_cache": True,
    "vocab_size": 100352,
}
BAMBA: dict[str, Any] = {  # Bamba-9B-v2
    "architectures": ["BambaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27],
    "attn_rotary_emb": 64,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "model_type": "bamba",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 128256,
    "z_loss_coefficient": 0.0,
}


NEMOTRON: dict[str, Any] = {  # Nemotron Nano 9B v2
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 12,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "initializer_range": 0.02,
    "intermediate_size": 15680,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 80,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 40,
    "num_hidden_layers": 56,
    "num_key_value_heads": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
PATTERN = NEMOTRON["hybrid_override_pattern"]
BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def test_granite_4() -> None:
    spec = configs.read(GRANITE)
    assert spec.cached_layers == (5, 15, 25, 35)
    assert spec.linear is not None
    assert (spec.linear.conv_state, spec.linear.recurrent_state) == ((3328, 3), (48, 64, 128))
    assert spec.rotated_layers == (False,) * 40
    assert (spec.rms_norm_eps, spec.inner_eps) == (1e-5 / 144, 1e-5)
    assert spec.experts is not None
    sizes = (spec.experts.count, spec.experts.per_token, spec.experts.size)
    assert (sizes, spec.experts.shared_size) == ((64, 6, 512), 1024)
    assert configs.read({**GRANITE, "time_step_limit": [0.0, float("inf")]}) == spec
    written = {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert configs.read(GRANITE | written) == spec
    assert configs.read({**GRANITE, "position_embedding_type": None}) == spec


def test_granite_4_without_experts_or_state_spaces() -> None:
    dense = configs.read({**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0})
    assert (dense.experts, dense.intermediate_size) == (None, 1024)
    plain = {**GRANITE, "layer_types": ["attention"] * 40, "position_embedding_type": "rope"}
    spec = configs.read(plain)
    assert (spec.linear, spec.rotated_layers) == (None, None)


def test_bamba() -> None:
    spec = configs.read(BAMBA)
    assert spec.cached_layers == (9, 18, 27)
    assert spec.linear is not None
    assert (spec.linear.conv_state, spec.linear.recurrent_state) == ((8448, 3), (128, 64, 128))
    assert (spec.rope.rotary_dim, spec.head_size, spec.rotated_layers) == (64, 128, None)
    kinds = [layer not in (9, 18, 27) for layer in range(32)]
    for key in ("layer_types", "layers_block_type"):
        for space, other in (("mamba", "attention"), ("linear_attention", "full_attention")):
            named = {key: [space if one else other for one in kinds]}
            assert configs.read(BAMBA | named) == spec


@pytest.mark.parametrize("part", [0.5, 0.25])
def test_how_much_of_bambas_heads_rotates(part: float) -> None:
    """What is at the top transformers overwrites."""
    told = {} if part == 0.5 else {"rope_parameters": {"partial_rotary_factor": part}}
    plain = {key: one for key, one in BAMBA.items() if key != "attn_rotary_emb"} | told
    rope = configs.respelled({**plain, "partial_rotary_factor": 0.75})["rope_parameters"]
    assert rope["partial_rotary_factor"] == part
    spec = configs.read(plain)
    assert spec.rope.rotary_dim == 128 * part
    assert configs.read({**plain, "partial_rotary_factor": part}) == spec
    with pytest.raises(CheckpointError, match=f"partial_rotary_factor is 0.75, .* with {part}"):
        configs.read({**plain, "partial_rotary_factor": 0.75})


def test_nemotron_h() -> None:
    spec = configs.read(NEMOTRON)
    assert (spec.num_layers, spec.cached_layers) == (31, (8, 12, 17, 22))
    assert spec.mlp_layers is not None
    assert [layer for layer in range(31) if not spec.has_mlp(layer)] == [3, 7, 11, 16, 21, 24]
    assert (spec.ungated, spec.hidden_act, spec.intermediate_size) == (True, "relu2", 15680)
    assert spec.linear is not None
    assert spec.linear.conv_state == (128 * 80 + 2 * 8 * 128, 3)
    assert spec.linear.recurrent_state == (128, 80, 128)
    assert spec.rotated_layers == (False,) * 31
    assert spec.experts is None
    plain = {key: one for key, one in NEMOTRON.items() if "pattern" not in key}
    for key in ("layers_block_type", "layer_types"):
        assert configs.read({**plain, key: [BLOCKS[one] for one in PATTERN]}) == spec
    assert configs.read({**NEMOTRON, "num_hidden_layers": None}) == spec
    assert configs.read({**NEMOTRON, "norm_eps": 1e-5}) == spec


def test_older_names_of_nemotron_h() -> None:
    """By which transformers reads first."""
    names = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"}
    names |= {"use_conv_bias": "mamba_conv_bias", "chunk_size": "mamba_chunk_size"}
    names |= {"expand": "mamba_expand", "time_step_limit": "mamba_dt_limit"}
    names |= {"time_step_min": "mamba_dt_min", "time_step_max": "mamba_dt_max"}
    names |= {"time_step_floor": "mamba_dt_init_floor"}
    changed = {**NEMOTRON, "n_groups": 4, "conv_kernel": 3, "use_conv_bias": False}
    older = {names.get(key, key): one for key, one in changed.items()}
    assert configs.respelled(older) == configs.respelled(changed)
    assert configs.read(older) == configs.read(changed)
    assert configs.read(changed | {names[key]: changed[key] for key in names}) == configs.read(
        changed
    )


def test_blocks_are_layers_in_their_order() -> None:
    """The tensors of a layer have the numbers of its blocks."""
    spec = configs.read({**NEMOTRON, "hybrid_override_pattern": "MM-*-*", "num_hidden_layers": 6})
    assert spec.mlp_layers == (False, True, True, False)
    plan = plan_weights(spec, nemotron_h.FAMILY.tensors)
    blocks = {
        role: plan.vectors[role].tensor
        for role in plan.vectors
        if role.endswith(("input_norm", "post_norm"))
    }
    assert blocks == {
        "layers.0.input_norm": "backbone.layers.0.norm.weight",
        "layers.1.input_norm": "backbone.layers.1.norm.weight",
        "layers.1.post_norm": "backbone.layers.2.norm.weight",
        "layers.2.input_norm": "backbone.layers.3.norm.weight",
        "layers.2.post_norm": "backbone.layers.4.norm.weight",
        "layers.3.input_norm": "backbone.layers.5.norm.weight",
    }
    assert "layers.0.up" not in plan.matrices
    (part,) = plan.matrices["layers.2.up"].parts
    assert part.tensor == "backbone.layers.4.mixer.up_proj.weight"


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GRANITE, {"layer_types": ["mamba"] * 40}, "none of the 40 layers has attention"),
        (GRANITE, {"layer_types": None}, "none of the 40 layers has attention"),
        (GRANITE, {"layer_types": ["mamba"] * 39}, "supported are 40 entries"),
        (GRANITE, {"layer_types": ["rwkv"] * 40}, "supported are 40 entries"),
        (GRANITE, {"layer_types": [["mamba"]] * 40}, "supported are 40 entries"),
        (GRANITE, {"layers_block_type": ["mamba"] * 40}, "which are names of one list"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        (GRANITE, {"normalization_function": "layernorm"}, "supported is 'rmsnorm'"),
        (GRANITE, {"mamba_proj_bias": True}, "mamba_proj_bias is true; supported is false"),
        (GRANITE, {"time_step_limit": [0.001, 0.1]}, r"time_step_limit is \[0.001, 0.1\]"),
        (GRANITE, {"time_step_limit": [0.0]}, r"time_step_limit is \[0.0\]"),
        (GRANITE, {"time_step_limit": [0.0, {"__float__": ["Infinity"]}]}, "time_step_limit is"),
        (GRANITE, {"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit is"),
        (GRANITE, {"mamba_d_head": 32}, "48 heads .* of 32 .* are not .* = 3072"),
        (GRANITE, {"mamba_d_head": "wide"}, "48 heads .* of 'wide'"),
        (GRANITE, {"mamba_n_groups": 5}, "heads 48 of state spaces are no multiple of groups 5"),
        (GRANITE, {"mamba_d_conv": 1}, "kernel of state spaces must be above 1"),
        (GRANITE, {"mamba_dt_min": 0.1}, "mamba_dt_min = 0.1"),
        (GRANITE, {"embedding_multiplier": 0}, "embedding_multiplier is 0.0; it must be above 0"),
        (GRANITE, {"embedding_multiplier": 1e300}, "is 1e.300; it must be above 0, and a float32"),
        (BAMBA, {"attn_layer_indices": [32]}, "must have numbers of the 32 layers, from 0"),
        (BAMBA, {"attn_layer_indices": [True]}, "must have numbers of the 32 layers, from 0"),
        (BAMBA, {"attn_layer_indices": []}, "none of the 32 layers has attention"),
        (BAMBA, {"attn_rotary_emb": 128}, "attn_rotary_emb is 128, and transformers rotates 64"),
        (BAMBA, {"layer_types": ["full_attention"] * 32}, "which differ"),
        (BAMBA, {"layer_types": [["mamba"]] * 32}, "which differ"),
        (BAMBA, {"layer_types": ["mamba"] * 31}, "which differ"),
        (BAMBA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (NEMOTRON, {"hybrid_override_pattern": "-" + PATTERN[1:]}, "is behind an M .* or a \\*"),
        (NEMOTRON, {"hybrid_override_pattern": "M--*" * 14}, "is behind an M .* or a \\*"),
        (NEMOTRON, {"hybrid_override_pattern": "*-" * 28}, "some are M"),
        (NEMOTRON, {"hybrid_override_pattern": "M-" * 28}, "none of the 28 layers has attention"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*X" * 14}, "a hybrid_override_pattern of M, "),
        (NEMOTRON, {"hybrid_override_pattern": None}, "the blocks are not named"),
        (NEMOTRON, {"layers_block_type": ["mamba"] * 56}, "contradicts itself: blocks are"),
        (NEMOTRON, {"num_hidden_layers": 55}, "num_hidden_layers is 55"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported is 'relu2'"),
        (NEMOTRON, {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, and .* is 1e-05"),
        (NEMOTRON, {"norm_eps": 1e-6}, "norm_eps is 1e-06, and .* is 1e-05"),
        (NEMOTRON, {"mamba_n_groups": 4}, "n_groups is 8 and mamba_n_groups is 4, and are names"),
        (NEMOTRON, {"mamba_dt_limit": [0.001, 0.1]}, r"mamba_dt_limit is \[0.001, 0.1\]"),
        (NEMOTRON, {"attention_head_dim": 64}, "attention_head_dim is 64.0, and .* is 128"),
        (NEMOTRON, {"use_bias": True}, "use_bias is true; supported is false"),
        (NEMOTRON, {"attention_bias": True}, "attention_bias = true"),
        (NEMOTRON, {"sliding_window": 512}, "sliding_window = 512"),
        (NEMOTRON, {"time_step_limit": [0.001, float("inf")]}, "time_step_limit is"),
    ],
)
def test_what_would_change_the_result_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        configs.read({**config, **changes})


@pytest.mark.parametrize("precision", ["int4", "fp32"])
def test_what_is_stored(precision: str, tmp_path: Path) -> None:
    """Whatever activations are, steps and what goes past states are as exact as they were."""
    checkpoints.make(SPACES["granite-4"], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    artifact = Artifact.read(
        export_model(tmp_path / "checkpoint", tmp_path / "artifact", options), verify="sha256"
    )
    stored = json.loads((artifact.path / "manifest.json").read_text())["model"]["linear"]
    assert (stored["kind"], stored["layers"]) == ("state_space", [True, True, False, True])
    for kind in ("paged", "gqa"):
        graph = artifact.load_graph(kind).graph
        types = {one.name: one.data_type for one in graph.initializer}
        for name in ("a_log", "dt_bias", "skip", "norm"):
            (found,) = {
                one for key, one in types.items() if key.startswith(f"layers.0.linear.{name}.")
            }
            assert found == FLOAT32
        activations = FLOAT32 if precision == "fp32" else 10
        assert types["layers.0.linear.dt.weight"] == activations


@pytest.mark.parametrize("precision", ["int4", "fp32"])
def test_operators_on_slots_take_steps_in(precision: str, tmp_path: Path) -> None:
    """Of ONNX Runtime's Softplus a sequence has other bits in a batch."""
    checkpoints.make(SPACES["nemotron-h"], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    artifact = Artifact.read(path)
    wide = retype(artifact.load_graph("paged"), artifact.read_tensor).model
    nodes = use_state_slots(wide).model.graph.node
    assert "Softplus" not in {node.op_type for node in nodes}
    taken = [node for node in nodes if node.op_type == "GatedDeltaNet"]
    assert [get_node_attr_value(node, "steps") for node in taken] == [1, 1, 1]


@pytest.mark.parametrize(("name", "count"), [("granite-4", 0), ("nemotron-h", 0), ("bamba", 2)])
def test_where_nothing_rotates_there_are_no_tables(name: str, count: int, tmp_path: Path) -> None:
    checkpoints.make(SPACES[name], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp16", threads=1)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    for kind in ("paged", "gqa"):
        graph = artifact.load_graph(kind).graph
        assert sum(one.name.startswith("rope.") for one in graph.initializer) == count
    assert len(artifact.manifest.model.ropes) == count / 2


@pytest.mark.parametrize("name", ["granite-4", "granite-4-dense"])
def test_a_granite_4_without_its_head_embeds(name: str, tmp_path: Path) -> None:
    """Experts' names would tell what others are called, and there may be none."""
    model = checkpoints.make(SPACES[name], tmp_path / "checkpoint")
    model.base_model.save_pretrained(tmp_path / "base")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "base", tmp_path / "artifact", options)
    assert Artifact.read(path).manifest.embedding is not None
