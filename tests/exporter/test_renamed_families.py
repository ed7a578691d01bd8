"""Families that are Llama, Qwen2, StableLM or Granite by other names: the artifacts are the same.

Transformers has no class of most, or a new one. Names and keys are those of published files, which
vLLM and llama.cpp read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file

from onnxport.errors import AdapterError, CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import LoraAdapter
from onnxport.graphs.spec import ArchSpec
from onnxport.serving.adapters.modules import EXAONES, modules_of
from onnxport.serving.adapters.peft import read_adapter
from tests.exporter import checkpoints, ggufs
from tests.exporter.checkpoints import Case
from tests.exporter.configs import read
from tests.exporter.run_graphs import check_golden
from tests.serving.adapting import Tensors as Deltas
from tests.serving.adapting import write_adapter

FILES = ("model.onnx", "model_gqa.onnx", "model.onnx.data", "golden.npz")
Tensors = dict[str, torch.Tensor]


def _same(tensors: Tensors) -> Tensors:
    return tensors


def _by_key_heads(tensors: Tensors) -> Tensors:
    """InternLM2's one product: of each key head its queries, it, and its value."""
    found = dict(tensors)
    for name in [each for each in tensors if "q_proj" in each]:
        kinds = [found.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
        heads = [one.reshape(2, -1, 16, *one.shape[1:]) for one in kinds]  # 2 key heads of 16
        joined = torch.cat(heads, 1)
        found[name.replace("q_proj", "wqkv")] = joined.reshape(-1, *kinds[0].shape[1:])
    return found


@dataclass(frozen=True)
class Renamed:
    """A family, and what it is of another one."""

    architecture: str
    of: Case
    keys: Mapping[str, Any]  # of its configuration, None for those that it does not have
    names: Mapping[str, str] = field(default_factory=dict)  # parts of names of tensors, in order
    moved: Callable[[Tensors], Tensors] = _same

    def write(self, family: str, folder: Path) -> None:
        """Turn the checkpoint of the other one into its own."""
        model_type = {"model_type": family, "architectures": [self.architecture]}
        checkpoints.edit_config(folder, **model_type, **self.keys)
        tensors = self.moved(load_file(folder / "model.safetensors"))
        renamed = {}
        for name, one in tensors.items():
            for old, new in self.names.items():
                name = name.replace(old, new)
            renamed[name] = one
        save_file(renamed, folder / "model.safetensors")


LLAMA3: Mapping[str, Any] = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 32, "rope_theta": 500.0},
}
EXAONE_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "transformer.wte",
    "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn": "attn.attention",
    "o_proj": "out_proj",
    "gate_proj": "c_fc_0",
    "up_proj": "c_fc_1",
    "down_proj": "c_proj",
}
EXAONE = Renamed(
    "ExaoneForCausalLM",
    Case("llama", {"rms_norm_eps": 0.05, "rope_parameters": LLAMA3}, torch.bfloat16),
    {
        **{"num_layers": 2, "num_hidden_layers": None, "embed_dropout": 0.0},
        **{"layer_norm_epsilon": 0.05, "rms_norm_eps": None},
        **{"activation_function": "silu", "hidden_act": None},
        **{"rope_theta": 500.0, "rope_scaling": dict(LLAMA3), "rope_parameters": None},
    },
    EXAONE_NAMES,
)
INTERNLM2 = Renamed(
    "InternLM2ForCausalLM",
    Case("llama", {"rms_norm_eps": 0.05}, torch.bfloat16),
    {"bias": False, "attn_implementation": "eager", "attention_bias": None, "mlp_bias": None},
    {
        "lm_head": "output",
        "embed_tokens": "tok_embeddings",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attention_norm",
        "self_attn": "attention",
        "o_proj": "wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
    _by_key_heads,
)
FAMILIES: Mapping[str, Renamed] = {
    "exaone": EXAONE,
    "internlm2": INTERNLM2,
    "orion": Renamed(
        "OrionForCausalLM",
        Case(
            "stablelm",
            {
                **{"layer_norm_eps": 0.05, "use_parallel_residual": False},
                "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0},
            },
            torch.bfloat16,
        ),
        {
            **{"rms_norm_eps": 0.05, "layer_norm_eps": None, "use_parallel_residual": None},
            **{"use_qkv_bias": None, "qk_layernorm": None, "hidden_dropout": None},
            **{"partial_rotary_factor": None, "rope_parameters": {"rope_theta": 500.0}},
            "max_sequence_length": 128,
        },
    ),
    "minicpm": Renamed(
        "MiniCPMForCausalLM",
        Case(
            "granite",
            {
                **{"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "rms_norm_eps": 0.05},
                **{"logits_scaling": 2.0, "attention_multiplier": 0.25, "num_hidden_layers": 4},
                "tie_word_embeddings": True,
            },
            torch.bfloat16,
        ),
        {
            **{"scale_emb": 4, "scale_depth": 1.0, "dim_model_base": 32},
            **{"embedding_multiplier": None, "residual_multiplier": None},
            **{"logits_scaling": None, "attention_multiplier": None},
            "tie_word_embeddings": None,
        },
    ),
    "mimo": Renamed(
        "MiMoForCausalLM",
        Case("qwen2", {"rms_norm_eps": 0.05}, torch.bfloat16),
        {"attention_bias": True, "num_nextn_predict_layers": 1},
        moved=lambda tensors: {
            **tensors,
            "model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128),
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_artifact_is_that_of_the_other_family(family: str, tmp_path: Path) -> None:
    one, source = FAMILIES[family], tmp_path / "checkpoint"
    checkpoints.make(one.of, source)
    options = ExportOptions(precision="fp32", threads=1)
    expected = export_model(source, tmp_path / "expected", options)
    one.write(family, source)
    found = export_model(source, tmp_path / "found", options)
    assert Artifact.read(found).manifest.model.family == family
    for file in FILES[2:] if family == "minicpm" else FILES:  # whose scale of scores goes unsaid
        assert (found / file).read_bytes() == (expected / file).read_bytes()
    precise = ExportOptions(precision="int4", threads=1, group_size=32)
    check_golden(Artifact.read(export_model(source, tmp_path / "int4", precise)))


def test_biases_of_internlm2_lie_as_its_rows_do(tmp_path: Path) -> None:
    """Which models have whose file does not say `bias` is false."""
    source, options = tmp_path / "checkpoint", ExportOptions(precision="fp32", threads=1)
    biased = Case("llama", {"attention_bias": True, "tie_word_embeddings": True})
    checkpoints.make(biased, source)
    expected = export_model(source, tmp_path / "expected", options)
    replace(INTERNLM2, keys={**INTERNLM2.keys, "bias": None}).write("internlm2", source)
    found = export_model(source, tmp_path / "found", options)
    for file in FILES:
        assert (found / file).read_bytes() == (expected / file).read_bytes()


def test_exaone_by_the_names_of_its_class(tmp_path: Path) -> None:
    """Which transformers has of late: those of Llama, for keys too."""
    source, options = tmp_path / "checkpoint", ExportOptions(precision="fp32", threads=1)
    checkpoints.make(EXAONE.of, source)
    expected = export_model(source, tmp_path / "expected", options)
    own = replace(EXAONE, architecture="LlamaForCausalLM", keys={}, names={})
    own.write("exaone", source)
    found = export_model(source, tmp_path / "found", options)
    assert Artifact.read(found).manifest.model.family == "exaone"
    assert (found / "model.onnx.data").read_bytes() == (expected / "model.onnx.data").read_bytes()


def test_a_file_of_orion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, options = tmp_path / "checkpoint", ExportOptions(precision="fp32", threads=1)
    one = FAMILIES["orion"]
    checkpoints.make(one.of, source)
    one.write("orion", source)
    monkeypatch.setattr(ggufs, "ARCHITECTURES", {**ggufs.ARCHITECTURES, "orion": "orion"})
    monkeypatch.setattr(ggufs, "LAYER_NORMS", ("rms_norm_eps",))
    path = ggufs.write(source, tmp_path / "model.gguf")
    expected = export_model(source, tmp_path / "expected", options)
    found = export_model(path, tmp_path / "found", options)
    for file in FILES:
        assert (found / file).read_bytes() == (expected / file).read_bytes()


def configuration(family: str, **changes: Any) -> dict[str, Any]:
    """The file of a small model of a family."""
    one = FAMILIES[family]
    of = checkpoints.configuration(one.of).to_dict()
    own = {"model_type": family, "architectures": [one.architecture]}
    return {**{k: v for k, v in {**of, **own, **one.keys}.items() if v is not None}, **changes}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("exaone", {"num_hidden_layers": 3}, "num_layers is 2 and num_hidden_layers another"),
        ("exaone", {"activation_function": "gelu"}, "hidden_act is 'gelu'"),
        ("exaone", {"num_key_value_heads": None}, "lacks the key 'num_key_value_heads'"),
        ("exaone", {"logit_scale": 0.5}, "logit_scale"),
        ("internlm2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("internlm2", {"use_dynamic_ntk_rope": True}, "use_dynamic_ntk_rope"),
        ("orion", {"attention_bias": True}, "attention_bias"),
        ("minicpm", {"scale_depth": 0.0}, "scale_depth is 0.0"),
        ("minicpm", {"dim_model_base": None}, "lacks the key 'dim_model_base'"),
        ("minicpm", {"num_experts": 8}, "num_experts"),
        ("minicpm", {"hidden_act": "fatrelu"}, "hidden_act is 'fatrelu'"),
        ("mimo", {"attention_bias": False}, "attention_bias is False"),
    ],
)
def test_what_would_change_the_result_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    assert read(configuration(family)).family == family
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(configuration(family, **changes))


def test_the_fourth_minicpm_says_what_its_draft_heads_divide_by() -> None:
    values = configuration("minicpm")
    assert read({**values, "mup_denominator": 32}) == read(values)


def adapted(folder: Path, base: ArchSpec, parent: str = "model") -> LoraAdapter:
    """An adapter of every module, by the names of the file."""
    rng, tensors = np.random.default_rng(0), Deltas()
    for name, module in modules_of(base, parent).items():
        where = f"{parent}.{name.removeprefix('layers.') if parent == EXAONES else name}"
        shapes = {"A": (2, module.in_features), "B": (module.out_features, 2)}
        for part, shape in shapes.items():
            key = f"base_model.model.{where}.lora_{part}.weight"
            tensors[key] = rng.standard_normal(shape, np.float32)
    write_adapter(folder, tensors, r=2, lora_alpha=2, target_modules="all-linear")
    return read_adapter(folder, base).adapter


def test_adapters_of_exaone(tmp_path: Path) -> None:
    """By published names, and by those of transformers' class."""
    base = read(configuration("exaone"))
    own = adapted(tmp_path / "own", base, EXAONES)
    others = adapted(tmp_path / "others", base)
    assert own.deltas.keys() == others.deltas.keys()
    assert len(own.deltas) == 7 * base.num_layers
    tensors = load_numpy(tmp_path / "own" / "adapter_model.safetensors")
    more = write_adapter(tmp_path / "more", tensors, target_modules=["q_proj", "wte"])
    with pytest.raises(AdapterError, match=r"targets transformer\.wte"):
        read_adapter(more, base)


def test_adapters_of_internlm2(tmp_path: Path) -> None:
    """Whose B lies by key heads."""
    base = read(configuration("internlm2"))
    found = adapted(tmp_path, base)
    tensors = load_numpy(tmp_path / "adapter_model.safetensors")
    b = tensors["base_model.model.model.layers.0.attention.wqkv.lora_B.weight"]
    groups = b.reshape(2, 4, 16, 2)
    np.testing.assert_array_equal(found.deltas[0, "q_proj"].b, groups[:, :2].reshape(64, 2))
    np.testing.assert_array_equal(found.deltas[0, "k_proj"].b, groups[:, 2].reshape(32, 2))
    np.testing.assert_array_equal(found.deltas[0, "v_proj"].b, groups[:, 3].reshape(32, 2))
