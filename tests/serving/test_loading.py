"""From a folder to an engine; the artifact and the model are stand-ins."""

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxport.errors import ArtifactError, CapacityError, OptionError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.classification_spec import (
    SCORE_FILE,
    ClassificationSpec,
    dump_score_head,
)
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec
from onnxport.providers.base import LoadOptions, Model, Probe
from onnxport.providers.features import Features
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving import loading
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.linear_attention import KEPT_STATES
from onnxport.serving.llm import LLM
from onnxport.serving.params import SamplingParams
from onnxport.serving.pooling import Embedder
from tests.graphs.artifacts import SPEC, write
from tests.serving.helpers import alone
from tests.serving.tokenizers_for_tests import byte_level


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, LoadOptions, NullModel]]:
    """What was opened."""
    calls = []

    def open_model(
        given: Any, provider: str, options: LoadOptions, trials: Path | None = None
    ) -> Model:
        model = NullModel()
        calls.append((getattr(given, "path", given), provider, options, model))
        return model

    manifest = SimpleNamespace(
        eos_token_ids=(0, 5), model=SPEC, fingerprint="f", embedding=None, classification=None
    )
    monkeypatch.setattr(
        loading,
        "read_artifact",
        lambda path, options: SimpleNamespace(path=path, manifest=manifest),
    )
    monkeypatch.setattr(loading, "open_model", open_model)
    return calls


def test_a_model_tells_its_final_norms_states_where_prompts_are_embedded(
    opened: list[tuple[Path, str, LoadOptions, NullModel]], tmp_path: Path
) -> None:
    for config in (None, EngineConfig(embeddings=True), EngineConfig(pooling="mean")):
        loading.open_engine(tmp_path, config=config, needs_tokenizer=False).close()
    assert [options.final_states for _, _, options, _ in opened] == [False, True, True]


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


@pytest.mark.parametrize("enabled", [True, False])
def test_collecting_is_put_off_while_a_model_is_loaded(
    loads: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    during = []
    monkeypatch.setattr(loading, "Engine", lambda *args, **more: during.append(gc.isenabled()))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        loads["cpu"] = [NullModel(), ProviderError("too old")]
        open_null(tmp_path, "cpu")
        assert (during, gc.isenabled()) == ([False], enabled)
        with pytest.raises(ProviderError):
            open_null(tmp_path, "cpu")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


# Fallbacks.


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[NullModel | Exception]]:
    """What each provider gives, in turn; all that was asked for is in `loads["asked"]`."""
    gives: dict[str, list[Any]] = {"asked": []}

    def open_model(path: Path, provider: str, options: LoadOptions, trials: Any = None) -> Model:
        gives["asked"].append((provider, options))
        found = gives[provider].pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(loading, "read_artifact", lambda path, options: stored(path))
    monkeypatch.setattr(loading, "open_model", open_model)
    return gives


def stored(path: Path, fingerprint: str = "f", end: tuple[int, ...] = ()) -> Any:
    """What is read of an artifact."""
    manifest = SimpleNamespace(
        eos_token_ids=end, model=SPEC, fingerprint=fingerprint, embedding=None, classification=None
    )
    return SimpleNamespace(path=path, manifest=manifest)


PARTICULAR = LoadOptions(
    threads=2,
    kv_cache_tokens=99,
    block_size=32,
    attention="decomposed",
    dtype="float16",
    kv_cache_dtype="int8",
    matmul_accuracy_level=4,
    allowed_on_host=("Gather",),
    max_adapters=3,
    max_adapter_rank=8,
    coarse_head=False,
    hybrid_kv_cache=False,
)
SUITED = LoadOptions(
    threads=2,
    kv_cache_tokens=99,
    max_adapters=3,
    max_adapter_rank=8,
    coarse_head=False,
    hybrid_kv_cache=False,
)


def open_null(tmp_path: Path, provider: str, *fallback: str, **more: Any) -> Engine:
    return loading.open_engine(
        tmp_path, provider, PARTICULAR, needs_tokenizer=False, fallback=fallback, **more
    )


