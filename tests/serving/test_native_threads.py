"""The native sampler's threads: the same bits with any number, many callers, forks, exits."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.providers.memory import physical_cores
from onnxport.serving.sampler import logprobs, native_sampler, sample, sample_greedy
from tests.kernels.test_sanitized import runtime
from tests.serving.samplers import ISAS, native
from tests.serving.sampling_cases import mixed_batch
from tests.tiers import examples
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "serving/native/csrc"
LOGITS, PARAMS = mixed_batch(56, 20_011)  # wide enough to be sampled, and shared


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(20), deadline=None)
@given(num_threads=st.integers(2, 9), num_rows=st.integers(1, 56), first=st.integers(0, 55))
def test_a_row_has_the_same_bits_with_any_number_of_threads(
    isa: str, num_threads: int, num_rows: int, first: int
) -> None:
    logits, params = LOGITS[first : first + num_rows], PARAMS[first : first + num_rows]
    single = native(isa).sample(logits, params)
    assert native(isa, num_threads).sample(logits, params) == single


@pytest.mark.parametrize("num_threads", [2, 3, 16])
def test_greedy_rows_and_log_probabilities_have_the_same_bits_too(num_threads: int) -> None:
    several, single = native(num_threads=num_threads), native()
    assert several.sample_greedy(LOGITS) == single.sample_greedy(LOGITS)
    finite = np.abs(LOGITS).clip(0, 1e30)
    tokens, counts = list(range(56)), [3] * 56
    assert several.logprobs(finite, tokens, counts) == single.logprobs(finite, tokens, counts)


def test_the_caller_says_how_many_threads_there_are() -> None:
    single, default = native_sampler(1), native_sampler()
    if single is None or default is None:
        pytest.skip("the sampling library was not built")
    assert single.num_threads == 1
    assert default.num_threads == physical_cores()
    assert sample(LOGITS, PARAMS, 3) == single.sample(LOGITS, PARAMS)
    assert sample_greedy(LOGITS, 3) == single.sample_greedy(LOGITS)
    expected = single.logprobs(LOGITS[:1], [7], [2])
    assert logprobs(LOGITS[:1], [7], [2], 3) == expected


def stress(rounds: int) -> None:
    """Run pool_stress in a process of its own."""
    native()  # or the test is skipped
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.pool_stress", str(rounds)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{2 * rounds} calls" in done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_callers_at_once_forks_and_the_interpreter_s_end() -> None:
    stress(10)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_many_callers_at_once_forks_and_ends() -> None:
    for _ in range(5):
        stress(200)


def build(executable: Path, *options: str) -> None:
    """Compile the driver of the threads alone."""
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", *options]
    sources = [str(Path(__file__).with_name("pool_driver.cpp")), str(CSRC / "pool.cpp")]
    command = ["g++", *flags, f"-I{CSRC}", *sources, "-o", str(executable)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def drive(executable: Path, what: str) -> None:
    done = subprocess.run(
        [str(executable), what], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_every_helper_comes_and_each_item_is_done_once(tmp_path: Path) -> None:
    build(tmp_path / "driver")
    drive(tmp_path / "driver", "meet")
    drive(tmp_path / "driver", "many")


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="needs g++'s ThreadSanitizer")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_threads_sanitized(tmp_path: Path) -> None:
    if not os.path.isabs(runtime("libtsan.so")):
        pytest.skip("g++ has no ThreadSanitizer library")
    build(tmp_path / "driver", "-fsanitize=thread", "-g1")
    drive(tmp_path / "driver", "many")
