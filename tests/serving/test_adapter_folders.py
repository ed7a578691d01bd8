"""PEFT's folders: what is read exactly, and what is refused with which reason."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import AdapterError
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.lora import (
    PROJECTIONS,
    LoraAdapter,
    LoraDelta,
    projection_shapes,
    projections_of,
)
from onnxport.serving.adapters.patterns import check_time
from onnxport.serving.adapters.peft import fingerprint, read_adapter
from tests.graphs.artifacts import SPEC
from tests.serving.adapting import (
    BFLOAT16,
    Tensors,
    module_name,
    random_tensors,
    tensor_name,
    write_adapter,
)
from tests.tiers import every

WIDER = replace(SPEC, intermediate_size=160, num_layers=12, sliding_window=(None,) * 12)


def product(tensors: Tensors, layer: int, name: str, scaling: float) -> Any:
    """What is added to a weight, computed in float64."""
    a, b = (tensors[tensor_name(layer, name, part)].astype(np.float64) for part in "AB")
    return scaling * b @ a


def check(folder: Path, tensors: Tensors, scaling: Callable[[int, str], float]) -> None:
    """Every delta is that of PEFT: B A times the scaling of its module."""
    found = read_adapter(folder, WIDER).adapter.deltas
    assert len(found) == len(tensors) / 2
    for (layer, name), delta in found.items():
        assert delta.a.dtype == delta.b.dtype == np.float32
        expected = product(tensors, layer, name, scaling(layer, name))
        np.testing.assert_allclose(delta.b @ delta.a, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("rslora", [False, True])
def test_all_projections(tmp_path: Path, dtype: Any, rslora: bool) -> None:
    tensors = random_tensors(WIDER, rank=8, targets=PROJECTIONS, dtype=dtype)
    write_adapter(
        tmp_path, tensors, r=8, lora_alpha=20, use_rslora=rslora, target_modules=[*PROJECTIONS]
    )
    scaling = 20 / math.sqrt(8) if rslora else 20 / 8
    check(tmp_path, tensors, lambda layer, name: scaling)
    assert read_adapter(tmp_path, WIDER).adapter.rank == 8


def test_what_a_models_weights_are_multiplied_with(tmp_path: Path) -> None:
    """Granite's: what adapters add to those weights is, too."""
    tensors = random_tensors(WIDER, rank=4, targets=PROJECTIONS)
    write_adapter(tmp_path, tensors, r=4, lora_alpha=8, target_modules=[*PROJECTIONS])
    plain = read_adapter(tmp_path, WIDER).adapter.deltas
    scaled = read_adapter(tmp_path, replace(WIDER, residual_scale=0.25)).adapter.deltas
    values = read_adapter(tmp_path, replace(WIDER, value_scale=0.5)).adapter.deltas
    for (layer, name), delta in values.items():
        times = 0.5 if name == "o_proj" else 1
        np.testing.assert_array_equal(delta.b, plain[layer, name].b * np.float32(times))
    # where norms behind them are scaled, they are not
    normed = replace(WIDER, residual_scale=0.25, output_norms=True)
    assert fingerprint(read_adapter(tmp_path, normed).adapter) == fingerprint(LoraAdapter(plain))
    for (layer, name), delta in scaled.items():
        times = 0.25 if name in ("o_proj", "down_proj") else 1
        np.testing.assert_array_equal(delta.b, plain[layer, name].b * np.float32(times))
        np.testing.assert_array_equal(delta.a, plain[layer, name].a)


