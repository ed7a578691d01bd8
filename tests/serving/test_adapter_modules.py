"""Modules of layers that keep a state, and of gated attention: their rows, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import AdapterError
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.lora import Projection, projection_shapes
from onnxport.graphs.lora_module import Module
from onnxport.graphs.spec import ArchSpec
from onnxport.serving.adapters.modules import modules_of
from onnxport.serving.adapters.peft import read_adapter
from tests.graphs.test_linear_spec import BASE, CONV, LINEAR, SPACE, SPEC
from tests.serving.adapting import Tensors, write_adapter

QWEN = replace(SPEC, family="qwen3_5_text")
NEXT = replace(SPEC, family="qwen3_next")
GRANITE = replace(BASE, family="granitemoehybrid", linear=SPACE)
NEMOTRON = replace(
    BASE,
    family="nemotron_h",
    linear=SPACE,
    ungated=True,
    hidden_act="relu2",
    mlp_layers=(True, False, True, False),
)
LFM2 = replace(BASE, family="lfm2", linear=CONV)
OLMO = replace(SPEC, family="olmo_hybrid", attention_gate=None)
AFMOE = replace(BASE, family="afmoe", attention_gate=True)
LAGUNA = replace(
    AFMOE,
    family="laguna",
    head_gates=True,
    layer_heads=(BASE.num_heads, *[BASE.num_kv_heads] * (BASE.num_layers - 1)),
)
EXPERTS = ExpertsSpec(count=4, per_token=2, size=32, normalized=True, shared_size=64)


def tensors_of(base: ArchSpec, parent: str = "model") -> Tensors:
    """Of every module that can be adapted."""
    rng, tensors = np.random.default_rng(0), Tensors()
    for name, module in modules_of(base).items():
        prefix = f"base_model.model.{parent}.{name}.lora_"
        tensors[f"{prefix}A.weight"] = rng.standard_normal((4, module.in_features), np.float32)
        tensors[f"{prefix}B.weight"] = rng.standard_normal((module.out_features, 4), np.float32)
    return tensors


@pytest.mark.parametrize(
    "base", [QWEN, NEXT, GRANITE, NEMOTRON, LFM2, AFMOE, LAGUNA, OLMO], ids=lambda b: b.family
)
def test_modules_have_all_projections_once(base: ArchSpec) -> None:
    """With as many rows as the products of the graph have."""
    found: dict[tuple[int, Projection], int] = {}
    for module in modules_of(base).values():
        for name, rows in module.parts:
            found[module.layer, name] = found.get((module.layer, name), 0) + rows
    wanted = {
        (layer, name): shape[0]
        for layer in range(base.num_layers)
        for name, shape in projection_shapes(base, layer).items()
    }
    assert found == wanted


def test_blocks_have_numbers_of_their_own() -> None:
    """A layer that is two blocks has two numbers."""
    assert [
        (name, module.layer)
        for name, module in modules_of(NEMOTRON).items()
        if name.endswith(("in_proj", "q_proj", "up_proj"))
    ] == [
        ("layers.0.mixer.in_proj", 0),
        ("layers.1.mixer.up_proj", 0),
        ("layers.2.mixer.in_proj", 1),
        ("layers.3.mixer.q_proj", 2),
        ("layers.4.mixer.up_proj", 2),
        ("layers.5.mixer.in_proj", 3),
    ]


@pytest.mark.parametrize(
    ("base", "name", "order"),
    [
        # heads of 2 rows: query and gate each
        (
            QWEN,
            "layers.2.self_attn.q_proj",
            {"q_proj": [0, 1, 4, 5], "attention_gate": [2, 3, 6, 7]},
        ),
        # of 2 key heads a query and a key of 1, and 3 values and gates
        (
            NEXT,
            "layers.0.linear_attn.in_proj_qkvz",
            {"linear_qkv": [0, 8, 1, 9, 2, 3, 4, 10, 11, 12], "linear_z": [5, 6, 7, 13, 14, 15]},
        ),
        (
            NEXT,
            "layers.0.linear_attn.in_proj_ba",
            {"linear_b": [0, 1, 2, 6, 7, 8], "linear_a": [3, 4, 5, 9, 10, 11]},
        ),
        (QWEN, "layers.0.linear_attn.in_proj_qkv", {"linear_qkv": [*range(10)]}),
        (
            LFM2,
            "layers.0.conv.in_proj",
            {"conv_before": [0, 1], "conv_behind": [2, 3], "conv_values": [4, 5]},
        ),
    ],
)
def test_rows_of_projections(base: ArchSpec, name: str, order: dict[str, list[int]]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 2, "num_heads": 2, "num_kv_heads": 1, "head_size": 2}
    rope = replace(base.rope, rotary_dim=2)
    linear = replace(CONV, channels=2)
    if base.attention_gate:
        linear = replace(LINEAR, key_size=1, value_size=1)  # type: ignore[assignment]
    small = replace(base, **sizes, rope=rope, linear=linear)
    module = modules_of(small)[name]
    rows = np.arange(module.out_features, dtype=np.float32)[:, None]
    found = module.by_projection(np.repeat(rows, 3, axis=1))
    assert {one: part[:, 0].tolist() for one, part in found.items()} == order
    assert {part.shape[1] for part in found.values()} == {3}


def test_queries_keys_and_values_of_states_are_joined(tmp_path: Path) -> None:
    """Each has low ranks of its own, which are those of their product one behind the other."""
    tensors, linear = tensors_of(OLMO), LINEAR
    write_adapter(tmp_path, tensors, lora_alpha=4, target_modules="all-linear")
    delta = read_adapter(tmp_path, OLMO).adapter.deltas[0, "linear_qkv"]
    assert (delta.a.shape, delta.b.shape) == ((12, OLMO.hidden_size), (linear.channels, 12))
    parts = []
    for one in ("q_proj", "k_proj", "v_proj"):
        prefix = f"base_model.model.model.layers.0.linear_attn.{one}.lora_"
        parts.append(tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"])
    np.testing.assert_allclose(delta.b @ delta.a, np.concatenate(parts), rtol=1e-5, atol=1e-5)


def test_parts_of_a_module_without_heads() -> None:
    module = Module(0, (("linear_z", 2), ("linear_mixed", 3), ("linear_dt", 1)), 7)
    found = module.by_projection(np.arange(6, dtype=np.float32)[:, None])
    assert [part[:, 0].tolist() for part in found.values()] == [[0, 1], [2, 3, 4], [5]]


@pytest.mark.parametrize(
    ("base", "parent"),
    [(QWEN, "model"), (QWEN, "model.language_model"), (NEMOTRON, "backbone"), (NEMOTRON, "model")],
)
def test_where_the_decoder_is(tmp_path: Path, base: ArchSpec, parent: str) -> None:
    write_adapter(tmp_path, tensors_of(base, parent), target_modules="all-linear")
    found = read_adapter(tmp_path, base).adapter.deltas
    assert len(found) == sum(len(projection_shapes(base, layer)) for layer in range(4))


def test_what_reads_images_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = tensors_of(QWEN, "model.language_model")
    for part in "AB":
        name = f"base_model.model.model.visual.blocks.0.attn.qkv.lora_{part}.weight"
        tensors[name] = np.ones((4, 4), np.float32)
    write_adapter(tmp_path, tensors, target_modules="all-linear")
    with caplog.at_level(logging.WARNING):
        read_adapter(tmp_path, QWEN)
    assert "adapts 1 modules that read images too; they are left out" in caplog.text


@pytest.mark.parametrize(
    ("base", "module", "shapes", "said"),
    [
        (
            QWEN,
            "layers.0.linear_attn.conv1d",
            ((4, 1, 3), (9, 4, 1)),
            "are no matrices of LoRA: .*conv1d",
        ),
        (
            QWEN,
            "layers.0.self_attn.q_proj",
            ((4, 8), (8, 4)),
            r"does not have .*layers\.0\.self_attn",
        ),
        (
            GRANITE,
            "layers.0.mamba.A_log",
            ((4, 8), (8, 4)),
            r"does not have .*layers\.0\.mamba\.A_log",
        ),
        (
            NEMOTRON,
            "layers.6.mixer.up_proj",
            ((4, 8), (8, 4)),
            r"does not have .*layers 0 to 5\).*layers\.6\.mixer",
        ),
        (
            LFM2,
            "layers.0.conv.conv",
            ((4, 1, 3), (9, 4, 1)),
            r"are no matrices of LoRA: .*conv\.conv",
        ),
        (
            replace(QWEN, family="qwen3_5_moe_text", experts=EXPERTS),
            "layers.0.mlp.gate",
            ((4, 8), (4, 4)),
            r"is beside experts cannot be adapted\): model\.layers\.0\.mlp\.gate",
        ),
        (
            replace(GRANITE, experts=EXPERTS),
            "layers.0.shared_mlp.input_linear",
            ((4, 8), (4, 4)),
            r"is beside experts cannot be adapted\): model\.layers\.0\.shared_mlp\.input",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(
    tmp_path: Path, base: ArchSpec, module: str, shapes: tuple[tuple[int, ...], ...], said: str
) -> None:
    tensors = tensors_of(base)
    for part, shape in zip("AB", shapes, strict=True):
        name = f"base_model.model.model.{module}.lora_{part}.weight"
        tensors[name] = np.ones(shape, np.float32)
    names = sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors})
    write_adapter(tmp_path, tensors, target_modules=names)
    with pytest.raises(AdapterError, match=said):
        read_adapter(tmp_path, base)


@pytest.mark.parametrize(
    ("base", "parent", "target", "adapted"),
    [
        (QWEN, "model", "lm_head", "in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj, gate"),
        (NEMOTRON, "backbone", "embeddings", "in_proj, out_proj, up_proj, down_proj, q_proj"),
        (LFM2, "model", "embed_tokens", "in_proj, out_proj, w1, w3, w2, q_proj, k_proj, v_proj"),
    ],
)
def test_heads_and_embeddings(
    tmp_path: Path, base: ArchSpec, parent: str, target: str, adapted: str
) -> None:
    write_adapter(tmp_path, tensors_of(base, parent), target_modules=["q_proj", target])
    with pytest.raises(AdapterError, match=f"targets .*{target}; only {adapted}.* can be adapted"):
        read_adapter(tmp_path, base)


def test_a_layer_that_lacks_a_target_is_incomplete(tmp_path: Path) -> None:
    tensors = tensors_of(GRANITE)
    for part in "AB":
        del tensors[f"base_model.model.model.layers.1.mamba.in_proj.lora_{part}.weight"]
    write_adapter(tmp_path, tensors, target_modules="all-linear")
    with pytest.raises(
        AdapterError, match=r"lacks tensors of 1 of the .*layers\.1\.mamba\.in_proj"
    ):
        read_adapter(tmp_path, GRANITE)