def test_a_fallback_is_loaded_when_the_provider_cannot_be(
    loads: dict[str, list[Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = NullModel()
    loads |= {"openvino": [ProviderError("too old")], "cpu": [CapacityError("too big")]}
    loads["auto"] = [model]
    engine = open_null(tmp_path, "openvino", "cpu", "auto")
    assert loads["asked"] == [("openvino", PARTICULAR), ("cpu", SUITED), ("auto", SUITED)]
    told = [(one.provider, one.device, one.reason, one.replaced_by) for one in engine.losses]
    assert told == [("openvino", None, "too old", "null"), ("cpu", None, "too big", "null")]
    assert "openvino cannot be used: too old; cpu is tried instead" in caplog.text
    assert "cpu chooses kv_cache_dtype, block_size, attention" in caplog.text
    engine.submit(engine.prepare("a", [1], SamplingParams(max_tokens=2)))
    assert [len(engine.step()), len(engine.step())] == [1, 1]


def test_what_failed_to_load_is_not_in_the_next_ones_way(
    loads: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error's functions still hold what they had loaded by then."""

    class Weights:
        pass

    held: list[weakref.ref[Weights]] = []
    plain = loading.open_model

    def open_model(path: Path, provider: str, options: LoadOptions, trials: Any = None) -> Model:
        weights = Weights()
        assert [one() for one in held] == [None] * len(held)
        held.append(weakref.ref(weights))
        return plain(path, provider, options, trials)

    monkeypatch.setattr(loading, "open_model", open_model)
    loads |= {"openvino": [CapacityError("no room")], "cpu": [NullModel()]}
    open_null(tmp_path, "openvino", "cpu")
    assert len(held) == 2


def test_without_a_fallback_the_error_stands(loads: dict[str, list[Any]], tmp_path: Path) -> None:
    loads["cpu"] = [ProviderError("too old")]
    with pytest.raises(ProviderError, match=r"^too old$"):
        open_null(tmp_path, "cpu")


def test_when_nothing_loads_every_reason_is_told(
    loads: dict[str, list[Any]], tmp_path: Path
) -> None:
    loads |= {"openvino": [ProviderError("too old")], "cpu": [CapacityError("too big")]}
    with pytest.raises(CapacityError, match=r"openvino: too old; cpu: too big") as caught:
        open_null(tmp_path, "openvino", "cpu")
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 2


@pytest.mark.parametrize("tiers", [False, True])
def test_a_device_that_is_lost_at_once_or_later(
    loads: dict[str, list[Any]], tmp_path: Path, tiers: bool
) -> None:
    """With tiers a block is moved while the engine starts."""
    first = NullModel(NullOptions(lost_at=lambda operation: operation == 0))
    again = NullModel(NullOptions(lost_at=lambda operation: operation == 4))
    loads |= {"cpu": [first, again], "auto": [NullModel()]}
    config = EngineConfig(kv_host_memory=1 << 20 if tiers else 0)
    engine = open_null(tmp_path, "cpu", "cpu", "auto", config=config)
    assert first.closed == tiers
    engine.submit(engine.prepare("a", [1], SamplingParams(temperature=0.0, max_tokens=9)))
    found: list[int] = []
    while engine.has_work:
        found += [token for delta in engine.step() for token in delta.token_ids]
    assert found == alone([1])[:9]
    assert [one.device for one in engine.losses] == [None if tiers else "none", "none"]
    # The same provider once more gets the same options.
    assert loads["asked"] == [("cpu", PARTICULAR), ("cpu", PARTICULAR), ("auto", SUITED)]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"fingerprint": "g"}, "it has other weights or another graph"),
        ({"end": (7,)}, r"it has the end tokens \[7\], which were \[\]"),
    ],
)
@pytest.mark.parametrize("reads", [1, 2], ids=["before it is loaded", "while it is loaded"])
def test_an_artifact_that_was_replaced_takes_over_nothing(
    loads: dict[str, list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: dict[str, Any],
    words: str,
    reads: int,
) -> None:
    spare = NullModel()
    loads |= {"cpu": [NullModel(NullOptions(lost_at=lambda operation: operation == 2))]}
    loads["auto"] = [spare]
    told = [stored(tmp_path) for _ in range(reads)]
    monkeypatch.setattr(
        loading,
        "read_artifact",
        lambda path, options: told.pop(0) if told else stored(tmp_path, **other),
    )
    engine = open_null(tmp_path, "cpu", "auto")
    engine.submit(engine.prepare("a", [1], SamplingParams(temperature=0.0, max_tokens=9)))
    ended = [engine.step() for _ in range(3)][-1]
    assert [delta.finish_reason for delta in ended] == ["error"]
    assert not engine.has_work
    failure = engine.failure
    assert failure is not None
    assert re.search(f"auto could not take over: .* was replaced since.*{words}", failure)
    assert len(loads["asked"]) == reads
    assert spare.closed == (reads == 2)


def test_what_was_exported_in_place_of_an_artifact_is_another(tmp_path: Path) -> None:
    first = Artifact.read(write(tmp_path / "model"))
    write(tmp_path / "model", overwrite=True)
    assert loading._read_again(first, LoadOptions()).manifest == first.manifest
    write(tmp_path / "model", quantized=False, overwrite=True)
    with pytest.raises(ProviderError, match=r"model was replaced since .* or another graph"):
        loading._read_again(first, LoadOptions())


def test_a_draft_head_s_states_are_not_given_up_for_another_artifact(
    loads: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stored(tmp_path)
    options = LoadOptions(hidden_layers=(1,))
    loads["cpu"] = [ProviderError("tells no states"), NullModel()]
    monkeypatch.setattr(loading, "read_artifact", lambda path, options: stored(tmp_path, "g"))
    with pytest.raises(ProviderError, match="was replaced since"):
        loading._fallback(first, "cpu", "cpu", options).load()
    assert not loads["asked"]
    monkeypatch.setattr(loading, "read_artifact", lambda path, options: stored(tmp_path))
    loading._fallback(first, "cpu", "cpu", options).load()
    assert [asked.hidden_layers for _, asked in loads["asked"]] == [(1,), ()]


@pytest.mark.parametrize("pools", [False, True])
def test_what_the_final_norm_makes_is_needed_by_embeddings_alone(
    pools: bool, loads: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of multi-token prediction is done without."""
    first = stored(tmp_path)
    loads["cpu"] = [ProviderError("tells no states"), NullModel()]
    monkeypatch.setattr(loading, "read_artifact", lambda path, options: stored(tmp_path))
    options = LoadOptions(final_states=True)
    fallback = loading._fallback(first, "cpu", "cpu", options, pools=pools)
    if pools:
        with pytest.raises(ProviderError, match="tells no states"):
            fallback.load()
    else:
        fallback.load()
    asked = [options.final_states for _, options in loads["asked"]]
    assert asked == ([True] if pools else [True, False])


@pytest.mark.parametrize(("name", "words"), [("gpu", "no provider 'gpu'"), ("openvino", "pip")])
def test_a_fallback_that_could_never_take_over_is_refused_at_once(
    opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    missing = Probe(available=False, reason="not installed: pip install it")
    if name == "openvino":
        provider = SimpleNamespace(probe=lambda: missing)
        monkeypatch.setattr(loading, "get_provider", lambda name: provider)
    with pytest.raises(ProviderError, match=words):
        loading.open_engine(tmp_path, "cpu", needs_tokenizer=False, fallback=[name])
    assert not opened


@pytest.fixture
def stateful(monkeypatch: pytest.MonkeyPatch) -> list[LoadOptions]:
    """With what a model with linear attention was opened, or would have been."""
    asked: list[LoadOptions] = []

    def open_model(
        given: Any, provider: str, options: LoadOptions, trials: Path | None = None
    ) -> Model:
        asked.append(options)
        return NullModel(NullOptions(state_slots=options.state_slots or 0))

    layers = (True,) * (SPEC.num_layers - 1) + (False,)
    linear = LinearAttentionSpec(
        key_heads=1, value_heads=2, key_size=4, value_size=4, kernel=4, layers=layers
    )
    model = replace(SPEC, linear=linear, sliding_window=(None,) * SPEC.num_layers)
    manifest = SimpleNamespace(
        eos_token_ids=(0, 5), model=model, fingerprint="f", embedding=None, classification=None
    )
    monkeypatch.setattr(
        loading,
        "read_artifact",
        lambda path, options: SimpleNamespace(path=path, manifest=manifest),
    )
    monkeypatch.setattr(loading, "open_model", open_model)
    return asked


@pytest.mark.parametrize(("given", "slots"), [(None, 6 + KEPT_STATES), (5, 5)])
def test_there_are_states_for_as_many_sequences_as_run(
    stateful: list[LoadOptions], tmp_path: Path, given: int | None, slots: int
) -> None:
    options = LoadOptions(state_slots=given)
    config = EngineConfig(max_num_seqs=3)
    engine = loading.open_engine(tmp_path, "cpu", options, config, needs_tokenizer=False)
    assert [one.state_slots for one in stateful] == [slots]
    assert engine.capabilities.state_slots == slots


def test_what_takes_over_has_as_many_states(stateful: list[LoadOptions], tmp_path: Path) -> None:
    config = EngineConfig(max_num_seqs=3)
    names = ["cpu"]
    engine = loading.open_engine(
        tmp_path, "auto", None, config, needs_tokenizer=False, fallback=names
    )
    engine._runtime._fallbacks[0].load()
    assert [one.state_slots for one in stateful] == [6 + KEPT_STATES] * 2


def test_what_does_not_go_with_states_is_refused_before_anything_is_loaded(
    stateful: list[LoadOptions], tmp_path: Path
) -> None:
    config = EngineConfig(kv_host_memory=1 << 20)
    with pytest.raises(OptionError, match=r"layers that keep a state.* kv_host_memory"):
        loading.open_engine(tmp_path, "cpu", None, config, needs_tokenizer=False)
    assert not stateful


def test_a_fallback_that_runs_no_linear_attention_is_refused_at_once(
    stateful: list[LoadOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = Features.one_type(("native",), ("float32",), runs_ours=False)
    for told in (features, None):
        probe = Probe(available=True, reason="", features=told)
        provider = SimpleNamespace(probe=lambda found=probe: found)
        monkeypatch.setattr(loading, "get_provider", lambda name, found=provider: found)
        with pytest.raises(ProviderError, match="which webgpu does not run; take another one"):
            loading.open_engine(tmp_path, "cpu", needs_tokenizer=False, fallback=["webgpu"])
    assert not stateful


JUDGE = ClassificationSpec(labels=("yes",), activation="sigmoid")
LATENT = LatentSpec(kv_rank=8, nope_size=4, rope_size=4, value_size=4)


@pytest.mark.parametrize(
    ("embedding", "latent", "config", "words"),
    [
        (None, LATENT, {}, "latent attention, which other does not compute; take another one"),
        (
            None,
            None,
            {"embeddings": True},
            "texts are embedded or judged, and other does not .* cpu$",
        ),
        (JUDGE, None, {}, "embedded or judged.* give --no-embeddings"),
        (replace(JUDGE, only=True), None, {}, "embedded or judged, and other does not .* cpu$"),
        (EmbeddingSpec(), None, {}, "texts are embedded.* give --no-embeddings"),
        (
            EmbeddingSpec(only=True),
            None,
            {},
            "texts are embedded or judged, and other does not .* cpu$",
        ),
    ],
)
def test_a_fallback_that_lacks_what_the_model_needs_is_refused_at_once(
    loads: dict[str, list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    embedding: EmbeddingSpec | ClassificationSpec | None,
    latent: LatentSpec | None,
    config: dict[str, Any],
    words: str,
) -> None:
    found = stored(tmp_path)
    if isinstance(embedding, ClassificationSpec):
        found.manifest.classification = embedding
        (tmp_path / SCORE_FILE).write_bytes(dump_score_head(np.ones((1, 8), np.float32)))
    else:
        found.manifest.embedding = embedding
    found.manifest.model = SimpleNamespace(
        linear=None,
        latent=latent,
        draft=None,
        hidden_size=8,
        vocab_size=SPEC.vocab_size,
        has_mixed_layers=False,
        has_even_caches=True,
    )
    monkeypatch.setattr(loading, "read_artifact", lambda path, options: found)
    limits = EngineConfig(**config)
    lacking = Features.one_type(("native",), ("float32",), runs_ours=False)
    for told in (lacking, None):
        probe = Probe(available=True, reason="", features=told)
        provider = SimpleNamespace(probe=lambda found=probe: found)
        monkeypatch.setattr(loading, "get_provider", lambda name, found=provider: found)
        with pytest.raises(ProviderError, match=f"^other cannot be a fallback here: .*{words}"):
            open_null(tmp_path, "cpu", "other", config=limits)
    assert not loads["asked"]
    able = Probe(True, "", features=Features.one_type(("native",), ("float32",)))
    provider = SimpleNamespace(probe=lambda: able)
    monkeypatch.setattr(loading, "get_provider", lambda name: provider)
    loading._check_fallback("other", "cpu", found, pools=True)


def test_vectors_are_cut_to_no_more_than_they_have(tmp_path: Path) -> None:
    found = stored(tmp_path)
    size = SPEC.hidden_size
    fits = EngineConfig(matryoshka_dimensions=(size, 2))
    assert loading.choose_embedder(found, fits) == Embedder(dimensions=(size, 2))
    with pytest.raises(OptionError, match=f"are 2, {size + 1}, and vectors of .* have {size}"):
        loading.choose_embedder(found, EngineConfig(matryoshka_dimensions=(2, size + 1)))


def test_one_fallback_may_be_a_plain_name(opened: list[Any], tmp_path: Path) -> None:
    engine = loading.open_engine(tmp_path, "auto", needs_tokenizer=False, fallback="cpu")
    assert [one.provider for one in engine._runtime._fallbacks] == ["cpu"]


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
        dtype="float16",
        allowed_on_host=["Gather"],
        fallback=["auto"],
        max_adapters=2,
        max_adapter_rank=32,
        coarse_head=False,
        hybrid_kv_cache=False,
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
            dtype="float16",
            allowed_on_host=("Gather",),
            max_adapters=2,
            max_adapter_rank=32,
            coarse_head=False,
            hybrid_kv_cache=False,
        )
        assert llm._engine.adapters._base is SPEC
        assert [one.provider for one in llm._engine._runtime._fallbacks] == ["auto"]