def test_experts_are_not_adapted_but_the_rest_of_their_layers_is(tmp_path: Path) -> None:
    layers = (False,) + (True,) * 11
    experts = ExpertsSpec(count=4, per_token=2, size=32, normalized=True, layers=layers)
    base = replace(WIDER, experts=experts)
    named = [name for name in PROJECTIONS if name in projections_of(base, 1)]
    assert named == ["q_proj", "k_proj", "v_proj", "o_proj"]
    tensors = random_tensors(WIDER, rank=4, targets=PROJECTIONS)
    own = {
        name: tensor
        for name, tensor in tensors.items()
        if ".mlp." not in name or ".layers.0.mlp." in name
    }
    write_adapter(tmp_path, own, r=4, lora_alpha=8, target_modules=[*PROJECTIONS])
    deltas = read_adapter(tmp_path, base).adapter.deltas
    assert deltas.keys() == {(i, name) for i in range(12) for name in projections_of(base, i)}
    assert len(deltas) == 7 + 11 * 4
    write_adapter(tmp_path, tensors, r=4, lora_alpha=8, target_modules=[*PROJECTIONS])
    with pytest.raises(
        AdapterError, match="whose experts, routers and what is beside experts cannot be adapted"
    ):
        read_adapter(tmp_path, base)


GRANITE = {
    **{f"self_attn.{name}": (name,) for name in PROJECTIONS[:4]},
    "shared_mlp.input_linear": PROJECTIONS[4:6],
    "shared_mlp.output_linear": ("down_proj",),
}


@pytest.mark.parametrize("targets", ["each", "all-linear"])
def test_modules_of_granite_4(tmp_path: Path, targets: str) -> None:
    """Without experts its layer is the one that others have beside them, gate and up joined."""
    base = replace(WIDER, family="granitemoehybrid", residual_scale=0.5)
    shapes, rng = projection_shapes(base, 0), np.random.default_rng(0)
    tensors: Tensors = {}
    for layer in range(base.num_layers):
        for module, names in GRANITE.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}.lora_"
            height, width = sum(shapes[name][0] for name in names), shapes[names[0]][1]
            tensors[f"{prefix}A.weight"] = rng.standard_normal((4, width), np.float32)
            tensors[f"{prefix}B.weight"] = rng.standard_normal((height, 4), np.float32)
    named = [module.rpartition(".")[2] for module in GRANITE]
    target = named if targets == "each" else targets
    write_adapter(tmp_path, tensors, r=4, lora_alpha=8, target_modules=target)
    found = read_adapter(tmp_path, base).adapter.deltas
    assert found.keys() == {(i, name) for i in range(12) for name in PROJECTIONS}
    for layer in range(base.num_layers):
        for module, names in GRANITE.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}.lora_"
            whole = 2 * tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
            if names[0] in ("o_proj", "down_proj"):
                whole = whole * 0.5
            joined = np.concatenate([found[layer, name].b @ found[layer, name].a for name in names])
            np.testing.assert_allclose(joined, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "count"), [("phi3", 2), ("glm", 1), ("glm4", 1)])
def test_modules_that_compute_several_projections(tmp_path: Path, family: str, count: int) -> None:
    """Phi-3's and GLM's: each projection gets its rows of B, and A is shared."""
    base = replace(WIDER, family=family)
    rows = {name: shape[0] for name, shape in projection_shapes(base, 0).items()}
    modules = {"mlp.gate_up_proj": PROJECTIONS[4:6], "self_attn.qkv_proj": PROJECTIONS[:3]}
    parts = dict(list(modules.items())[:count])
    rng = np.random.default_rng(0)
    tensors: Tensors = {}
    for layer in range(base.num_layers):
        for module, names in parts.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}.lora_"
            height = sum(rows[name] for name in names)
            a = rng.standard_normal((4, base.hidden_size), np.float32)
            tensors |= {f"{prefix}A.weight": a}
            tensors |= {f"{prefix}B.weight": rng.standard_normal((height, 4), np.float32)}
    targets = ["gate_up_proj", "qkv_proj"][:count]
    write_adapter(tmp_path, tensors, r=4, lora_alpha=8, target_modules=targets)
    found = read_adapter(tmp_path, base).adapter.deltas
    assert len(found) == sum(map(len, parts.values())) * base.num_layers
    for layer in range(base.num_layers):
        for module, names in parts.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}.lora_"
            whole = 2 * tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
            deltas = [found[layer, name] for name in names]
            joined = np.concatenate([delta.b @ delta.a for delta in deltas])
            np.testing.assert_allclose(joined, whole, rtol=1e-4, atol=1e-5)
    write_adapter(tmp_path, tensors, r=4, target_modules=[*targets, "up_proj"])
    assert read_adapter(tmp_path, base).adapter.rank == 4  # it has no such module
    with pytest.raises(AdapterError, match="modules that the model does not have"):
        read_adapter(tmp_path, WIDER)


