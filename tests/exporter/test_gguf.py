"""Artifacts of GGUF files are those of the checkpoints that these were made of."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils

from onnxport.errors import CheckpointError, ExportError
from onnxport.exporter import weights
from onnxport.exporter.export import export_model
from onnxport.exporter.gguf.checkpoint import GgufCheckpoint
from onnxport.exporter.gguf.shard import GgufShard
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.providers.cpu.library import find_library
from onnxport.providers.features import Attention
from tests.exporter import checkpoints, ggufs
from tests.exporter.run_graphs import Graph
from tests.providers.models import opened, run_rows
from tests.tiers import every

DEMO = Path(__file__).parents[2] / "demo" / "model"
FILES = ("model.onnx", "model_gqa.onnx", "model.onnx.data", "golden.npz")
SAME = (
    *("arcee", "arcee-biases", "gpt-neox", "gpt-neox-turns", "nemotron", "nemotron-biases"),
    *("phi", "phi-mha", "stablelm", "stablelm-parallel", "starcoder2", "starcoder2-plain"),
    *("afmoe", "cohere", "cohere2", "deepseek-v2", "deepseek-v2-lite"),
    *("deepseek-v3", "ernie-moe", "exaone4", "exaone-moe", "hunyuan-biases", "minimax-m2", "olmo3"),
    *("falcon", "falcon-new", "falcon-new-norm", "gpt2", "gpt2-plain", "gpt-bigcode"),
    *("granite-swa", "granitemoe-swa", "granitemoe-swa-plain", "jais2", "jais2-plain"),
    *("lfm2", "lfm2-biases", "lfm2-moe", "lfm2-moe-uncorrected"),
    *("dots1", "ernie", "ernie-biases", "gemma", "gemma2", "gemma3", "gemma3-linear", "glm4-moe"),
    *("gpt-oss", "granite", "granitemoe", "granitemoeshared", "llama", "llama-mha"),
    *("llama-mqa-biases", "llama-tied", "llama-one-layer", "llama-linear", "llama-yarn"),
    *(
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmoe",
        "phi3",
        "phi3-longrope",
        "phi3-window",
        "qwen2",
    ),
    *("qwen2-moe", "qwen2-ragged", "qwen3", "qwen3-biases", "qwen3-moe", "seed-oss", "smollm3"),
)
YARN: Mapping[str, Any] = {**checkpoints.LATENT_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707}
# So that blocks are of one value head each.
HEADS: Mapping[str, Any] = {"linear_value_head_dim": 32, "linear_num_value_heads": 4}
# What GGUF files do not say, and llama.cpp knows of the models that were published.
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "granite-swa": {
        "layer_rope_theta": [500.0, 500.0, 0, 500.0],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "granitemoe-swa": {"layer_rope_theta": [0, 10_000.0]},
    "arcee-biases": {"hidden_act": "relu2"},
    "gpt-neox-turns": {"hidden_act": "gelu"},
    "phi-mha": {"hidden_act": "gelu_new"},
    "starcoder2": {"sliding_window": None},
    "afmoe": {"mup_enabled": True},
    "cohere2": {
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "deepseek-v2": {"rope_parameters": YARN},
    "deepseek-v2-lite": {"n_group": 1, "topk_group": 1},
    "deepseek-v3": {"rope_parameters": YARN},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "lfm2-moe-uncorrected": {"norm_topk_prob": True, "tie_embedding": True},
    "dots1": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
    "gemma3-linear": {
        "query_pre_attn_scalar": 16,
        "attention_bias": False,
        "num_hidden_layers": 6,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10_000.0,
    },
    "gpt-oss": {"swiglu_limit": 7.0},
    "mixtral": {"sliding_window": None},
    "qwen3-moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
}


def case(name: str) -> checkpoints.Case:
    """A case of the parity tests, as a GGUF file can have it."""
    found = {**checkpoints.CASES, **checkpoints.HYBRID, **checkpoints.SHORT_CONV}[name]
    return replace(found, config={**found.config, **KNOWN.get(name, {})})


@pytest.mark.parametrize("name", every(3, SAME))
def test_the_artifact_is_that_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoints.make(case(name), tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf")
    check_same(tmp_path / "checkpoint", path, tmp_path, context_length=case(name).context_length)


def check_same(source: Path, path: Path, folder: Path, **options: Any) -> None:
    """Both are exported, and make the same artifact."""
    chosen = ExportOptions(**{"precision": "fp32", "threads": 2, **options})
    expected = export_model(source, folder / "expected", chosen)
    found = export_model(path, folder / "found", chosen)
    for file in FILES:
        if (expected / file).exists():  # of some models there is one graph alone
            assert (found / file).read_bytes() == (expected / file).read_bytes()


def test_products_of_latents_in_blocks(tmp_path: Path) -> None:
    """Those of keys lie across, and blocks are of a latent's numbers of one head."""
    one = case("deepseek-v3-halves")
    sizes = {"qk_nope_head_dim": 32, "rope_interleave": True, "n_shared_experts": 1}
    one = replace(one, config={**one.config, **sizes}, shards=False)
    checkpoints.make(one, tmp_path / "checkpoint")

    def pick(name: str, values: NDArray[np.float32]) -> Kind:
        return Kind.Q8_0 if name.endswith(("attn_k_b.weight", "attn_v_b.weight")) else Kind.F32

    extra = {"deepseek2.expert_gating_func": 2}
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", pick, extra=extra)
    weights_path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(weights_path)
    for name in [each for each in tensors if each.endswith("kv_b_proj.weight")]:
        both = tensors[name].numpy().reshape(4, -1, one.config["kv_lora_rank"])
        k, v = rounded(both[:, :32].swapaxes(1, 2)).swapaxes(1, 2), rounded(both[:, 32:])
        joined = np.concatenate([k, v], axis=1).reshape(tensors[name].shape)
        tensors[name] = torch.from_numpy(joined)
    save_file(tensors, weights_path)
    check_same(tmp_path / "checkpoint", path, tmp_path)


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What blocks of Q8_0 make of numbers."""
    stored = gguf.quants.quantize(np.ascontiguousarray(values), Kind.Q8_0)
    found: NDArray[np.float32] = gguf.quants.dequantize(stored, Kind.Q8_0)
    return found


@pytest.mark.parametrize(
    ("kind", "kept_in"), [(Kind.Q8_0, "int8"), (Kind.Q4_1, "int4"), (Kind.F16, None)]
)
def test_value_heads_in_another_order(tmp_path: Path, kind: Kind, kept_in: str | None) -> None:
    """Blocks of their columns are kept, and move with them."""
    one = case("qwen3.5")
    checkpoints.make(replace(one, config=one.config | HEADS), tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", kind)
    logits, quantized = {}, kept_in or "int8"
    for source in (tmp_path / "checkpoint", path):
        for precision in ("fp32", quantized):
            options = ExportOptions(precision=precision, threads=2, group_size=32)
            if precision == "int4":  # whose head and embedding have no minima
                options = replace(options, head_precision="fp16")
            made = export_model(source, tmp_path / f"{source.name}-{precision}", options)
            with np.load(made / "golden.npz") as golden:
                logits[source == path, precision] = golden["logits"]
    expected = logits[False, "fp32"]
    for precision in ("fp32", quantized):
        error = np.abs(logits[True, precision] - expected).mean() / np.abs(expected).mean()
        assert error < (1 if kept_in == "int4" else 0.08)
    kept = np.abs(logits[True, quantized] - logits[True, "fp32"]).mean() / np.abs(expected).mean()
    assert (kept < 0.02) == (kept_in is not None)  # of what is in blocks already


def test_decays_of_states(tmp_path: Path) -> None:
    """Files have what others have the logarithm of, and its sign turned."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3next")
    decays = -np.exp(np.array([-3.0, 0.5, 2.0], np.float32))
    writer.add_tensor("blk.0.ssm_a", decays)
    writer.add_tensor("blk.1.ssm_a", np.array([-1.0, 0.0, -2.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufCheckpoint([GgufShard(tmp_path / "model.gguf")], {}) as found:
        np.testing.assert_allclose(found.read("blk.0.ssm_a"), [-3.0, 0.5, 2.0], rtol=1e-6)
        with pytest.raises(
            CheckpointError, match=r"blk\.1\.ssm_a has numbers that are not below 0"
        ):
            found.read("blk.1.ssm_a")


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.F32])
def test_panels_may_end_inside_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    checkpoints.make(checkpoints.CASES["llama-mha"], tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", kind)
    monkeypatch.setattr(weights, "_PANEL_ELEMENTS", 7 * 64)
    check_same(tmp_path / "checkpoint", path, tmp_path)


@pytest.mark.parametrize("context", [64, 65, 128])
def test_factors_of_the_context(tmp_path: Path, context: int) -> None:
    """Phi-3's long ones beyond its original context."""
    checkpoints.make(checkpoints.CASES["phi3-longrope"], tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf")
    check_same(tmp_path / "checkpoint", path, tmp_path, context_length=context)


@pytest.mark.parametrize(("name", "layers"), [("exaone-moe", 3), ("glm4-moe", 3), ("qwen3.5", 4)])
def test_layers_behind_the_last_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, layers: int
) -> None:
    folder = tmp_path / "checkpoint"
    checkpoints.make(case(name), folder)
    architecture = {"exaone-moe": name, "glm4-moe": "glm4moe"}.get(name, "qwen35")
    extra: dict[str, Any] = {f"{architecture}.block_count": layers + 1}
    extra[f"{architecture}.nextn_predict_layers"] = 1
    first = gguf.GGUFWriter.write_header_to_file
    further = f"blk.{layers}.nextn.eh_proj.weight"

    def with_one_more(self: gguf.GGUFWriter, path: Path | None = None) -> None:
        self.add_tensor(further, np.ones((64, 128), np.float32))
        first(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_one_more)
        path = ggufs.write(folder, tmp_path / "model.gguf", extra=extra)
    if architecture == "qwen35":  # whose decays differ by a rounding
        export_model(path, tmp_path / "artifact", ExportOptions(precision="fp32", threads=2))
    else:
        check_same(folder, path, tmp_path)
    assert f"such as {further}) of what guesses tokens" in caplog.text


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q6_K])
def test_a_scale_that_is_no_number(tmp_path: Path, kind: Kind) -> None:
    path = made(tmp_path, kind, **WIDE)
    (tensor,) = [one for one in gguf.GGUFReader(path).tensors if one.name == "blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.data_offset + (0 if kind == Kind.Q8_0 else 208))
        file.write(np.float16(np.inf).tobytes())
    for precision in ("int8", "fp32"):
        with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight holds values that are"):
            export_model(path, tmp_path / "artifact", ExportOptions(precision=precision))


def by_matrix(name: str, values: NDArray[np.float32]) -> Kind:
    """Types as llama.cpp mixes them, of rows that fill blocks of 256."""
    if name in ("token_embd.weight", "output.weight"):
        return Kind.Q6_K
    return Kind.Q5_K if ".attn_v." in name or ".ffn_down." in name else Kind.Q4_K


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def made(folder: Path, kind: ggufs.Pick | Kind, family: str = "llama", **config: Any) -> Path:
    """A GGUF file of a random model in a type."""
    checkpoints.make(checkpoints.Case(family, config), folder / "checkpoint")
    return ggufs.write(folder / "checkpoint", folder / "model.gguf", kind)


def stored(artifact: Artifact, role: str) -> NDArray[np.float32]:
    """What a matrix of an artifact means, by ONNX's definition of its bytes; float32 [N, K]."""
    found = {one.name: one for one in artifact.load_graph("paged").graph.initializer}
    scales = artifact.read_tensor(found[f"{role}.scales"]).astype(np.float32)
    blocks = scales.shape[-1]
    quants = artifact.read_tensor(found[f"{role}.weight"]).reshape(
        scales.size // blocks, blocks, -1
    )
    assert f"{role}.zero_points" not in found
    zero = 128
    if artifact.manifest.group_size == 2 * quants.shape[-1]:  # of four bits
        quants, zero = np.stack([quants & 15, quants >> 4], axis=-1), 8
    numbers = quants.reshape(*quants.shape[:2], -1).astype(np.float32) - zero
    numbers *= scales.reshape(-1, blocks, 1)
    if f"{role}.offsets" in found:
        offsets = artifact.read_tensor(found[f"{role}.offsets"]).reshape(-1, blocks, 1)
        numbers += offsets.astype(np.float32)
    return numbers.reshape(len(quants), -1)


def meant(path: Path, name: str, heads: int = 0) -> NDArray[np.float32]:
    """What a matrix of a file means, with the rows of heads in halves."""
    (tensor,) = [one for one in gguf.GGUFReader(path).tensors if one.name == name]
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if heads:
        values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2)
    return values.reshape(-1, values.shape[-1])


