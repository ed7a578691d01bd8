"""Adapters in GGUF files: what is read, and what is refused with which reason.

What llama.cpp's own converter writes is in `tests/published/test_converted_adapters.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from onnxport.cli.adapter_files import read_adapter as read_any
from onnxport.errors import AdapterError
from onnxport.exporter.families import FAMILIES as ALL_FAMILIES
from onnxport.exporter.gguf.adapter import read_adapter
from onnxport.exporter.gguf.adapter_modules import FAMILIES, modules_of
from onnxport.exporter.gguf.architectures import ARCHITECTURES
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.lora import projection_shapes
from onnxport.graphs.spec import ArchSpec
from tests.exporter.gguf_adapters import Tensors, tensors_of, write
from tests.graphs.artifacts import SPEC
from tests.graphs.test_linear_spec import BASE, CONV, SPACE
from tests.graphs.test_linear_spec import SPEC as DELTA_NETS

LLAMA = replace(SPEC, family="llama")
QWEN = replace(SPEC, family="qwen2")
LAYER_HEADS = (BASE.num_heads, *[BASE.num_kv_heads] * (BASE.num_layers - 1))
Q, DOWN = "blk.0.attn_q.weight", "blk.1.ffn_down.weight"


def test_every_architecture_has_families() -> None:
    """But for those whose models no provider adapts, and those whose adapters were never seen."""
    unseen = {"chatglm", "exaone", "internlm2", "minicpm", "mistral3", "qwen2vl", "qwen3vl"}
    unadapted = {"deepseek2", "gemma3n", "gemma4", "kimi-linear", "mimo2", "mistral4"}
    assert ARCHITECTURES.keys() - FAMILIES.keys() == unadapted | unseen
    assert ARCHITECTURES.keys() >= FAMILIES.keys()
    named = {family for families in FAMILIES.values() for family in families}
    assert named <= {one.name for one in ALL_FAMILIES}


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        ("llama", LLAMA),
        ("phi3", replace(SPEC, family="phi3")),
        ("gptneox", replace(SPEC, family="gpt_neox", ungated=True, hidden_act="gelu")),
        ("afmoe", replace(BASE, family="afmoe", attention_gate=True)),
        (
            "laguna",
            replace(
                BASE,
                family="laguna",
                attention_gate=True,
                head_gates=True,
                layer_heads=LAYER_HEADS,
            ),
        ),
        ("qwen35", replace(DELTA_NETS, family="qwen3_5_text")),
        ("qwen3next", replace(DELTA_NETS, family="qwen3_next")),
        ("granitehybrid", replace(BASE, family="granitemoehybrid", linear=SPACE)),
        ("lfm2", replace(BASE, family="lfm2", linear=CONV)),
        (
            "nemotron_h",
            replace(
                BASE,
                family="nemotron_h",
                linear=SPACE,
                ungated=True,
                hidden_act="relu2",
                mlp_layers=(True, False, True, False),
            ),
        ),
    ],
)
def test_tensors_have_all_projections_once(architecture: str, base: ArchSpec) -> None:
    """With as many rows and columns as the products of the graph have."""
    found = [
        (module.layer, name, rows, module.in_features)
        for module in modules_of(architecture, base).values()
        for name, rows in module.parts
    ]
    wanted = [
        (layer, name, *shape)
        for layer in range(base.num_layers)
        for name, shape in projection_shapes(base, layer).items()
    ]
    assert sorted(found) == sorted(wanted)


def test_rows_and_scaling(tmp_path: Path) -> None:
    tensors = tensors_of(LLAMA)
    deltas = read_adapter(write(tmp_path / "a.gguf", tensors), LLAMA).adapter.deltas
    assert len(deltas) == 7 * LLAMA.num_layers
    heads = tensors[f"{Q}.lora_b"].reshape(LLAMA.num_heads, -1, 4)
    halves = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1)  # of each head
    np.testing.assert_array_equal(deltas[0, "q_proj"].b, halves.reshape(-1, 4) * 2)
    np.testing.assert_array_equal(deltas[1, "down_proj"].b, tensors[f"{DOWN}.lora_b"] * 2)
    np.testing.assert_array_equal(deltas[1, "down_proj"].a, tensors[f"{DOWN}.lora_a"])


def test_rows_of_others_stay(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN)
    path = write(tmp_path / "a.gguf", tensors, general__architecture="qwen2")
    found = read_adapter(path, QWEN).adapter.deltas[0, "q_proj"]
    np.testing.assert_array_equal(found.b, tensors[f"{Q}.lora_b"] * 2)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_without_alpha_nothing_is_scaled(tmp_path: Path, alpha: float | None) -> None:
    tensors = tensors_of(LLAMA)
    path = write(tmp_path / "a.gguf", tensors, adapter__lora__alpha=alpha)
    found = read_adapter(path, LLAMA).adapter.deltas[1, "down_proj"]
    np.testing.assert_array_equal(found.b, tensors[f"{DOWN}.lora_b"])


def test_each_tensor_has_its_own_rank(tmp_path: Path) -> None:
    tensors = {name: one for name, one in tensors_of(LLAMA, 2).items() if name.startswith(DOWN)}
    tensors |= {name: one for name, one in tensors_of(LLAMA).items() if name.startswith(Q)}
    deltas = read_adapter(write(tmp_path / "a.gguf", tensors), LLAMA).adapter.deltas
    assert deltas.keys() == {(0, "q_proj"), (1, "down_proj")}
    np.testing.assert_array_equal(deltas[1, "down_proj"].b, tensors[f"{DOWN}.lora_b"] * 4)


def test_a_single_row_may_be_without_its_dimension(tmp_path: Path) -> None:
    """As ggml writes it, to which missing dimensions are of one."""
    tensors = tensors_of(LLAMA, 1)
    expected = read_adapter(write(tmp_path / "a.gguf", tensors), LLAMA).adapter.deltas
    for name in (f"{Q}.lora_a", f"{DOWN}.lora_a"):
        tensors[name] = tensors[name][0]
    tensors[f"{Q}.lora_b"] = tensors[f"{Q}.lora_b"][None]
    found = read_adapter(write(tmp_path / "b.gguf", tensors), LLAMA).adapter.deltas
    assert found.keys() == expected.keys()
    for key, delta in found.items():
        np.testing.assert_array_equal(delta.a, expected[key].a)
        np.testing.assert_array_equal(delta.b, expected[key].b)


def test_what_a_models_weights_are_multiplied_with(tmp_path: Path) -> None:
    """Granite's: what adapters add to those weights is, too."""
    base = replace(SPEC, family="granite")
    path = write(tmp_path / "a.gguf", tensors_of(base), general__architecture="granite")
    plain = read_adapter(path, base).adapter.deltas
    for key, delta in read_adapter(path, replace(base, residual_scale=0.25)).adapter.deltas.items():
        times = 0.25 if key[1] in ("o_proj", "down_proj") else 1
        np.testing.assert_array_equal(delta.b, plain[key].b * np.float32(times))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.BF16])