NEOX = {
    "attention.query_key_value": PROJECTIONS[:3],
    "attention.dense": ("o_proj",),
    "mlp.dense_h_to_4h": ("up_proj",),
    "mlp.dense_4h_to_h": ("down_proj",),
}
PHI = {
    **{f"self_attn.{name}": (name,) for name in PROJECTIONS[:3]},
    "self_attn.dense": ("o_proj",),
    "mlp.fc1": ("up_proj",),
    "mlp.fc2": ("down_proj",),
}
OPT = {
    **{f"self_attn.{name}": (name,) for name in PROJECTIONS[:3]},
    "self_attn.out_proj": ("o_proj",),
    "fc1": ("up_proj",),
    "fc2": ("down_proj",),
}
GPT2 = {
    "attn.c_attn": PROJECTIONS[:3],
    "attn.c_proj": ("o_proj",),
    "mlp.c_fc": ("up_proj",),
    "mlp.c_proj": ("down_proj",),
}
GPTJ = {
    **{f"attn.{name}": (name,) for name in PROJECTIONS[:3]},
    "attn.out_proj": ("o_proj",),
    "mlp.fc_in": ("up_proj",),
    "mlp.fc_out": ("down_proj",),
}
FALCON = {name.replace("attention.", "self_attention."): one for name, one in NEOX.items()}
EMBEDDINGS = {
    "falcon": "word_embeddings",
    "gpt_neox": "embed_in",
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), "wte"),
}
STARCODER = {
    **{f"self_attn.{name}": (name,) for name in PROJECTIONS[:4]},
    "mlp.c_fc": ("up_proj",),
    "mlp.c_proj": ("down_proj",),
}


