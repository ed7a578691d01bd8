"""Real models embed on a processor: transformers' vectors, the same bits whatever else runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from onnxport import LLM, PoolingParams, SamplingParams
from onnxport.errors import CapacityError, ProviderError, RequestError
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu.library import find_library
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.loading import open_engine
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import Embedder
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.speculator import Speculator
from tests.exporter import checkpoints
from tests.exporter.heads import TARGET, Head
from tests.exporter.mtp_layers import Mtp, make
from tests.serving.helpers import tokens
from tests.serving.speculating import Eager

DEMO = Path(__file__).parents[2] / "demo" / "model"
POOLINGS = ("last", "mean")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [checkpoints.tokens(seed, 20 + 9 * seed).tolist() for seed in range(4)]
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Checkpoints, and artifacts in float32."""
    folder = tmp_path_factory.mktemp("models")
    checkpoints.make(checkpoints.CASES["qwen3"], folder / "qwen3")
    options = ExportOptions(precision="fp32")
    return {
        name: (path, export_model(path, folder / f"{name}-artifact", options))
        for name, path in (("qwen3", folder / "qwen3"), ("demo", DEMO))
    }


def opened(artifact: Path, pooling: Any, **limits: Any) -> Engine:
    tokens = limits.pop("kv_cache_tokens", 512)
    options = LoadOptions(threads=2, kv_cache_tokens=tokens, block_size=16)
    config = EngineConfig(embeddings=True, pooling=pooling, **limits)
    return open_engine(artifact, "cpu", options, config, needs_tokenizer=False)


def embed(engine: Engine, name: str, prompt: list[int], **options: Any) -> None:
    treated = RequestOptions(**options)
    engine.submit(engine.prepare_embedding(name, prompt, None, treated))


def generate(engine: Engine, name: str, prompt: list[int], **options: Any) -> None:
    engine.submit(engine.prepare(name, prompt, GREEDY, RequestOptions(**options)))


def finish(engine: Engine) -> dict[str, Any]:
    """Run all; vectors and tokens by request."""
    found: dict[str, list[Any]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
        engine.check()
    ends = {name: deltas[-1] for name, deltas in found.items()}
    return {
        name: tokens(deltas) if ends[name].embedding is None else ends[name].embedding
        for name, deltas in found.items()
    }


@cache
def expected(checkpoint: Path, prompt: tuple[int, ...], pooling: str) -> NDArray[np.float64]:
    """Transformers' vector."""
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(torch.tensor([prompt])).last_hidden_state[0].numpy().astype(np.float64)
    found = states[-1] if pooling == "last" else states.mean(axis=0)
    return found / np.linalg.norm(found)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["qwen3", "demo"])
def test_vectors_are_those_of_transformers(
    name: str, pooling: str, models: dict[str, tuple[Path, Path]]
) -> None:
    """Alone; and with the same bits in chunks, beside others, from the cache, after yielding."""
    checkpoint, artifact = models[name]
    with_kernel = find_library() is not None

    def check_same(found: Floats, number: int) -> None:
        if with_kernel:
            np.testing.assert_array_equal(found, alone[number])
        else:  # ONNX Runtime's products give a row other bits beside others
            np.testing.assert_allclose(found, alone[number], atol=1e-5)

    engine = opened(artifact, pooling, enable_prefix_caching=False)
    alone: list[Floats] = []
    texts = []
    for number, prompt in enumerate(PROMPTS):
        embed(engine, "vector", prompt)
        alone.append(finish(engine)["vector"])
        want = expected(checkpoint, tuple(prompt), pooling)
        np.testing.assert_allclose(alone[number], want, rtol=1e-3, atol=1e-4)
        generate(engine, "text", prompt)
        texts.append(finish(engine)["text"])
    engine.close()

    engine = opened(artifact, pooling, max_num_batched_tokens=13, max_num_seqs=8)
    for _ in range(2):  # the second time from the cache
        for number, prompt in enumerate(PROMPTS):
            embed(engine, f"vector-{number}", prompt)
            generate(engine, f"text-{number}", prompt)
        found = finish(engine)
        for number in range(4):
            check_same(found[f"vector-{number}"], number)
            assert found[f"text-{number}"] == texts[number]
    engine.close()

    # 7 blocks of 16 tokens: the first one has to make room.
    engine = opened(
        artifact,
        pooling,
        kv_cache_tokens=112,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        scheduling_policy="priority",
    )
    embed(engine, "vector", PROMPTS[3], priority=1)
    for _ in range(4):
        engine.step()
    for number in range(3):
        generate(engine, f"text-{number}", PROMPTS[number])
    found = finish(engine)
    assert engine.stats().num_preemptions
    check_same(found["vector"], 3)
    assert [found[f"text-{number}"] for number in range(3)] == texts[:3]
    engine.close()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_draft_head_reads_beside_it(pooling: str, tmp_path: Path) -> None:
    """Of other layers; neither changes a vector or a token."""
    checkpoints.make(TARGET, tmp_path / "target")
    Head().make(tmp_path / "checkpoint")
    options = ExportOptions(precision="int4", group_size=32)
    artifact = export_model(tmp_path / "target", tmp_path / "model", options)
    head = export_head(tmp_path / "checkpoint", tmp_path / "target", tmp_path / "head", options)
    speculation = SpeculationConfig(method="eagle3", model=head, num_speculative_tokens=3)
    assert check_guessing(artifact, pooling, speculation) == 4 * 64  # of three layers besides


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe"])
def test_a_layer_of_multi_token_prediction_reads_the_same(name: str, tmp_path: Path) -> None:
    make(Mtp(name), tmp_path / "checkpoint")
    options = ExportOptions(precision="int4", group_size=32, mtp=True)
    artifact = export_model(tmp_path / "checkpoint", tmp_path / "model", options)
    speculation = SpeculationConfig(method="mtp", num_speculative_tokens=3)
    assert check_guessing(artifact, "mean", speculation) == 64