def test_types(tmp_path: Path, kind: Kind) -> None:
    tensors = tensors_of(LLAMA)
    name = f"{DOWN}.lora_a"
    path = write(tmp_path / "a.gguf", tensors, {name: kind})
    found = read_adapter(path, LLAMA).adapter.deltas[1, "down_proj"].a
    error = np.abs(found - tensors[name]).max() / np.abs(tensors[name]).max()
    assert 0 < error < 0.1


def test_what_is_for_people_changes_nothing(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "adapter__lora__task_name": "sql",
        "adapter__lora__prompt_prefix": "Translate:",
        "general__base_model__0__name": "Tiny",
    }
    plain = read_adapter(write(tmp_path / "a.gguf", tensors_of(LLAMA)), LLAMA)
    found = read_adapter(write(tmp_path / "b.gguf", tensors_of(LLAMA), **more), LLAMA)
    assert (plain.base_model, found.base_model) == (None, "Tiny")
    np.testing.assert_array_equal(
        found.adapter.deltas[0, "q_proj"].b, plain.adapter.deltas[0, "q_proj"].b
    )


def test_invocation_tokens(tmp_path: Path) -> None:
    key = "adapter__alora__invocation_tokens"
    path = write(tmp_path / "a.gguf", tensors_of(LLAMA), **{key: [5, 9, 5]})
    assert read_any(path, LLAMA).invocation == (5, 9, 5)
    assert read_any(write(tmp_path / "b.gguf", tensors_of(LLAMA)), LLAMA).invocation == ()


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"general__type": "model"}, "is no adapter: general.type is 'model'.*export it"),
        ({"general__type": None}, "is no adapter: general.type is 'model'"),
        ({"general__type": "imatrix"}, "is no adapter: general.type is 'imatrix', not 'adapter'$"),
        ({"adapter__type": "control"}, "adapter.type is 'control'; 'lora' can be served"),
        ({"adapter__type": None}, "adapter.type is None"),
        ({"general__architecture": "qwen2"}, "'qwen2', and that of this model, a llama, is 'llama"),
        ({"general__architecture": None}, "general.architecture is None"),
        ({"adapter__lora__alpha": "8"}, "alpha is '8', expected a finite number"),
        ({"adapter__lora__alpha": float("inf")}, "alpha is inf, expected a finite number"),
        ({"adapter__alora__invocation_tokens": 7}, "invocation_tokens is 7; it must be a list"),
        ({"adapter__alora__invocation_tokens": ["<a>"]}, r"invocation_tokens is \['<a>'\]; it "),
        ({"adapter__alora__invocation_tokens": [3, 9999]}, "tokens 0 to .*, not 9999; .* another"),
        ({"adapter__alora__tokens": [1]}, "might change .*: adapter.alora.tokens; known"),
        ({"adapter__lora__dora": 1}, "not known, and might change .*: adapter.lora.dora; known"),
        ({"split__count": 2}, "is one of 2 parts"),
    ],
)
def test_other_keys_are_refused(tmp_path: Path, meta: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "a.gguf", tensors_of(LLAMA), **meta)
    with pytest.raises(AdapterError, match=words):
        read_adapter(path, LLAMA)


