"""Models whose layers have states on the `cpu` provider: the same tokens however computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport import LLM, SamplingParams
from onnxport.errors import OptionError
from onnxport.exporter.export import export_model
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu.library import find_library, matmul_isa
from onnxport.serving import loading
from onnxport.serving.adapters.modules import modules_of
from onnxport.serving.engine import Engine
from onnxport.serving.params import RequestOptions
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.speculator import Speculator
from onnxport.serving.verify.verifier import Checks, Verifier
from tests.conformance.make import export_options
from tests.exporter import checkpoints
from tests.serving.adapting import Tensors, write_adapter
from tests.serving.prophet import Prophet

_random = random.Random(5)
SYSTEM = [_random.randrange(3, 160) for _ in range(48)]
PROMPTS = [
    SYSTEM,
    [*SYSTEM, 9, 8, 7],
    [*SYSTEM[:33], 5],
    [7, 8, 9] * 11,
    [_random.randrange(3, 160) for _ in range(70)],
    [4],
]
PARAMS = [
    SamplingParams(
        temperature=float(index % 2), seed=index, max_tokens=30, ignore_eos=True, n=1 + index % 3
    )
    for index in range(len(PROMPTS))
]
# In float32, where decomposed attention is exact, too; others as they would be served.
MADE = (
    ("qwen3.5", "int4", "custom"),
    ("qwen3-next", "fp32", "decomposed"),
    ("kimi-linear-groups", "fp32", "decomposed"),
    ("kimi-linear", "int4", "custom"),
    ("lfm2", "fp32", "decomposed"),
    ("lfm3", "fp32", "decomposed"),
    ("lfm2-moe", "int4", "custom"),
    ("granite-4", "int4", "custom"),
    ("nemotron-h", "int4", "custom"),
    ("nemotron-3", "int4", "custom"),
    ("nemotron-3", "fp32", "custom"),
)


@pytest.fixture(scope="module", params=MADE, ids=["-".join(one) for one in MADE])
def artifact(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    case, precision, attention = request.param
    if attention == "custom" and find_library() is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    folder = tmp_path_factory.mktemp(case)
    known = {**checkpoints.HYBRID, **checkpoints.SPACES, **checkpoints.SHORT_CONV}
    known |= {**checkpoints.UNGATED_EXPERTS, **checkpoints.KIMI}
    checkpoints.make(known[case], folder / "checkpoint")
    options = export_options(precision)
    return export_model(folder / "checkpoint", folder / "artifact", options), attention


def answers(
    artifact: tuple[Path, str], *, one_by_one: bool = False, again: bool = False, **options: Any
) -> tuple[Any, Any, list[int]]:
    """Tokens, statistics, and how many tokens of each prompt were cached."""
    path, attention = artifact
    chosen = {"provider": "cpu", "threads": 1, "matmul_accuracy_level": 1, "block_size": 16}
    chosen |= {"attention": attention, "kv_cache_tokens": 1024, "max_num_seqs": 12}
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    with LLM(path, **{**chosen, **options}) as llm:
        if one_by_one:
            pairs = zip(prompts, PARAMS, strict=True)
            outputs = [llm.generate([prompt], params)[0] for prompt, params in pairs]
        else:
            outputs = llm.generate(prompts, PARAMS)
        if again:
            outputs = llm.generate(prompts, PARAMS)
        llm._engine.check()
        tokens = [[one.token_ids for one in output.outputs] for output in outputs]
        return tokens, llm.stats(), [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def expected(artifact: tuple[Path, str]) -> Any:
    return answers(artifact, one_by_one=True, enable_prefix_caching=False)[0]


@pytest.mark.parametrize("seqs", [3, 12])
def test_a_batch_in_chunks(artifact: tuple[Path, str], expected: Any, seqs: int) -> None:
    assert answers(artifact, max_num_batched_tokens=24, max_num_seqs=seqs)[0] == expected


@pytest.mark.skipif(matmul_isa() is None, reason="no int8 kernels for this processor")
def test_experts_without_a_gate_in_int8(tmp_path: Path) -> None:
    """As they are served: a token's bits are those of its own rows."""
    case = checkpoints.UNGATED_EXPERTS["nemotron-3-groups"]
    checkpoints.make(case, tmp_path / "checkpoint")
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", export_options("int4"))
    served: dict[str, Any] = {"matmul_accuracy_level": None}
    alone = answers((path, "custom"), one_by_one=True, enable_prefix_caching=False, **served)[0]
    for options in ({"max_num_batched_tokens": 24}, {"kv_cache_tokens": 208}, {"again": True}):
        assert answers((path, "custom"), **options, **served)[0] == alone
    assert answers((path, "custom"))[0] != alone, "of the same arithmetic"


