"""Runs cases through driver.cpp: a count, then for each the Problem's numbers and its arrays.

An array is its size in bytes as int64, -1 for none, and its bytes. The answer is, for each case,
the bytes of the output and of both caches.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np

from tests.kernels.reference import CACHE_TYPES, Case, from_layout, to_layout

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "providers/cpu/csrc"
INCLUDES = (f"-I{CSRC}", f"-I{ROOT / 'serving/native/csrc'}")
CORE = (
    "attention",
    "isa",
    "validate",
    "kernels_avx2",
    "kernels_avx512",
    "kernels_amx",
    "kernels_avx512bf16",
    "kernels_neon",
    "matmul_amx",
    "matmul_avx2",
    "matmul_avx512vnni",
    "matmul_avxvnni",
    "matmul_dotprod",
    "matmul_i8mm",
)


def build(compiler: str, executable: Path, *options: str) -> None:
    """Compiles the driver with everything but the set-specific flags of x86."""
    sources = [str(CSRC / f"{name}.cpp") for name in (*CORE, "kernels_portable")]
    driver = str(Path(__file__).with_name("driver.cpp"))
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", *options]
    command = [compiler, *flags, *INCLUDES, driver, *sources, "-o", str(executable)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def caches(case: Case) -> list[np.ndarray | None]:
    both = ((case.key_cache, True), (case.value_cache, False))
    return [
        None if cache is None else to_layout(cache, case.memory_layout, key) for cache, key in both
    ]


def serialize(case: Case) -> bytes:
    tokens = case.query.shape[0]
    q_width, kv_width = case.num_heads * case.head_size, case.kv_heads * case.head_size
    out_width = case.num_heads * case.value_size
    numbers = (
        tokens,
        len(case.past_lengths),
        case.num_heads,
        case.kv_heads,
        case.head_size,
        case.value_size,
        case.key_cache.shape[0],
        case.block_size,
        case.block_table.shape[1],
        case.window or 0,
        case.chunked,
        case.causal,
        0 if case.cosine is None else 2 * case.cosine.shape[1],
        case.rotary_offset,
        0 if case.cosine is None else case.cosine.shape[0],
        case.interleaved,
        list(CACHE_TYPES).index(case.cache_type),
        ("canonical", "tiled", "paired").index(case.layout),
        case.latent is not None,
        q_width,
        kv_width,
        kv_width,
    )
    scale = case.scale if case.scale is not None else case.head_size**-0.5
    out = [struct.pack("22q4f", *numbers, scale, case.softcap, case.epsilon, 0.0)]
    arrays = [
        case.query,
        case.key,
        case.value,
        np.full((tokens, out_width), np.nan, np.float32),
        *caches(case),
        case.cumulative_lengths,
        np.array(case.past_lengths, np.int32),
        case.block_table,
        case.slot_mapping,
        case.cosine,
        case.sine,
        case.head_sink,
        case.q_norm,
        case.k_norm,
    ]
    for array in arrays:
        data = b"" if array is None else np.ascontiguousarray(array).tobytes()
        out += [struct.pack("q", -1 if array is None else len(data)), data]
    return b"".join(out)


def run(
    command: list[str], isa: str, cases: list[Case]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]:
    """Runs all cases in one process; the caches come back in canonical layout."""
    data = struct.pack("q", len(cases)) + b"".join(serialize(case) for case in cases)
    done = subprocess.run([*command, isa], input=data, capture_output=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    found, at = [], 0
    for case in cases:
        output = np.empty((case.query.shape[0], case.num_heads * case.value_size), np.float32)
        parts: list[np.ndarray | None] = []
        for like in (output, case.key_cache, case.value_cache):
            if like is None:
                parts.append(None)
                continue
            parts.append(np.frombuffer(done.stdout, like.dtype, like.size, at).reshape(like.shape))
            at += like.nbytes
        key_cache, value_cache = (
            None if part is None else from_layout(part, case.memory_layout, key)
            for part, key in zip(parts[1:], (True, False), strict=True)
        )
        found.append((parts[0], key_cache, value_cache))
    assert at == len(done.stdout)
    return found