@pytest.mark.parametrize("targets", ["each", "all-linear"])
@pytest.mark.parametrize(
    ("family", "parent", "modules"),
    [
        ("gpt_neox", "gpt_neox", NEOX),
        ("phi", "model", PHI),
        ("starcoder2", "model", STARCODER),
        ("opt", "model.decoder", OPT),
        ("gpt2", "transformer", GPT2),
        ("gpt_bigcode", "transformer", GPT2),
        ("gptj", "transformer", GPTJ),
        ("falcon", "transformer", FALCON),
    ],
)
def test_modules_of_families_that_have_no_gate(
    tmp_path: Path, family: str, parent: str, modules: dict[str, tuple[str, ...]], targets: str
) -> None:
    """Joined modules have of each head of keys its queries, key and value, but GPT-2's."""
    groups = {"falcon": WIDER.num_heads // 2, "gpt_bigcode": 1}.get(family, WIDER.num_heads)
    base = replace(WIDER, family=family, num_kv_heads=groups, hidden_act="gelu", ungated=True)
    layers = f"{parent}.h" if parent == "transformer" else f"{parent}.layers"
    shapes, rng = projection_shapes(base, 0), np.random.default_rng(0)
    tensors: Tensors = {}
    for layer in range(base.num_layers):
        for module, names in modules.items():
            prefix = f"base_model.model.{layers}.{layer}.{module}.lora_"
            height, width = sum(shapes[name][0] for name in names), shapes[names[0]][1]
            tensors[f"{prefix}A.weight"] = rng.standard_normal((4, width), np.float32)
            tensors[f"{prefix}B.weight"] = rng.standard_normal((height, 4), np.float32)
    named = [module.rpartition(".")[2] for module in modules]
    target = named if targets == "each" else targets
    write_adapter(tmp_path, tensors, r=4, lora_alpha=8, target_modules=target)
    found = read_adapter(tmp_path, base).adapter.deltas
    assert found.keys() == {(i, name) for i in range(12) for name in projections_of(base, i)}
    assert len(found) == 6 * 12
    for layer in range(base.num_layers):
        for module, names in modules.items():
            prefix = f"base_model.model.{layers}.{layer}.{module}.lora_"
            whole = 2 * tensors[f"{prefix}B.weight"] @ tensors[f"{prefix}A.weight"]
            if len(names) > 1 and family != "gpt2":
                size, shared = base.head_size, base.num_heads // groups * base.head_size
                parts = whole.reshape(groups, shared + 2 * size, -1)
                kinds = np.split(parts, [shared, shared + size], axis=1)
                whole = np.concatenate([one.reshape(-1, whole.shape[1]) for one in kinds])
            joined = np.concatenate([found[layer, name].b @ found[layer, name].a for name in names])
            np.testing.assert_allclose(joined, whole, rtol=1e-4, atol=1e-5)
    embedding = EMBEDDINGS.get(family, "embed_tokens")
    write_adapter(tmp_path, tensors, r=4, target_modules=[*named, embedding])
    with pytest.raises(AdapterError, match=rf"targets {parent}\.{embedding}; only .* can be"):
        read_adapter(tmp_path, base)


def test_what_has_no_gate_has_no_adapter_of_one(tmp_path: Path) -> None:
    base = replace(WIDER, hidden_act="relu2", ungated=True)
    tensors = random_tensors(WIDER, rank=4, targets=PROJECTIONS)
    write_adapter(tmp_path, tensors, r=4, target_modules=[*PROJECTIONS])
    with pytest.raises(AdapterError, match=r"modules that the model does not have.*gate_proj"):
        read_adapter(tmp_path, base)


PARENTS = ("model.language_model", "language_model.model")


def of_model_that_reads_images(tensors: Tensors, parent: str) -> Tensors:
    """As PEFT saves adapters of such a model."""
    old = "base_model.model.model."
    return {
        f"base_model.model.{parent}.{name.removeprefix(old)}": one for name, one in tensors.items()
    }


@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj"], r".*language_model.*\.(q_proj|v_proj)", "all-linear"]
)
def test_adapters_of_models_that_read_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parent: str, targets: Any
) -> None:
    names = PROJECTIONS if targets == "all-linear" else ("q_proj", "v_proj")
    tensors = random_tensors(WIDER, targets=names)
    plain = write_adapter(tmp_path / "text", tensors, target_modules=list(names))
    moved = of_model_that_reads_images(tensors, parent)
    folder = write_adapter(tmp_path / "whole", moved, target_modules=targets)
    found = read_adapter(folder, WIDER)
    assert found.fingerprint == read_adapter(plain, WIDER).fingerprint
    assert not caplog.messages
    seen = "model." if parent.startswith("model.") else ""
    for part, shape in (("A", (4, 24)), ("B", (24, 4))):
        name = f"{seen}vision_tower.encoder.layers.0.self_attn.q_proj.lora_{part}.weight"
        moved[f"base_model.model.{name}"] = np.ones(shape, np.float32)
    write_adapter(folder, moved, target_modules=targets)
    assert read_adapter(folder, WIDER).fingerprint == found.fingerprint
    assert "adapts 1 modules that read images too; they are left out" in caplog.text


@pytest.mark.parametrize("parent", PARENTS)
def test_what_is_refused_of_models_that_read_images(tmp_path: Path, parent: str) -> None:
    moved = of_model_that_reads_images(random_tensors(WIDER), parent)
    head = "language_model.lm_head" if parent == PARENTS[1] else "lm_head"
    write_adapter(tmp_path, moved, target_modules=["q_proj", "v_proj", "lm_head"])
    with pytest.raises(AdapterError, match=f"targets {head}; only q_proj"):
        read_adapter(tmp_path, WIDER)
    write_adapter(tmp_path, moved | random_tensors(WIDER))
    with pytest.raises(AdapterError, match="modules that the model does not have"):
        read_adapter(tmp_path, WIDER)
    of_images = {
        name.replace(f"{parent}.layers", "vision_tower.layers"): one for name, one in moved.items()
    }
    write_adapter(tmp_path, of_images)
    with pytest.raises(AdapterError, match="nothing but modules that read images"):
        read_adapter(tmp_path, WIDER)


