"""Identical tokens after a restart, also of another provider; on small real models.

Exact to the token, since weights are exact in fp32, and int4 ones are multiplied in fp32.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport import LLM, SamplingParams
from onnxport.kv.disk_file import CHECKSUM_BYTES
from onnxport.providers.cpu.library import find_library
from onnxport.serving.prompts import TokensPrompt
from tests.providers.conftest import ArtifactMaker

_random = random.Random(3)
SYSTEM = [_random.randrange(3, 160) for _ in range(40)]
PROMPTS = [
    SYSTEM,
    [*SYSTEM, 9, 8, 7],
    [*SYSTEM[:33], 5],
    [*SYSTEM[:20], *SYSTEM],
    [_random.randrange(3, 160) for _ in range(25)],
    [4],
]
PARAMS = [
    SamplingParams(
        temperature=float(index % 2), seed=index, max_tokens=12, ignore_eos=True, n=1 + index % 3
    )
    for index in range(len(PROMPTS))
]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def artifact(request: pytest.FixtureRequest, tiny_artifact: ArtifactMaker) -> Path:
    if find_library() is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    return tiny_artifact("qwen2" if request.param == "int4" else "llama", request.param)


def completions(artifact: Path, *, one_by_one: bool = False, **options: Any) -> Any:
    chosen = {
        "provider": "cpu",
        "threads": 1,
        "matmul_accuracy_level": 1,
        "kv_cache_tokens": 1024,
        "block_size": 16,
        **options,
    }
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
    with LLM(artifact, **chosen) as llm:
        if one_by_one:
            outputs = []
            for prompt, params in zip(prompts, PARAMS, strict=True):
                outputs += llm.generate([prompt], params)
        else:
            outputs = llm.generate(prompts, PARAMS)
        found = [[one.token_ids for one in output.outputs] for output in outputs]
        return found, llm._engine.stats(), [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def expected(artifact: Path) -> Any:
    return completions(artifact, one_by_one=True, enable_prefix_caching=False)[0]


def test_restart(artifact: Path, expected: Any, tmp_path: Path) -> None:
    options = {"kv_disk": tmp_path, "preemption": "recompute"}
    assert completions(artifact, **options)[0] == expected
    found, stats, cached = completions(artifact, block_size=32, **options)
    assert found == expected
    assert cached[0] == 32
    assert (stats.num_blocks_loaded > 0, stats.num_tier_errors) == (True, 0)


def test_a_restart_uses_no_numbers_of_a_disk_that_are_not_finite(
    artifact: Path, expected: Any, tmp_path: Path
) -> None:
    """Earlier builds wrote what they had; who goes on from it fails. What was read is made anew."""
    options = {"kv_disk": tmp_path, "preemption": "recompute"}
    completions(artifact, **options)
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.kv")}
    for path, data in whole.items():
        content = data[: -CHECKSUM_BYTES - 4] + np.float32(np.nan).tobytes()
        path.write_bytes(content + hashlib.sha256(content).digest())
    found, stats, cached = completions(artifact, **options)
    assert found == expected
    assert (cached[0], stats.num_blocks_loaded) == (0, 0)
    mended = [path for path, data in whole.items() if path.read_bytes() == data]
    assert len(mended) == stats.num_tier_errors > 0
    found, stats, cached = completions(artifact, **options)
    assert found == expected
    assert (cached[0], stats.num_blocks_loaded > 0) == (16, True)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_cache_of_integers_changes_nothing_on_its_way_through_the_tiers(
    artifact: Path, tmp_path: Path, dtype: str
) -> None:
    """Blocks leave and come back byte by byte: no token depends on it."""
    packed = {"kv_cache_dtype": dtype}
    expected = completions(artifact, one_by_one=True, enable_prefix_caching=False, **packed)[0]
    swapped = {"preemption": "swap", "kv_host_memory": 1 << 22, "kv_cache_tokens": 144}
    found, stats, _ = completions(artifact, **packed, **swapped)
    assert found == expected
    assert (stats.num_preemptions > 0, stats.num_blocks_loaded > 0) == (True, True)
    kept = {"kv_disk": tmp_path, "preemption": "recompute"}
    assert completions(artifact, **packed, **kept)[0] == expected
    found, stats, cached = completions(artifact, block_size=32, **packed, **kept)
    assert found == expected
    assert cached[0] == 32
    assert (stats.num_blocks_loaded > 0, stats.num_tier_errors) == (True, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"attention": "decomposed", "block_size": 48},
        {"provider": "openvino", "kv_cache_dtype": "float32", "block_size": None},
    ],
    ids=["decomposed", "openvino"],
)
def test_restart_on_another_provider(
    artifact: Path, expected: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    if other.get("provider") == "openvino":
        pytest.importorskip("openvino", reason="openvino is not installed (the openvino extra)")
    there = {"kv_disk": tmp_path / "there"}
    back = {"kv_disk": tmp_path / "back"}
    completions(artifact, **there)
    found, stats, cached = completions(artifact, **there, **other)
    assert found == expected
    assert (cached[3] > 0, stats.num_blocks_loaded > 0, stats.num_tier_errors) == (True, True, 0)
    completions(artifact, **back, **other)
    found, stats, cached = completions(artifact, **back)
    assert found == expected
    assert (cached[3] > 0, stats.num_blocks_loaded > 0, stats.num_tier_errors) == (True, True, 0)