def check_guessing(artifact: Path, pooling: str, speculation: SpeculationConfig) -> int:
    """It changes neither vectors nor tokens; returns what the model tells of a token."""
    found = []
    for guessing in (None, speculation):
        engine = opened(artifact, pooling, speculation=guessing, max_num_batched_tokens=64)
        features = engine.capabilities.features
        if isinstance(speculator := engine._guessing._guesses, Speculator):
            speculator.__class__ = Eager
        for number, prompt in enumerate(PROMPTS):
            embed(engine, f"vector-{number}", prompt)
            generate(engine, f"text-{number}", prompt)
        found.append(finish(engine))
        if guessing is not None:
            counters = engine.stats().speculation
            assert counters is not None
            assert counters.num_draft_tokens
        engine.close()
    plain, guessed = found
    for number in range(4):
        assert plain[f"text-{number}"] == guessed[f"text-{number}"]
        np.testing.assert_array_equal(plain[f"vector-{number}"], guessed[f"vector-{number}"])
    return features


def test_in_python(models: dict[str, tuple[Path, Path]]) -> None:
    checkpoint, artifact = models["demo"]
    with LLM(
        artifact, provider="cpu", threads=2, kv_cache_tokens=256, matryoshka_dimensions="any"
    ) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        ids = tokenizer.encode("The sea is blue.")
        outputs = llm.embed(["The sea is blue.", TokensPrompt(prompt_token_ids=ids)])
        want = expected(checkpoint, tuple(ids), "last")
        for output, prompt in zip(outputs, ("The sea is blue.", None), strict=True):
            np.testing.assert_allclose(output.outputs.embedding, want, rtol=1e-3, atol=1e-4)
            assert output.prompt_token_ids == tuple(ids)
            assert (output.prompt, output.finished) == (prompt, True)
            assert output.metrics.finished_time_s is not None
        each = [PoolingParams(8), PoolingParams(4, normalize=False)]
        eight, four = llm.embed(["a", "b"], each)
        assert len(eight.outputs.embedding) == 8
        assert np.linalg.norm(eight.outputs.embedding) == pytest.approx(1, rel=1e-5)
        assert len(four.outputs.embedding) == 4
        [one] = llm.embed("a", PoolingParams(8), use_tqdm=False)
        assert one.outputs == eight.outputs
        assert llm.generate("a", GREEDY)[0].outputs[0].token_ids
        with pytest.raises(CapacityError, match="prompt tokens"):
            llm.embed(TokensPrompt(prompt_token_ids=[1] * 300))
    with (
        LLM(artifact, provider="cpu", threads=2, kv_cache_tokens=256) as llm,
        pytest.raises(RequestError, match=r"LLM\(embeddings=True\)"),
    ):
        llm.embed("a")


def test_what_fails_says_why(models: dict[str, tuple[Path, Path]]) -> None:
    engine = opened(models["demo"][1], "mean", kv_cache_tokens=256)
    llm = LLM.from_engine(engine)
    real = engine._runtime.model.run

    def fails(inputs: Any) -> Any:
        if 7 in inputs.input_ids:
            raise ProviderError("the token was there")
        return real(inputs)

    engine._runtime.model.run = fails  # type: ignore[method-assign]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in ([5, 6], [5, 7], [8, 9])]
    first, second, third = llm.embed(prompts)
    assert second.outputs.embedding == []
    assert "the token was there" in (second.outputs.error or "")
    assert first.outputs.embedding
    assert third.outputs.error is None
    llm.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"embeddings": 1}, "embeddings is 1; give true or false"),
        ({"score_template": 3}, "score_template is 3; give the path of a file"),
        ({"pooling": "cls"}, "must be one of last, mean"),
        ({"matryoshka_dimensions": ()}, "whole numbers above 0"),
        ({"matryoshka_dimensions": (0,)}, "whole numbers above 0"),
        ({"matryoshka_dimensions": "all"}, "whole numbers above 0"),
        ({"embeddings": False, "pooling": "mean"}, "pooling is 'mean', and embeddings is False"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CapacityError, match=words):
        EngineConfig(**options)


def test_a_provider_that_cannot_is_refused(models: dict[str, tuple[Path, Path]]) -> None:
    pytest.importorskip("openvino")
    with pytest.raises(ProviderError, match="of which embeddings are made; cpu, cuda"):
        LLM(models["demo"][1], provider="openvino", embeddings=True)


def test_the_defaults_are_vllms() -> None:
    assert Embedder() == Embedder("last", normalized=True, dimensions=None, generates=True)