@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_of_ranks_and_alphas(tmp_path: Path, rslora: bool) -> None:
    # Of layer 1 alone, not of 11; the first pattern that fits counts.
    ranks = {r"layers\.1\.self_attn\.q_proj": 2, "q_proj": 6, "roj": 99}
    alphas = {"self_attn.v_proj": 3, "model.layers.2.self_attn.q_proj": 1.5}
    tensors = random_tensors(WIDER, rank=4, targets=["v_proj"])
    tensors |= random_tensors(WIDER, rank=6, targets=["q_proj"])
    tensors |= random_tensors(WIDER, rank=2, targets=["q_proj"], layers=[1])
    write_adapter(tmp_path, tensors, rank_pattern=ranks, alpha_pattern=alphas, use_rslora=rslora)

    def scaling(layer: int, name: str) -> float:
        rank = 4 if name == "v_proj" else 2 if layer == 1 else 6
        alpha = 3 if name == "v_proj" else 1.5 if layer == 2 else 8
        return alpha / (math.sqrt(rank) if rslora else rank)

    check(tmp_path, tensors, scaling)


@pytest.mark.parametrize(
    ("config", "targets", "layers"),
    [
        ({"layers_to_transform": [0, 10]}, ("q_proj", "v_proj"), (0, 10)),
        ({"layers_to_transform": 3, "layers_pattern": "layers"}, ("q_proj", "v_proj"), (3,)),
        ({"layers_to_transform": []}, ("q_proj", "v_proj"), None),
        ({"target_modules": "all-linear"}, PROJECTIONS, None),
        ({"target_modules": r"model\.layers\.\d\.mlp\..*"}, PROJECTIONS[4:], range(10)),
        ({"target_modules": ["layers.7.mlp.up_proj"]}, ("up_proj",), (7,)),
        ({"exclude_modules": ["v_proj"]}, ("q_proj",), None),
        ({"exclude_modules": r".*\.[1-9]\d*\..*"}, ("q_proj", "v_proj"), (0,)),
        ({"target_modules": ["q_proj", "wq", "c_attn"]}, ("q_proj",), None),
        ({"target_modules": r"(?i).*\.(Q_PROJ|v_proj)"}, ("q_proj", "v_proj"), None),
        (
            {"layers_to_transform": [1], "layers_pattern": "(layers|h)"},
            ("q_proj", "v_proj"),
            (1,),
        ),
    ],
)
def test_which_modules_are_adapted(
    tmp_path: Path, config: dict[str, Any], targets: tuple[str, ...], layers: Any
) -> None:
    tensors = random_tensors(WIDER, targets=targets, layers=layers)
    write_adapter(tmp_path, tensors, **config)
    check(tmp_path, tensors, lambda layer, name: 2.0)
    more = random_tensors(WIDER, targets=PROJECTIONS)
    if len(tensors) < len(more):  # one more pair would not be used
        name = next(each for each in more if each not in tensors)
        pair = [each for each in more if each.startswith(name[: name.index("lora_")])]
        write_adapter(tmp_path, tensors | {each: more[each] for each in pair}, **config)
        with pytest.raises(AdapterError, match="does not target"):
            read_adapter(tmp_path, WIDER)
    del tensors[next(iter(tensors))], tensors[next(iter(tensors))]
    if tensors:  # one fewer is missing
        write_adapter(tmp_path, tensors, **config)
        with pytest.raises(AdapterError, match="lacks tensors of 1 of"):
            read_adapter(tmp_path, WIDER)


