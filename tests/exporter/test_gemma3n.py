"""Gemma 3n: how its configurations read, what of them is refused, and how it runs.

The reference and graphs in float32 are transformers' in `test_parity`.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, numpy_helper
from safetensors.torch import load_file, save_file
from torch.distributions.normal import Normal

from onnxport.errors import ArtifactError, CheckpointError, ProviderError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.altup_spec import AltUpSpec
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.hidden_states import tell_hidden_states
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import get_provider
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled
from tests.exporter.run_graphs import Graph, check_golden
from tests.providers.models import opened, run_rows
from tests.providers.test_mixed_devices import BATCHES, load

FULL, SLIDING = "full_attention", "sliding_attention"
# Sizes as they are told of the published E2B: no hub is at hand.
TEXT: dict[str, Any] = {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "initializer_range": 0.02,
    "intermediate_size": [8192] * 30,
    "laurel_rank": 64,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 6,
    "max_position_embeddings": 32768,
    "model_type": "gemma3n_text",
    "num_attention_heads": 8,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 10,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}
E2B = {**TEXT, "architectures": ["Gemma3nForCausalLM"]}
WHOLE: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "audio_config": {"model_type": "gemma3n_audio"},
    "audio_soft_tokens_per_image": 188,
    "audio_token_id": 262273,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "eoa_token_id": 262272,
    "eoi_token_id": 262144,
    "eos_token_id": [1, 106],
    "image_token_id": 262145,
    "initializer_range": 0.02,
    "model_type": "gemma3n",
    "text_config": TEXT,
    "vision_config": {"model_type": "gemma3n_vision"},
    "vision_soft_tokens_per_image": 256,
}


def test_both_spellings_are_understood() -> None:
    spec = read(E2B)
    assert read(respelled(E2B)) == spec
    assert read(WHOLE) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.altup == AltUpSpec(streams=4, active=0, scaled=True, laurel_rank=64)
    assert (spec.layer_input_size, spec.layer_input_rows) == (256, 262144)
    assert (spec.scale, spec.logits_softcap, spec.intermediate_size) == (1.0, 30.0, 8192)
    assert spec.local_rope is not None
    assert (spec.rope.theta, spec.local_rope.theta) == (1e6, 1e4)
    assert spec.cached_layers == tuple(range(20))
    assert [spec.kv_source(layer) for layer in (18, 19, 20, 24, 28, 29)] == [18, 19, 18, 19, 18, 19]
    assert spec.tie_word_embeddings
    assert not spec.has_gqa_graph


def test_how_much_of_gates_is_cut_off() -> None:
    """As many deviations above the mean as transformers computes in float32."""
    cutoffs = read(E2B).gate_cutoffs
    assert cutoffs is not None
    wanted = Normal(0, 1).icdf(torch.tensor(0.95)).item()
    assert cutoffs == (pytest.approx(wanted, rel=1e-6),) * 10 + (None,) * 20
    absent = {key: one for key, one in E2B.items() if "sparsity" not in key}
    assert read(absent).gate_cutoffs == cutoffs
    assert read({**E2B, "activation_sparsity_pattern": [0] * 30}).gate_cutoffs is None
    sizes = {"num_hidden_layers": 10, "num_kv_shared_layers": 0, "intermediate_size": 8192}
    short = {**absent, **sizes, "layer_types": None}
    assert read(short).gate_cutoffs is None
    assert read(short).sliding_window == (512, 512, 512, 512, None) * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"intermediate_size": [8192] * 29}, "has 29 entries; .* each of the 30 layers"),
        ({"intermediate_size": [8192] * 29 + [16384]}, "one number for all layers, as E2B and E4B"),
        ({"intermediate_size": []}, r"intermediate_size is \[\]; it must be a number"),
        ({"intermediate_size": "8192"}, "intermediate_size is 8192; it must be a number"),
        ({"activation_sparsity_pattern": [0.95]}, "for each of the 30 layers"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "from 0 to below 1"),
        ({"activation_sparsity_pattern": ["0.5"] * 30}, "from 0 to below 1"),
        ({"altup_num_inputs": 1}, "streams must be above 1, are 1"),
        ({"altup_active_idx": 4}, "active must be one of 4 streams, is 4"),
        ({"laurel_rank": 0}, "laurel_rank must be positive, is 0"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0"),
        ({"vocab_size_per_layer_input": 262401}, r"up to 262400 \(vocab_size\) rows"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0.0; it must be above 0"),
        ({"num_kv_shared_layers": 26}, "shared_kv_layers is 26 of 30 layers"),
        ({"sliding_window": None}, "only with a sliding_window"),
        ({"layer_types": [FULL] * 29}, "30 entries"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "of type 'yarn'"),
        ({"altup_router_bias": True}, "altup_router_bias = true"),
        ({"use_bidirectional_attention": True}, "tokens see those behind them"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read({**E2B, **changes})


def test_manifests_are_read_strictly() -> None:
    written = json.loads(json.dumps(read(E2B).to_json()))
    for changes, message in (
        ({"gate_cutoffs": [1.5]}, "gate_cutoffs are"),
        ({"gate_cutoffs": ["1.5"] * 30}, "gate_cutoffs has an entry that is no number"),
        ({"altup": None}, "gate_cutoffs need altup"),
        ({"altup": {**written["altup"], "streams": 0}}, "streams must be above 1"),
        ({"altup": {**written["altup"], "more": 1}}, "unknown 'more'"),
        ({"layer_input_rows": 262400}, "layer_input_rows is 262400"),
        ({"layer_input_size": None, "layer_input_rows": None}, "altup does not go with"),
        ({"layer_scales": True}, "altup does not go with layer_scales"),
    ):
        with pytest.raises(ArtifactError, match=message):
            ArchSpec.from_json({**written, **changes})


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gemma3n", "fp16"), ("gemma3n", "int4"), ("gemma3n-plain", "int8")],
)
def test_other_precisions(name: str, precision: str, tmp_path: Path) -> None:
    """Numbers that all streams are times are not rounded to what activations are stored in."""
    checkpoints.make(checkpoints.CASES[name], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    if artifact.has_gqa:
        check_golden(artifact)
    with np.load(artifact.path / "golden.npz") as golden:
        found = Graph(artifact, "decomposed").logits(golden["token_ids"])
        np.testing.assert_allclose(
            found[golden["logits_indices"]], golden["logits"], rtol=0, atol=1e-4
        )


def test_the_text_part_of_a_whole_model(tmp_path: Path) -> None:
    """Tensors are called as transformers' own modules are, and those of images are left out."""
    case = checkpoints.CASES["gemma3n"]
    model = checkpoints.make(case, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    moved = {
        name.replace("model.", "model.language_model.", 1): one
        for name, one in load_file(path).items()
    }
    further = ("vision_tower.conv", "audio_tower.conv", "embed_vision.one", "embed_audio.one")
    moved |= {f"model.{name}.weight": torch.ones(2) for name in further}
    for name in ("k_proj", "v_proj", "k_norm"):  # published, and read by nobody
        first, last = (f"model.language_model.layers.{n}.self_attn.{name}.weight" for n in (0, 3))
        assert last not in moved
        moved[last] = moved[first].clone()
    own = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    text = {key: one for key, one in own.items() if key != "architectures"}
    whole = {**WHOLE, "text_config": text}
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(whole))
    save_file(moved, path)
    options = ExportOptions(precision="fp32", threads=1)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    ids = checkpoints.tokens()
    found = Graph(artifact, "decomposed").logits(ids)
    np.testing.assert_allclose(found, checkpoints.logits(model, ids), atol=1e-4)
    save_file({**moved, "model.language_model.altup.weight": torch.ones(2)}, path)
    with pytest.raises(
        CheckpointError, match=r"does not use: model\.language_model\.altup\.weight"
    ):
        export_model(tmp_path / "checkpoint", tmp_path / "other", options)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3n")
    checkpoints.make(checkpoints.CASES["gemma3n"], folder / "checkpoint")
    options = ExportOptions(precision="int4", threads=1, group_size=32)
    return export_model(folder / "checkpoint", folder / "artifact", options)


