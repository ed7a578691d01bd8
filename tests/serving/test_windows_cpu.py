"""Models with windows on the `cpu` provider: the same tokens as with one table for all layers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from onnxport import LLM, SamplingParams
from onnxport.providers.cpu.library import find_library
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.speculation.config import SpeculationConfig
from tests.providers.conftest import ArtifactMaker

_random = random.Random(5)
SYSTEM = [_random.randrange(3, 160) for _ in range(48)]
PROMPTS = [
    SYSTEM,
    [*SYSTEM, 9, 8, 7],
    [*SYSTEM[:33], 5],
    [7, 8, 9] * 11,  # whose continuation is guessed
    [_random.randrange(3, 160) for _ in range(70)],
    [4],
]
PARAMS = [
    SamplingParams(
        temperature=float(index % 2), seed=index, max_tokens=30, ignore_eos=True, n=1 + index % 3
    )
    for index in range(len(PROMPTS))
]
TOKENS = 208  # of which one prompt with its answers takes up to half


@pytest.fixture(scope="module", params=["alternating", "gpt-oss", "mistral-window"])
def artifact(
    request: pytest.FixtureRequest, tiny_artifact: ArtifactMaker, alternating_artifact: Path
) -> Path:
    if find_library() is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    if request.param == "alternating":
        return alternating_artifact
    return tiny_artifact(request.param, "int4")


def answers(
    artifact: Path, *, one_by_one: bool = False, again: bool = False, **options: Any
) -> tuple[Any, Any, list[int]]:
    """Tokens, statistics, and how many tokens of each prompt were cached."""
    chosen = {"provider": "cpu", "threads": 1, "matmul_accuracy_level": 1, "block_size": 16}
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    with LLM(artifact, **{**chosen, "kv_cache_tokens": TOKENS, **options}) as llm:
        if one_by_one:
            pairs = zip(prompts, PARAMS, strict=True)
            outputs = [llm.generate([prompt], params)[0] for prompt, params in pairs]
        else:
            outputs = llm.generate(prompts, PARAMS)
        if again:
            outputs = llm.generate(prompts, PARAMS)
        tokens = [[one.token_ids for one in output.outputs] for output in outputs]
        return tokens, llm.stats(), [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def expected(artifact: Path) -> Any:
    plain: dict[str, Any] = {"hybrid_kv_cache": False, "enable_prefix_caching": False}
    return answers(artifact, one_by_one=True, **plain)[0]


def test_a_batch_in_chunks(artifact: Path, expected: Any) -> None:
    assert answers(artifact, max_num_batched_tokens=24, max_num_seqs=6)[0] == expected


def test_what_is_found_again(artifact: Path, expected: Any) -> None:
    tokens, _, cached = answers(artifact, again=True, kv_cache_tokens=1024)
    assert tokens == expected
    assert cached[:2] == [32, 48]


def test_swapping_in_a_pool_that_is_too_small(artifact: Path, expected: Any) -> None:
    swapped = {"preemption": "swap", "kv_host_memory": 1 << 22, "kv_cache_tokens": 112}
    tokens, stats, _ = answers(artifact, **swapped)
    assert tokens == expected
    assert stats.num_preemptions > 0
    assert stats.num_blocks_loaded > 0


def test_guesses(artifact: Path, expected: Any) -> None:
    """The model guesses for itself, so that most are right; those of a draft have one table."""
    config = SpeculationConfig("draft_model", 4, model=artifact, kv_cache_tokens=4096)
    tokens, stats, _ = answers(artifact, speculation=config, max_num_seqs=4)
    assert tokens == expected
    assert stats.speculation.num_accepted_tokens > 0  # how many depends on what steps take


def test_a_restart(artifact: Path, expected: Any, tmp_path: Path) -> None:
    options = {"kv_disk": tmp_path, "preemption": "recompute"}
    assert answers(artifact, **options)[0] == expected
    tokens, stats, cached = answers(artifact, **options)
    assert tokens == expected
    assert stats.num_tier_errors == 0
    assert cached[0] == 32