def test_what_changes_nothing_is_taken(tmp_path: Path) -> None:
    write_adapter(
        tmp_path,
        lora_dropout=0.5,
        inference_mode=False,
        task_type=None,
        init_lora_weights="gaussian",
        megatron_core="megatron.core",
        loftq_config={},
        peft_version="0.30.0",
        fan_in_fan_out=True,
        something_new=None,
        something_newer=False,
        something_newest=[],
    )
    first = read_adapter(tmp_path, SPEC)
    assert first.base_model == "example/tiny"
    write_adapter(tmp_path, base_model_name_or_path=None)
    second = read_adapter(tmp_path, SPEC)
    assert second.base_model is None
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_is_of_what_is_computed(tmp_path: Path) -> None:
    def of(tensors: Tensors | None = None, **config: Any) -> str:
        return read_adapter(write_adapter(tmp_path, tensors, **config), SPEC).fingerprint

    tensors = random_tensors()
    changed = {name: value.copy() for name, value in tensors.items()}
    changed[tensor_name(1, "v_proj", "A")][0, 0] += 1
    one_layer = {"layers_to_transform": [0]}
    names = [
        of(),
        of(changed),
        of(lora_alpha=12),
        of(use_rslora=True),
        of(alpha_pattern={"v_proj": 4}),
        of(random_tensors(layers=[0]), **one_layer),
    ]
    assert len(set(names)) == len(names)
    delta = LoraDelta(np.ones((2, 128), np.float32), np.ones((128, 2), np.float32))
    where: Any = [(0, "q_proj"), (1, "q_proj"), (0, "o_proj")]
    assert len({fingerprint(LoraAdapter({one: delta})) for one in where}) == 3
    assert of(lora_alpha=8.0) == of(tensors) == names[0]
    assert of(lora_alpha=16) == of(use_rslora=True)  # 16 / 4 and 8 / sqrt(4)