def _renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): one for name, one in tensors.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_renamed(Q, "token_embd.weight"), "token_embd.weight; .*embeddings or the output"),
        (_renamed(Q, "output.weight"), "output.weight; .*embeddings or the output"),
        (_renamed("blk.1.", "blk.7."), r"blk.7.*a llama with blocks 0 to 1, .*blk.N.attn_q.weight"),
        (_renamed(Q, "blk.0.ffn_up_exps.weight"), "experts cannot be adapted"),
        (_renamed(f"{Q}.lora_a", f"{Q}.lora_c"), r"no matrices of LoRA: .*lora_c \[4, "),
        (lambda some: {**some, "blk.0.attn_norm.weight": some[f"{Q}.lora_a"][0]}, "Norms that"),
        (lambda some: {k: v for k, v in some.items() if k != f"{Q}.lora_a"}, "_q.* has b alone"),
        (lambda some: {}, "holds no tensors"),
        (lambda some: {**some, f"{Q}.lora_a": some[f"{Q}.lora_a"][:3]}, r"A \[3, .* B \[.*, 4\]"),
        (lambda some: {**some, f"{Q}.lora_a": some[f"{Q}.lora_a"][:, 1:]}, "another model: .*_q"),
        (lambda some: {**some, f"{Q}.lora_b": some[f"{Q}.lora_b"] * np.nan}, "not finite"),
        (lambda some: {**some, f"{Q}.lora_b": some[f"{Q}.lora_b"] * 0 + 3e38}, "scaled by 2"),
        (lambda some: {**some, f"{Q}.lora_b": some[f"{Q}.lora_b"][:, 0]}, "another model: .*_q"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(
    tmp_path: Path, change: Callable[[Tensors], Tensors], words: str
) -> None:
    path = write(tmp_path / "a.gguf", change(tensors_of(LLAMA)))
    with pytest.raises(AdapterError, match=words):
        read_adapter(path, LLAMA)


def test_experts_are_not_adapted_but_the_rest_of_their_layers_is(tmp_path: Path) -> None:
    experts = ExpertsSpec(count=4, per_token=2, size=32, normalized=True)
    base = replace(SPEC, family="mixtral", experts=experts)
    own = {name: one for name, one in tensors_of(LLAMA).items() if ".attn_" in name}
    deltas = read_adapter(write(tmp_path / "a.gguf", own), base).adapter.deltas
    assert {name for _, name in deltas} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(AdapterError, match=r"blk.0.ffn_down.weight, .*adapted are blk.N.attn_"):
        read_adapter(write(tmp_path / "b.gguf", tensors_of(LLAMA)), base)


def test_blocks_are_told_that_layers_are_made_of(tmp_path: Path) -> None:
    mlps = (True, False, True, False)[: BASE.num_layers]
    base = replace(BASE, family="nemotron_h", ungated=True, hidden_act="relu2", mlp_layers=mlps)
    tensors = {f"blk.99.attn_q.weight.lora_{part}": np.ones((2, 2), np.float32) for part in "ab"}
    path = write(tmp_path / "a.gguf", tensors, general__architecture="nemotron_h")
    with pytest.raises(AdapterError, match=f"blocks 0 to {len(mlps) + sum(mlps) - 1}, "):
        read_adapter(path, base)


def test_families_that_are_not_in_gguf_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", tensors_of(LLAMA))
    with pytest.raises(AdapterError, match="adapters of a helium are not read from GGUF files"):
        read_adapter(path, replace(SPEC, family="helium"))


def test_files_that_are_none(tmp_path: Path) -> None:
    for read in (read_adapter, read_any):  # what the system says
        with pytest.raises(AdapterError, match=r"cannot be read: .*too long"):
            read(tmp_path / f"{'a' * 300}.gguf", LLAMA)
    with pytest.raises(AdapterError, match="is not there, or is not a file"):
        read_adapter(tmp_path / "none.gguf", LLAMA)
    whole = write(tmp_path / "a.gguf", tensors_of(LLAMA)).read_bytes()
    (tmp_path / "b.gguf").write_bytes(whole[:-100])
    with pytest.raises(AdapterError, match=r"cannot be read: .*is truncated"):
        read_adapter(tmp_path / "b.gguf", LLAMA)
    (tmp_path / "c.gguf").write_bytes(b"PK" + whole)
    with pytest.raises(AdapterError, match="not a valid GGUF file"):
        read_adapter(tmp_path / "c.gguf", LLAMA)