@pytest.mark.parametrize(
    ("kind", "precision", "asked"),
    [
        (Kind.Q4_0, "int4", None),
        (Kind.Q8_0, "int8", None),
        (Kind.Q5_0, "int8", None),
        (Kind.Q4_0, "int8", "int8"),
        (Kind.IQ4_NL, "int8", "int8"),
    ],
)
def test_blocks_are_kept_bit_by_bit(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: Kind,
    precision: str,
    asked: str | None,
) -> None:
    path = made(tmp_path, kind)
    with caplog.at_level(logging.INFO):
        options = ExportOptions(precision=asked, threads=2)
        artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
    assert "blocks of integers are stored as they are" in caplog.text
    assert "quantized again" not in caplog.text
    assert (artifact.manifest.precision, artifact.manifest.group_size) == (precision, 32)
    qkv = [("attn_q", 4), ("attn_k", 2), ("attn_v", 0)]
    parts = [meant(path, f"blk.1.{name}.weight", heads) for name, heads in qkv]
    np.testing.assert_array_equal(stored(artifact, "layers.1.qkv"), np.concatenate(parts))
    down = meant(path, "blk.0.ffn_down.weight")
    np.testing.assert_array_equal(stored(artifact, "layers.0.down"), down)


def test_bits_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which the package gguf cannot decode, and whose blocks are larger than those of artifacts."""
    path = made(tmp_path, Kind.Q1_0, **WIDE)
    with caplog.at_level(logging.INFO):
        artifact = Artifact.read(export_model(path, tmp_path / "artifact"))
    assert "quantized again" not in caplog.text
    assert (artifact.manifest.precision, artifact.manifest.group_size) == ("int4", 32)
    with GgufCheckpoint([GgufShard(path)], {}) as file:
        down = file.read("blk.1.ffn_down.weight")
    assert len(np.unique(np.abs(down))) > 1
    np.testing.assert_array_equal(stored(artifact, "layers.1.down"), down)


def test_experts_are_kept_bit_by_bit(tmp_path: Path) -> None:
    path = made(
        tmp_path,
        Kind.Q8_0,
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=16,
        norm_topk_prob=True,
    )
    artifact = Artifact.read(export_model(path, tmp_path / "artifact"))
    found = stored(artifact, "layers.1.experts.gate_up").reshape(4, 32, 2, 64)
    for place, name in enumerate(("gate", "up")):
        expected = meant(path, f"blk.1.ffn_{name}_exps.weight").reshape(4, 32, 64)
        np.testing.assert_array_equal(found[:, :, place], expected)
    down = stored(artifact, "layers.1.experts.down")
    np.testing.assert_array_equal(down, meant(path, "blk.1.ffn_down_exps.weight"))


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (Kind.F32, "int4"),
        (Kind.BF16, "int4"),
        (Kind.Q4_1, "int4"),
        (Kind.Q4_K, "int4"),
        (Kind.Q5_1, "int8"),
        (Kind.Q6_K, "int8"),
        (Kind.Q2_K, "int8"),
        (Kind.Q5_K, "int8"),
        (by_matrix, "int4"),
    ],
)
def test_the_precision_where_none_is_asked_for(
    tmp_path: Path, kind: ggufs.Pick | Kind, precision: str
) -> None:
    path = made(tmp_path, kind, **WIDE)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact"))
    is_quantized = kind not in (Kind.F32, Kind.BF16)
    assert artifact.manifest.precision == precision
    assert artifact.manifest.group_size == (32 if is_quantized else 128)


def test_asymmetric_blocks_are_asked_for_in_int4(tmp_path: Path) -> None:
    options = ExportOptions(asymmetric=True)
    path = export_model(made(tmp_path, Kind.Q8_0), tmp_path / "artifact", options)
    assert Artifact.read(path).manifest.precision == "int4"


@pytest.mark.parametrize(
    ("precision", "told", "least", "most"),
    [
        ("int4", "Q5_K, Q6_K, 6 of them", 0.02, 0.1),  # those of Q4_K are kept
        ("int8", "Q4_K, Q5_K, Q6_K, 16 of them", 0.001, 0.01),
        # With Q4_K beside it where queries, keys and values are one matrix: 2 of each layer.
        (None, "Q4_K, Q5_K, Q6_K, 10 of them", 0.001, 0.01),
    ],
)
def test_what_is_quantized_again_is_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    precision: str | None,
    told: str,
    least: float,
    most: float,
) -> None:
    path = made(tmp_path, by_matrix, **WIDE)
    export_model(path, tmp_path / "floats", ExportOptions(precision="fp32"))
    assert "quantized again" not in caplog.text
    expected = meant(path, "blk.1.ffn_down.weight")
    options = ExportOptions(precision=precision)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
    assert f"stored in {told}, whose blocks" in caplog.text
    assert ("to int4 and int8 in groups of 32" in caplog.text) == (precision == "int4")
    assert ("int8 changes them less" in caplog.text) == (precision == "int4")
    off = np.linalg.norm(stored(artifact, "layers.1.down") - expected)
    assert least < off / np.linalg.norm(expected) < most


# What transformers does not read of a GGUF file, and takes its defaults for.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "qwen2-moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3": {"head_dim": 128},
    "qwen3-moe": {"moe_intermediate_size": 768, "num_experts": 4},
    "lfm2": {"head_dim": 16},  # which it computes
    "qwen3.5": HEADS,
    "qwen3.5-moe": HEADS,
}


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gemma3", "llama", "llama-tied", "mistral", "phi3", "qwen2"),
        *("qwen2-moe", "qwen3", "qwen3-moe", "lfm2", "minimax-m2"),
        *("qwen3.5", "qwen3.5-moe"),
    ],
)
def test_logits_are_those_that_transformers_has_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    one = case(name)
    one = replace(one, config={**one.config, **DEFAULTS.get(name, {})})
    checkpoints.make(one, tmp_path / "checkpoint")
    extra: dict[str, Any] = {
        f"tokenizer.ggml.{end}_token_id": 0 for end in ("bos", "eos", "padding")
    }
    if name.startswith(("lfm2", "qwen3.5")):  # of which it counts the tokens
        extra["tokenizer.ggml.tokens"] = [f"<{token}>" for token in range(checkpoints.VOCAB)]
    if name.startswith("qwen3.5"):
        architecture = "qwen35moe" if "moe" in name else "qwen35"
        extra[f"{architecture}.rope.dimension_sections"] = [3, 3, 2, 0]
    ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", Kind.Q8_0, extra=extra)
    # It asks for accelerate, and of a model on the CPU does not use it.
    monkeypatch.setattr(modeling_utils, "is_accelerate_available", lambda: True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    check_logits(tmp_path / "model.gguf", tmp_path / "artifact", model)


@pytest.mark.parametrize(
    "name",
    [
        *("llama-llama3", "granite", "olmo2", "olmoe", "smollm3"),
        *("exaone4-full", "hunyuan", "hunyuan-moe", "qwen3-next"),
        *("qwen3.5", "qwen3.5-moe"),
    ],
)
def test_logits_are_those_that_transformers_has_of_the_checkpoint(
    tmp_path: Path, name: str
) -> None:
    """Of models whose GGUF files it does not read, or not all of."""
    model = checkpoints.make(case(name), tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf")
    check_logits(path, tmp_path / "artifact", model)


def check_logits(path: Path, destination: Path, model: PreTrainedModel) -> None:
    options = ExportOptions(precision="fp32", threads=2)
    artifact = Artifact.read(export_model(path, destination, options))
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(model, token_ids)
    kernel = find_library()
    graph = Graph(artifact, "custom" if kernel else "decomposed", kernel)
    np.testing.assert_allclose(graph.logits(token_ids), expected, atol=2e-4)


@pytest.mark.parametrize("precision", ["int4", "fp16"])
def test_experts_stay_in_mxfp4(tmp_path: Path, precision: str) -> None:
    checkpoints.make(case("gpt-oss"), tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf")
    options = {"precision": precision, "group_size": 32, "expert_precision": "mxfp4"}
    check_same(tmp_path / "checkpoint", path, tmp_path, **options)
    assert Artifact.read(tmp_path / "found").manifest.expert_precision == "mxfp4"


@pytest.mark.parametrize("attention", ["custom", "decomposed"])
def test_experts_of_any_architecture_stay_in_mxfp4(tmp_path: Path, attention: Attention) -> None:
    """Which llama.cpp's type MXFP4_MOE has; what they mean is what the file's numbers are."""

    def kind(name: str, _: object) -> Kind:
        return Kind.MXFP4 if "_exps" in name else Kind.F32

    path = made(
        tmp_path,
        kind,
        "qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=16,
        norm_topk_prob=True,
    )
    tokens = checkpoints.tokens(count=20).tolist()
    logits = []
    for experts in ("same", "mxfp4"):
        options = ExportOptions(precision="fp32", expert_precision=experts)
        artifact = export_model(path, tmp_path / experts, options)
        exact = {"matmul_accuracy_level": 1, "kv_cache_dtype": "float32"}
        with opened(artifact, attention, **exact) as model:
            logits.append(run_rows(model, [(tokens, 0, [0, 1])]))
    np.testing.assert_allclose(*logits, atol=5e-5)


def test_experts_in_another_type_are_not_kept_in_mxfp4(tmp_path: Path) -> None:
    checkpoints.make(case("olmoe"), tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", Kind.Q8_0)
    options = ExportOptions(expert_precision="mxfp4")
    with pytest.raises(ExportError, match=r"ffn_down_exps.weight is Q8_0"):
        export_model(path, tmp_path / "artifact", options)