@pytest.mark.parametrize(
    "config",
    every(
        4,
        [
            {"target_modules": r"(.*)*X"},
            {"exclude_modules": r"((.*\.?)*q_proj)*X"},
            {"rank_pattern": {r"(.*)*X": 4}},
            {"alpha_pattern": {r"(.*.*)*X": 4}},
            {"layers_to_transform": [0], "layers_pattern": r"(.*)*X"},
            {"target_modules": ".?" * 40 + "X"},
            {"target_modules": r"(?:\w|.)" * 28 + "X"},
        ],
    ),
)
def test_an_expression_that_takes_for_ever_is_refused(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stop every thread of the process."""
    monkeypatch.setattr(check_time, "__defaults__", (1.0,))
    write_adapter(tmp_path, **config)
    with pytest.raises(AdapterError, match="regular expressions take more than 1 s"):
        read_adapter(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"peft_type": ...}, "peft_type is None"),
        ({"use_dora": True}, r"use_dora is true.*export the merged model"),
        ({"lora_bias": True}, "lora_bias is true, and may be null"),
        ({"bias": "all"}, 'bias is "all", and may be "none" or null'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save.*replaces whole layers"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.0"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "changes the base model's weights"),
        ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": 1}, "init_lora_weights is 1"),
        ({"use_qalora": True, "use_dora": True}, "use_dora is true.*; use_qalora is true"),
        ({"alora_invocation_tokens": "<a>"}, "tokens is '<a>'; it must be a list of token ids"),
        ({"alora_invocation_tokens": 5}, "alora_invocation_tokens is 5; it must be a list"),
        ({"alora_invocation_tokens": [5, True]}, r"is \[5, True\]; it must be a list"),
        ({"alora_invocation_tokens": [5, -1]}, r"is \[5, -1\], .* tokens 0 to .*, not -1"),
        ({"alora_invocation_tokens": [5, 10**6]}, "not 1000000; the adapter was made for another"),
        ({"alora_invocation_tokens": [5] * 1001}, "has 1001 tokens; at most 1000"),
        ({"invocation_string": "<a>"}, 'invocation_string is "<a>", .* write alora_inv'),
        ({"something_new": 3}, "something_new is 3, and may be null"),
        ({"r": ...}, "r is null; it must be an integer of at least 1"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is true"),
        ({"lora_alpha": "8"}, 'lora_alpha is "8"; it must be a finite number'),
        ({"lora_alpha": math.inf}, "lora_alpha is Infinity"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000.*must be a finite number"),
        ({"alpha_pattern": {"v_proj": -(10**400)}}, "alpha_pattern"),
        ({"base_model_name_or_path": {"a": 1}}, "base_model_name_or_path.*a text or null"),
        ({"use_rslora": 1}, "use_rslora is 1; it must be true or false"),
        ({"rank_pattern": {"v_proj": 0}}, "rank_pattern"),
        ({"rank_pattern": {"(": 2}}, r"'\(' is not a regular expression"),
        ({"alpha_pattern": ["v_proj"]}, "alpha_pattern.*an object of patterns"),
        ({"rank_pattern": {"a" * 1001: 2}}, "1001 characters"),
        ({"target_modules": None}, "target_modules is null"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": "*"}, "not a regular expression"),
        ({"target_modules": "a)|(b"}, "not a regular expression"),
        ({"target_modules": ".*q_proj)|(?:.*v_proj"}, "not a regular expression"),
        ({"target_modules": "(" * 5000 + ")" * 5000}, "10000 characters"),
        ({"target_modules": "(" * 499 + ")" * 499}, "not a regular expression"),
        ({"rank_pattern": {"x{99999999999}": 2}}, "not a regular expression"),
        ({"layers_to_transform": [0], "layers_pattern": "layers)|(h"}, "not a regular expression"),
        ({"target_modules": ".*_proj", "layers_to_transform": [0]}, "layers_to_transform"),
        ({"layers_to_transform": ["0"]}, "a layer's number"),
        ({"target_modules": ["lm_head", "q_proj"]}, "targets lm_head; only q_proj"),
        ({"target_modules": ".*"}, r"targets model\.embed_tokens, lm_head"),
        ({"target_modules": ["q_proj"]}, r"does not target: .*\.v_proj"),
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, r"lacks tensors of 2 of the 6"),
        ({"r": 16}, r"another rank than.*A \[4, 128\] and B \[128, 4\], not rank 16"),
        ({"lora_alpha": 1e39}, "not once they are scaled"),
    ],
)
def test_what_the_configuration_may_not_say(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    write_adapter(tmp_path, **config)
    with pytest.raises(AdapterError, match=words) as found:
        read_adapter(tmp_path, SPEC)
    assert str(tmp_path) in str(found.value)


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return change


A0, B0 = (tensor_name(0, "q_proj", part) for part in "AB")


def test_names_may_be_the_models_own(tmp_path: Path) -> None:
    """As some write them who train without PEFT, and vLLM reads them."""
    tensors = random_tensors()
    bare = {name.removeprefix("base_model.model."): one for name, one in tensors.items()}
    assert bare.keys().isdisjoint(tensors)
    whole = read_adapter(write_adapter(tmp_path / "a", tensors), SPEC)
    found = read_adapter(write_adapter(tmp_path / "b", bare), SPEC)
    assert found.fingerprint == whole.fingerprint
    folder = write_adapter(tmp_path / "c", tensors | {name: bare[name] for name in list(bare)[:1]})
    with pytest.raises(AdapterError, match=r"holds tensors twice, with base_model\.model"):
        read_adapter(folder, SPEC)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(A0), r"lacks the other half of a pair: .*layers\.0.*q_proj has B alone"),
        (lambda t: t.pop(B0), "q_proj has A alone"),
        (renamed(A0, "lora_A.weight"), "no matrices of LoRA: lora_A.weight"),
        (renamed(A0, A0.replace("lora_A", "lora_A.default")), "no matrices of LoRA"),
        (renamed(A0, A0.replace(".weight", ".bias")), "no matrices of LoRA"),
        (lambda t: t.update({A0: t[A0][0]}), r"no matrices of LoRA: .* \[128\]"),
        (lambda t: t.update(magnitude=t[A0]), "no matrices of LoRA: magnitude"),
        (lambda t: t.update({A0: t[A0].astype(np.float64)}), "F64; F32, F16, BF16 can"),
        (lambda t: t.update({A0: t[A0][:, :100].copy()}), "takes 100 features and gives 128"),
        (lambda t: t.update({B0: t[B0][:64].copy()}), "gives 64, the model's takes 128"),
        (lambda t: t.update({A0: t[A0][:2].copy()}), r"A \[2, 128\] and B \[128, 4\], not rank 4"),
        (lambda t: t.update({B0: t[B0] * np.float32(np.nan)}), "not finite"),
        (lambda t: t.update({A0: t[A0] * np.float32(np.inf)}), "not finite"),
        (
            lambda t: t.update(random_tensors(WIDER, layers=[2])),
            r"modules that the model does not have \(this model is a llama with layers 0 to 1\): "
            r".*layers\.2",
        ),
        (
            lambda t: [renamed(n, n.replace("q_proj", "qkv_proj"))(t) for n in [*t] if "q_pr" in n],
            "does not have.*qkv_proj",
        ),
        (lambda t: [t.pop(name) for name in [*t] if "layers.1" in name], "another model"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_what_the_tensors_may_not_be(
    tmp_path: Path, change: Callable[[Tensors], object], words: str
) -> None:
    tensors = random_tensors()
    change(tensors)
    write_adapter(tmp_path, tensors)
    with pytest.raises(AdapterError, match=words) as found:
        read_adapter(tmp_path, SPEC)
    assert str(tmp_path) in str(found.value)


def test_another_model(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    with pytest.raises(AdapterError, match=rf"{module_name(0, 'q_proj')} takes 128 features"):
        read_adapter(tmp_path, replace(SPEC, hidden_size=256))
    with pytest.raises(AdapterError, match=r"or was made for another model .*layers 0 to 2"):
        read_adapter(tmp_path, replace(SPEC, num_layers=3, sliding_window=(None,) * 3))


def test_a_module_named_in_full_is_adapted_in_whatever_layer(tmp_path: Path) -> None:
    tensors = random_tensors(WIDER, targets=["v_proj"], layers=[1])
    tensors |= random_tensors(WIDER, targets=["q_proj"], layers=[0])
    targets = [module_name(0, "q_proj"), "v_proj"]
    write_adapter(tmp_path, tensors, target_modules=targets, layers_to_transform=[1])
    check(tmp_path, tensors, lambda layer, name: 2.0)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_is_not_read(tmp_path: Path, name: str) -> None:
    """Which would never end."""
    write_adapter(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(AdapterError, match="it is not a file"):
        read_adapter(tmp_path, SPEC)


def test_folders_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AdapterError, match=r"cannot be read|has to be downloaded first"):
        read_adapter(tmp_path / ("x" * 300), SPEC)

    def forbidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", forbidden)
    with pytest.raises(AdapterError, match=r"cannot be read: .*Permission denied"):
        read_adapter(tmp_path, SPEC)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="has to be downloaded first"):
        read_adapter(tmp_path / "someone" / "adapter", SPEC)
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        read_adapter(tmp_path, SPEC)
    config = write_adapter(tmp_path) / "adapter_config.json"
    weights = tmp_path / "adapter_model.safetensors"
    good = weights.read_bytes()
    for damaged in (b"", good[:100], good[:-1], b"version https://git-lfs.github.com/spec/v1"):
        weights.write_bytes(damaged)
        with pytest.raises(AdapterError, match="not a valid safetensors file"):
            read_adapter(tmp_path, SPEC)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"it holds adapter_model\.bin: save it as safetensors"):
        read_adapter(tmp_path, SPEC)
    for text in ("{", "[]", "[" * 100_000, "\ud800"):
        config.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(AdapterError, match=r"cannot be read|must hold a JSON object"):
            read_adapter(tmp_path, SPEC)
    config.unlink()
    config.mkdir()
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("name", "words"), [("a", "has to be downloaded first"), ("a.gguf", r"adapter_files\.read_")]
)
def test_what_is_no_folder(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(AdapterError, match=rf"{name} is not a folder here; .*{words}"):
        read_adapter(tmp_path / name, SPEC)


def test_it_says_what_it_was_trained_on(tmp_path: Path) -> None:
    fields = json.loads((write_adapter(tmp_path) / "adapter_config.json").read_text())
    assert read_adapter(tmp_path, SPEC).base_model == fields["base_model_name_or_path"]
