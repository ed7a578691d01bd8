"""HunYuan: how its configurations read, what of them is refused, and RoPE ahead of norms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled
from tests.exporter.run_graphs import start

# What is known of published files: no hub is at hand.
ALPHA: dict[str, Any] = {
    "alpha": 1000.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "type": "dynamic",
}
DENSE: dict[str, Any] = {
    "add_classification_head": False,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_head_dim": 128,
    "cla_share_factor": 2,
    "class_num": 0,
    "dense_list": [4096, 0],
    "eod_token_id": 127967,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "im_end_id": 5,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "mask_init_id": 12,
    "max_position_embeddings": 32768,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pad_id": 127961,
    "pool_type": "last",
    "rms_norm_eps": 1e-05,
    "rope_scaling": ALPHA,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "vocab_size": 128167,
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "architectures": ["HunYuanMoEV1ForCausalLM"],
    "intermediate_size": 3072,
    "model_type": "hunyuan_v1_moe",
    "moe_drop_tokens": False,
    "moe_intermediate_size": [3072] * 32,
    "moe_layer_num_skipped": 0,
    "moe_random_routing_dropped_token": False,
    "moe_topk": [8] * 32,
    "norm_topk_prob": True,
    "num_experts": 64,
    "num_shared_expert": [1] * 32,
    "use_mixed_mlp_moe": True,
}
BASE = 10_000.0 * 1000.0 ** (128 / 126)  # what alpha makes of it


@pytest.mark.parametrize("values", [DENSE, EXPERTS], ids=["7b", "a13b"])
def test_published_files_are_understood_in_both_spellings(values: dict[str, Any]) -> None:
    spec = read(values)
    assert (spec.qk_norm, spec.qk_norm_last, spec.head_size) == (True, True, 128)
    assert not any((spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.whole_qk_norm))
    assert (spec.rope.type, spec.rope.theta) == ("default", pytest.approx(BASE))
    assert read(respelled(values)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_experts_and_the_layer_beside_them_have_one_size() -> None:
    experts = read(EXPERTS).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (64, 8, 3072)
    assert (experts.shared_size, experts.normalized, experts.sigmoid) == (3072, True, None)
    one_number = {"moe_topk": 8, "moe_intermediate_size": 3072, "num_shared_expert": 1}
    assert read({**EXPERTS, **one_number}) == read(EXPERTS)


def test_without_alpha_rope_is_what_it_is_elsewhere() -> None:
    assert read({**DENSE, "rope_scaling": None}).rope.theta == 10_000.0
    grows = {"type": "dynamic", "factor": 2.0}
    assert read({**DENSE, "rope_scaling": grows}).rope.factor == 2.0
    theta = {"rope_theta": 500.0, "rope_scaling": {**ALPHA, "alpha": 8.0}}
    assert read({**DENSE, **theta}).rope.theta == pytest.approx(500 * 8 ** (128 / 126))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**DENSE, "use_qk_norm": False}, "use_qk_norm is False"),
        ({**DENSE, "use_cla": True}, "use_cla is True"),
        ({**DENSE, "norm_type": "layer"}, "norm_type is 'layer'"),
        ({**DENSE, "num_experts": 16}, "num_experts is 16"),
        ({**DENSE, "attention_head_dim": 64}, "attention_head_dim is 64"),
        ({**DENSE, "rope_scaling": {**ALPHA, "alpha": None}}, "beta_fast"),
        ({**DENSE, "rope_scaling": {**ALPHA, "type": "linear"}}, "alpha = 1000.0"),
        ({**DENSE, "rope_scaling": {**ALPHA, "ntk_factor": 2.0}}, "ntk_factor = 2.0"),
        ({**DENSE, "partial_rotary_factor": 0.5}, "64 of 128 channels"),
        ({**DENSE, "hidden_act": "gelu"}, "hidden_act"),
        ({**EXPERTS, "moe_topk": [8] * 31 + [4]}, "the same number for every layer"),
        ({**EXPERTS, "moe_topk": []}, "the same number for every layer"),
        ({**EXPERTS, "moe_intermediate_size": 1536}, "moe_intermediate_size is 1536"),
        ({**EXPERTS, "num_shared_expert": 2}, "num_shared_expert is 2"),
        ({**EXPERTS, "use_mixed_mlp_moe": False}, "use_mixed_mlp_moe is False"),
        ({**EXPERTS, "moe_layer_num_skipped": 1}, "moe_layer_num_skipped is 1"),
        ({**EXPERTS, "routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_would_change_the_result_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(values)
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**DENSE, "rope_scaling": {**ALPHA, "alpha": "8"}}, "alpha and rope_theta must be above"),
        ({**DENSE, "rope_scaling": {**ALPHA, "alpha": -1.0}}, "alpha and rope_theta must be above"),
        ({**DENSE, "head_dim": 2, "attention_head_dim": 2}, "more than 2 channels"),
        ({**EXPERTS, "moe_topk": ["8"] * 32}, "expected are whole numbers"),
        ({**EXPERTS, "num_experts_per_tok": 4}, "names of one number"),
        ({**EXPERTS, "moe_topk": 65}, "given to 65 experts, of 64"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_makes_no_sense(values: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(values)


def test_rows_of_a_batch_have_positions_of_their_own(tmp_path: Path) -> None:
    """Shorter ones first begin with the longest one, and then each goes on from its own end."""
    case = checkpoints.CASES["hunyuan"]
    model = checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    session, spec = start(artifact, "gqa"), artifact.manifest.model
    rows = [checkpoints.tokens(1, 9), checkpoints.tokens(2, 5)]
    ids = np.zeros((2, 8), np.int64)
    mask = np.zeros((2, 8), np.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row) - 1] = row[:-1]
        mask[at, : len(row) - 1] = 1
    names = [
        name
        for layer in range(spec.num_layers)
        for name in (contract.past_key(layer), contract.past_value(layer))
    ]
    outputs = [contract.LOGITS, *(name.replace("past_key_values", "present") for name in names)]
    empty = np.zeros((2, spec.num_kv_heads, 0, spec.head_size), np.float32)
    feeds = {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: mask} | dict.fromkeys(names, empty)
    first, *caches = session.run(outputs, feeds)
    for at, row in enumerate(rows):
        expected = checkpoints.logits(model, row[:-1])
        np.testing.assert_allclose(first[at, : len(row) - 1], expected, atol=1e-4)
    # The shorter row's cache ends where its own tokens do, so one step suffices for both.
    ids = np.array([[row[-1]] for row in rows])
    mask = np.concatenate([mask, [[1], [1]]], axis=1)
    mask[1] = np.arange(9) < 5
    later, *_ = session.run(
        outputs,
        {contract.INPUT_IDS: ids, contract.ATTENTION_MASK: mask}
        | dict(zip(names, caches, strict=True)),
    )
    for at, row in enumerate(rows):
        expected = checkpoints.logits(model, row)[-1]
        np.testing.assert_allclose(later[at, 0], expected, atol=1e-4)


def test_a_model_is_as_long_as_its_tables(tmp_path: Path) -> None:
    """Nothing rotates within attention, and the tables end with the context."""
    checkpoints.make(checkpoints.CASES["hunyuan"], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp16", threads=1, context_length=64)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    graph = artifact.load_graph("paged").graph
    attention = [node for node in graph.node if node.op_type == "PagedAttention"]
    assert len(attention) == 2
    for node in attention:
        rotates = {one.name: one.i for one in node.attribute}["do_rotary"]
        assert (rotates, [*node.input[8:10]]) == (0, ["", ""])
    tables = {one.name: [*one.dims] for one in graph.initializer if "rope" in one.name}
    assert tables == {"rope.cos": [64, 16], "rope.sin": [64, 16]}
    assert isinstance(start(artifact, "gqa"), ort.InferenceSession)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_norm": False}, "qk_norm is False"),
        ({"whole_qk_norm": True}, "whole_qk_norm is True"),
        ({"rotated_layers": (True, False)}, r"rotated_layers are \(True, False\)"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_does_not_go_with_norms_behind_rope(changes: dict[str, Any], message: str) -> None:
    spec = read({**DENSE, "num_hidden_layers": 2})
    with pytest.raises(ValueError, match=message):
        replace(spec, **changes)


def test_all_channels_rotate_ahead_of_norms() -> None:
    spec = read(DENSE)
    for changes in ({"rotary_dim": 64}, {"interleaved": True}):
        with pytest.raises(ValueError, match="all of 128 channels rotate, and no neighbours do"):
            replace(spec, rope=replace(spec.rope, **changes))
    window = (8, *[None] * 31)
    with pytest.raises(ValueError, match="one RoPE rotates all layers"):
        replace(spec, local_rope=replace(spec.rope, theta=5.0), sliding_window=window)
