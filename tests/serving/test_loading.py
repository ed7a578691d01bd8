"""From a folder to an engine; the artifact and the model are stand-ins."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from onnxport.errors import ArtifactError
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.null import NullModel
from onnxport.serving import loading
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.llm import LLM
from onnxport.serving.params import SamplingParams
from tests.serving.tokenizers_for_tests import byte_level


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, LoadOptions, NullModel]]:
    """What was opened."""
    calls = []

    def open_model(
        path: Path, provider: str, options: LoadOptions, trials: Path | None = None
    ) -> Model:
        model = NullModel()
        calls.append((path, provider, options, model))
        return model

    manifest = SimpleNamespace(eos_token_ids=(0, 5))
    artifact = SimpleNamespace(read=lambda path: SimpleNamespace(manifest=manifest))
    monkeypatch.setattr(loading, "Artifact", artifact)
    monkeypatch.setattr(loading, "open_model", open_model)
    return calls


def test_an_engine_has_the_artifact_s_tokenizer_and_end_tokens(
    opened: list[tuple[Path, str, LoadOptions, NullModel]], tmp_path: Path
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    engine = loading.open_engine(tmp_path, "cpu", LoadOptions(threads=3))
    assert engine.tokenizer is not None
    assert engine.tokenizer.eos_token_ids == {0, 5}
    assert engine.prepare("a", "the sea", SamplingParams()).stop_token_ids == {0, 5}
    assert opened[0][:3] == (tmp_path, "cpu", LoadOptions(threads=3))


def test_without_a_tokenizer_there_are_token_ids_and_end_tokens(
    opened: list[tuple[Path, str, LoadOptions, NullModel]], tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=r"has no tokenizer\.json"):
        loading.open_engine(tmp_path)
    assert not opened
    engine = loading.open_engine(tmp_path, needs_tokenizer=False)
    assert engine.tokenizer is None
    assert engine.prepare("a", [1], SamplingParams()).stop_token_ids == {0, 5}


def test_a_model_is_closed_when_the_engine_cannot_start(
    opened: list[tuple[Path, str, LoadOptions, NullModel]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object, **more: object) -> Engine:
        raise MemoryError

    monkeypatch.setattr(loading, "Engine", broken)
    with pytest.raises(MemoryError):
        loading.open_engine(tmp_path, needs_tokenizer=False)
    assert opened[0][3].closed


def test_llm_passes_every_option_on(
    opened: list[tuple[Path, str, LoadOptions, NullModel]], tmp_path: Path
) -> None:
    with LLM(
        str(tmp_path),
        provider="cpu",
        threads=2,
        max_num_seqs=3,
        max_num_batched_tokens=100,
        kv_cache_tokens=640,
        max_model_len=99,
        kv_cache_dtype="int8",
        block_size=32,
        attention="decomposed",
        matmul_accuracy_level=1,
        seed=4,
    ) as llm:
        assert llm._engine.config == EngineConfig(3, 100, 4)
        assert opened[0][2] == LoadOptions(
            threads=2,
            kv_cache_tokens=640,
            kv_cache_dtype="int8",
            block_size=32,
            max_model_len=99,
            attention="decomposed",
            matmul_accuracy_level=1,
        )
