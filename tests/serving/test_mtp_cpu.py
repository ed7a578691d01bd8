"""Models that guess for themselves, by their layers of multi-token prediction, end to end."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from onnxport import LLM, SamplingParams
from onnxport.errors import ArtifactError
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.artifact_writer import ArtifactWriter
from onnxport.graphs.manifest import MTP_FOLDER
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu.library import matmul_isa, weight_memory_bytes
from onnxport.providers.registry import get_provider
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.stats import SpeculationCounters
from tests.exporter import checkpoints
from tests.exporter.heads import TARGET, Head
from tests.exporter.mtp_layers import Mtp, make, make_follower
from tests.serving.test_speculation_head_cpu import (
    check_guesses,
    drafter_of,
    noted_guesses,
    opened,
    outputs,
)

MODELS: Mapping[str, Mtp] = {
    "qwen3.5": Mtp("qwen3.5"),
    "qwen3-next": Mtp("qwen3-next"),
    "glm4-moe": Mtp("glm4-moe", own=("embedding", "head")),
    "deepseek-v3": Mtp("deepseek-v3"),
}
CONFIG = SpeculationConfig("mtp", 4, kv_cache_tokens=1024)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = [replace(GREEDY, temperature=1.0, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Artifacts in int4, with their layers."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name, mtp in MODELS.items():
        make(mtp, folder / f"{name}-checkpoint")
        options = ExportOptions(precision="int4", group_size=32, mtp=True)
        found[name] = export_model(folder / f"{name}-checkpoint", folder / name, options)
    return found


def packed_bytes(*paths: Path) -> int:
    """What artifacts pack that are loaded together."""
    gc.collect()
    before = weight_memory_bytes()
    options = LoadOptions(threads=1, kv_cache_tokens=64)
    loaded = [get_provider("cpu").load(Artifact.read(path), options) for path in paths]
    found = weight_memory_bytes() - before
    for model in loaded:
        model.close()
    return found


def counters(llm: LLM) -> SpeculationCounters:
    found = llm.stats().speculation
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("qwen3.5", 16),
        pytest.param("qwen3-next", 512, marks=pytest.mark.slow),
        ("glm4-moe", 512),
        pytest.param("deepseek-v3", 16, marks=pytest.mark.slow),
    ],
)
def test_it_changes_no_token(name: str, budget: int, models: Mapping[str, Path]) -> None:
    with opened(models[name], None, max_num_batched_tokens=budget) as llm:
        expected = outputs(llm)
    with opened(models[name], CONFIG, max_num_batched_tokens=budget) as llm:
        assert outputs(llm) == expected
        assert outputs(llm) == expected  # prefixes are cached now
        drafter_of(llm).check()
        assert drafter_of(llm)._waiting.tokens == 0
        assert counters(llm).num_draft_tokens > 100
    with opened(models[name], CONFIG, max_num_batched_tokens=budget, kv_cache_tokens=128) as llm:
        assert outputs(llm) == expected
        assert llm.stats().num_preemptions


@pytest.mark.skipif(matmul_isa() is None, reason="no kernel here packs weights")
def test_the_head_is_in_memory_once(
    models: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an artifact of before, whose layer has files that share nothing with the model's."""
    make(MODELS["qwen3.5"], tmp_path / "checkpoint")
    monkeypatch.setattr(ArtifactWriter, "share", lambda *_: None)
    options = ExportOptions(precision="int4", group_size=32, mtp=True)
    apart = export_model(tmp_path / "checkpoint", tmp_path / "apart", options)
    spec = Artifact.read(apart).manifest.model
    head_bytes = spec.vocab_size * spec.hidden_size  # and scales
    for path in (models["qwen3.5"], apart):
        layer, both = packed_bytes(path / MTP_FOLDER), packed_bytes(path, path / MTP_FOLDER)
        saved = packed_bytes(path) + layer - both
        assert head_bytes < saved < 1.3 * head_bytes
    with opened(models["qwen3.5"], CONFIG) as llm:
        expected = outputs(llm)
    with opened(apart, CONFIG) as llm:
        assert outputs(llm) == expected


@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-v3"])
def test_guesses_are_what_the_layer_says_without_a_cache(
    name: str, models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with states, too, which computes tokens twice behind wrong guesses."""
    seen = noted_guesses(monkeypatch)
    with opened(models[name], CONFIG, enable_prefix_caching=False) as llm:
        outputs(llm)
    check_guesses(seen, models[name], models[name] / MTP_FOLDER, final_states=True)


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe"])
def test_a_layer_that_knows_the_model_is_right(name: str, tmp_path: Path) -> None:
    """The model's next token follows from its last one, and its layer's from the state alone.

    So a guess is right where the state is the one of the token before. Where a token was drawn that
    is not the likeliest the layer, which does not look at it, is wrong once.
    """
    make_follower(Mtp(name), tmp_path / "checkpoint")
    options = ExportOptions(precision="fp16", mtp=True)
    path = export_model(tmp_path / "checkpoint", tmp_path / "model", options)
    given = [{"prompt_token_ids": [3 * number, 7, number + 1]} for number in range(4)]
    found = {}
    for params in ([GREEDY] * 4, SAMPLED):
        for config in (None, CONFIG):
            with opened(path, config) as llm:
                outputs = llm.generate(given, params)  # type: ignore[arg-type]
                found[config] = [list(one.outputs[0].token_ids) for one in outputs]
                if config is not None:
                    done = counters(llm)
        assert found[None] == found[CONFIG]
        if params is not SAMPLED:
            assert len({tuple(one) for one in found[None]}) == len(given)
            assert done.num_accepted_tokens == done.num_draft_tokens > 50
        else:
            assert 0.4 < done.accepted_per_position[0] / done.num_drafts < 0.95


def test_what_is_not_there_is_refused(models: Mapping[str, Path], tmp_path: Path) -> None:
    checkpoints.make(TARGET, tmp_path / "target")
    plain = export_model(tmp_path / "target", tmp_path / "plain")
    with pytest.raises(ArtifactError, match=r"has none in mtp; export the model again with --mtp"):
        LLM(plain, provider="cpu", speculation=CONFIG)
    head = export_head(Head().make(tmp_path / "head"), tmp_path / "target", tmp_path / "eagle")
    own = models["glm4-moe"] / MTP_FOLDER
    with pytest.raises(ArtifactError, match=r'no model: name it .*"method": "mtp", "model"'):
        LLM(own, provider="cpu")
    for method, path, words in (
        ("eagle3", own, "is a layer of multi-token prediction, which the speculation method eagle"),
        ("draft_model", own, "cannot use; the method for it is mtp"),
        ("mtp", head, "is a draft head, which the speculation method mtp cannot use"),
        ("mtp", own, "a model of 3 layers, and .* has 8"),
        ("mtp", models["glm4-moe"], "a model of 3 layers, and .* has 8"),
    ):
        config = SpeculationConfig(method, model=path, kv_cache_tokens=256)  # type: ignore[arg-type]
        with pytest.raises(ArtifactError, match=words):
            LLM(plain, provider="cpu", speculation=config)