@pytest.mark.parametrize(
    "provider",
    ["cpu", "cuda", *(pytest.param(one, marks=pytest.mark.slow) for one in ("webgpu", "openvino"))],
)
def test_numbers_are_the_same_everywhere(provider: str, artifact: Path) -> None:
    """Of whole prompts in a batch, of chunks, and of single tokens behind these."""
    if reason := provider == "openvino" and get_provider(provider).probe().reason:
        pytest.skip(reason)
    exact = {"dtype": "float32", "matmul_accuracy_level": 1}
    if provider in ("cuda", "webgpu"):
        model = load(artifact, provider)
    else:
        size = 32 if provider == "openvino" else 16
        options = {**exact, "kv_cache_dtype": "float32", "block_size": size}
        own = LoadOptions(kv_cache_tokens=1024, threads=1, **options)
        model = get_provider(provider).load(Artifact.read(artifact), own)
    size = model.capabilities.block_size
    with opened(artifact, "decomposed", block_size=size, matmul_accuracy_level=1) as plain:
        for rows in BATCHES:
            expected, found = run_rows(plain, rows), run_rows(model, rows)
            assert np.abs(found - expected).max() <= 1e-4 * expected.std()
    model.close()


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(artifact: Path) -> None:
    with opened(artifact, "custom") as model:
        rows = [
            (checkpoints.tokens(seed, 12 + seed).tolist(), 0, [3 * seed, 3 * seed + 1])
            for seed in range(3)
        ]
        together = run_rows(model, rows)
        for row, logits in zip(rows, together, strict=True):
            assert run_rows(model, [row])[0].tobytes() == logits.tobytes()


def test_sizes_of_streams_are_of_float32(artifact: Path) -> None:
    """Squares of a stream's largest numbers are more than float16 holds."""
    graph = Artifact.read(artifact).load_graph("paged")
    half = retype(graph, numpy_helper.to_array, "float16").model
    types = element_types(half)
    sizes = {node.output[0] for node in half.graph.node if node.op_type == "ReduceL2"}
    roots = {node.output[0] for node in half.graph.node if sizes & set(node.input)}
    assert {types[name] for name in sizes | roots} == {TensorProto.FLOAT}
    assert (len(sizes), len(roots)) == (2, 2)


def test_who_wants_one_stream_of_each_layer_is_refused(artifact: Path) -> None:
    """What the final norm makes is told, of which embeddings are made."""
    read_again = Artifact.read(artifact)
    graph, spec = read_again.load_graph("paged"), read_again.manifest.model
    with pytest.raises(ArtifactError, match="has 4 residual streams"):
        tell_hidden_states(graph, (1,), spec)
    assert tell_hidden_states(graph, (), spec, final=True).changes == {"final norms that tell": 1}
    with pytest.raises(ProviderError, match="adapters"), opened(artifact, None, max_adapters=1):
        pass


def test_a_share_is_that_of_normally_distributed_numbers() -> None:
    assert NormalDist().inv_cdf(0.5) == 0
    spec = read({**E2B, "activation_sparsity_pattern": [0.5] * 30})
    assert spec.gate_cutoffs == (0.0,) * 30