@pytest.mark.parametrize("errs", [1, 3])
def test_guesses_change_nothing(
    artifact: tuple[Path, str], expected: Any, errs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prophet = Prophet(lambda one: expected[PROMPTS.index([*one.prompt_token_ids])][one.index])
    prophet.errs = errs

    def guessing(*arguments: Any, **options: Any) -> Engine:
        return Engine(*arguments, **{**options, "speculator": prophet})

    monkeypatch.setattr(loading, "Engine", guessing)
    assert answers(artifact)[0] == expected
    assert prophet.num_drafted > 100
    assert (0 < prophet.num_accepted < prophet.num_drafted) == (errs == 3)


def test_what_is_found_again(artifact: tuple[Path, str], expected: Any) -> None:
    # With less for K/V fewer states are kept, for they take no more than that.
    tokens, _, cached = answers(artifact, again=True, kv_cache_tokens=4096)
    assert tokens == expected
    assert cached == [32, 48, 32, 32, 64, 0]


def test_a_pool_that_is_too_small(artifact: tuple[Path, str], expected: Any) -> None:
    tokens, stats, _ = answers(artifact, kv_cache_tokens=208)
    assert tokens == expected
    assert stats.num_preemptions > 0


def test_beams_are_those_of_a_batch_alone(artifact: tuple[Path, str]) -> None:
    path, attention = artifact
    params = SamplingParams(n=3, use_beam_search=True, max_tokens=12, ignore_eos=True)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS[:4]]
    options: dict[str, Any] = {"provider": "cpu", "threads": 1, "attention": attention}
    options |= {"kv_cache_tokens": 2048, "max_num_seqs": 12, "matmul_accuracy_level": 1}
    with LLM(path, **options) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    found, own = (
        [[one.token_ids for one in output.outputs] for output in outputs]
        for outputs in (together, alone)
    )
    assert found == own
    assert len({tuple(one) for one in found[0]}) == 3


def adapter_of_all(folder: Path, artifact: Path, seed: int) -> Path:
    """Write an adapter of every module of every layer."""
    rng, tensors = np.random.default_rng(seed), Tensors()
    for name, module in modules_of(Artifact.read(artifact).manifest.model).items():
        prefix = f"base_model.model.model.{name}.lora_"
        a = rng.standard_normal((4, module.in_features)) / module.in_features**0.5
        b = rng.standard_normal((module.out_features, 4)) / 2
        tensors |= {f"{prefix}A.weight": a.astype("f"), f"{prefix}B.weight": b.astype("f")}
    return write_adapter(folder / f"{seed}", tensors, target_modules="all-linear")


def test_adapters_have_states_of_their_own(artifact: tuple[Path, str], tmp_path: Path) -> None:
    """Cold and cached, alone and together, and where both take turns in one slot: the same tokens.

    Of a prompt that was read with one adapter, nothing is found with another one or with none.
    """
    path, attention = artifact
    if Artifact.read(path).manifest.model.latent is not None:
        pytest.skip("adapters are refused beside attention of latents: see providers.latents")
    folders = {f"{seed}": adapter_of_all(tmp_path, path, seed) for seed in (1, 2)}
    names = (None, "1", "2", "1", None, "2")
    prompts = [TokensPrompt(prompt_token_ids=PROMPTS[at]) for at in (1, 1, 1, 2, 2, 4)]
    options = [RequestOptions(adapter=name) for name in names]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, n=2)
    common: dict[str, Any] = {"provider": "cpu", "threads": 1, "matmul_accuracy_level": 1}
    common |= {"attention": attention, "kv_cache_tokens": 2048, "block_size": 16}

    def told(outputs: Any) -> list[list[tuple[int, ...]]]:
        return [[tuple(one.token_ids) for one in output.outputs] for output in outputs]

    with LLM(path, **common, max_adapters=2, enable_prefix_caching=False) as llm:
        for name, folder in folders.items():
            llm.load_adapter(name, folder)
        expected = [
            told(llm.generate([prompt], params, options=[option]))[0]
            for prompt, option in zip(prompts, options, strict=True)
        ]
    assert len({tokens for one in expected[:3] for tokens in one}) == 3  # adapters tell
    for sizes in ({"max_adapters": 2}, {"max_adapters": 1, "max_host_adapters": 2}):
        with LLM(path, **common, **sizes, max_num_seqs=12, max_num_batched_tokens=24) as llm:
            for name, folder in folders.items():
                llm.load_adapter(name, folder)
            apart = [
                llm.generate([prompt], params, options=[option])[0]
                for prompt, option in zip(prompts[:3], options, strict=False)
            ]
            assert [output.num_cached_tokens for output in apart] == [0, 0, 0]
            again = llm.generate(prompts, params, options=options)
            assert all(output.num_cached_tokens >= 32 for output in again[:3])
            llm._engine.check()
        assert told(apart) == expected[:3]
        assert told(again) == expected


def test_verify(artifact: tuple[Path, str]) -> None:
    path, attention = artifact
    options = LoadOptions(threads=1, attention=attention)  # type: ignore[arg-type]
    report = Verifier(Artifact.read(path), options, Checks(speed=False)).verify("cpu")
    assert (report.state, report.reason) == ("passed", "")
    for mode in report.modes:
        assert {one.name: (one.state, one.reason) for one in mode.variants} == dict.fromkeys(
            ("batched", "chunked", "cached", "preempted"), ("passed", "")
        )
    assert {one.tokens.state for one in report.transfers} == {"skipped"}


def test_what_does_not_go_with_states_is_refused(artifact: tuple[Path, str]) -> None:
    with pytest.raises(OptionError, match=r"kv_host_memory .*\. Leave them out"):
        LLM(artifact[0], provider="cpu", kv_host_memory=1 << 20, max_adapters=1)


@pytest.mark.parametrize("method", ["ngram", "suffix", "grammar"])
def test_guesses_by_options(artifact: tuple[Path, str], method: str) -> None:
    path, attention = artifact
    config = SpeculationConfig(method)  # type: ignore[arg-type]
    with LLM(path, provider="cpu", threads=1, attention=attention, speculation=config) as llm:
        guesses = llm._engine._guessing._guesses
        assert isinstance(guesses, Speculator)
        assert guesses._recomputes
        [output] = llm.generate([TokensPrompt(prompt_token_ids=PROMPTS[3])], PARAMS[0])
        assert len(output.outputs[0].token_ids) == 30
