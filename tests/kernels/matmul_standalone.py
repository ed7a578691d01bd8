"""Builds matmul_driver.cpp and runs products and feed-forward layers through it.

The input is the numbers of products, of layers, of products of few outputs and of layers of
experts, then for each product K, N, bits, block_size, rows, whether there is a norm, whether
weights are E2M1 and whether there are zero points, 1, or offsets, 2, as int64, the activations,
quants, scales, which are bytes of E8M0 beside E2M1, zero points or offsets, and the norm's epsilon,
skip and gamma; a layer is two of them, the second one without rows or a norm. A product of few
outputs is followed by the number of its calls, of each how many outputs of the rows must be exact
as int32, and whether the calls are concurrent. A layer of experts has the weights of all of them,
and is followed by how many there are, how many a row goes to, whether weights are normalized and
whether there are biases as int64, alpha, the offset and the limit, the biases, and the logits. The
answer is the bytes of each output, and after it, where there is a norm, of what it added up.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.kernels.coarse_cases import Asked
from tests.kernels.experts_cases import ExpertsCase, joined
from tests.kernels.matmul_cases import Floats, MatMulCase
from tests.kernels.mlp_cases import MlpCase
from tests.kernels.norm_cases import Norm
from tests.kernels.standalone import CORE, CSRC, INCLUDES


def build(
    compiler: str,
    folder: Path,
    set_flags: dict[str, str],
    *options: str,
    driver: str = "matmul_driver",
) -> Path:
    """Compiles a driver; `set_flags` are those of the sources named, as CMake gives them."""
    names = (
        *("coarse", "coarse_plane", "coarse_run", "experts", "float_experts"),
        *("causal_conv", "delta_net", "state_slots"),
        *("kernels_portable", "lora", "matmul", "mlp", "mlp_lora", "pack", "pages"),
        *("routed_rows", "routing"),
        *("summary_avx2", "summary_avx512", "summary_portable"),
    )
    sources = [CSRC / f"{name}.cpp" for name in (*CORE, *names)]
    sources.append(Path(__file__).with_name(f"{driver}.cpp"))
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", *options]
    objects = []
    for source in sources:
        objects.append(str(folder / f"{source.stem}.o"))
        own = set_flags.get(source.stem, "").split()
        if source.stem.startswith(("routing", "summary_")):
            own.append("-ffp-contract=off")
        _run([compiler, *flags, *own, *INCLUDES, "-c", str(source), "-o", objects[-1]])
    executable = folder / driver
    _run([compiler, *flags, *objects, "-o", str(executable)])
    return executable


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run(command: list[str], isa: str, cases: list[MatMulCase]) -> list[Floats]:
    """Runs all cases in one process; each output is [rows, N]."""
    shapes = [(len(case.rows()), case.n) for case in cases]
    products = [(case, None) for case in cases]
    return _run_driver([*command, isa], (len(cases), 0, 0, 0), products, shapes)


def run_normalized(
    command: list[str], isa: str, cases: list[tuple[MatMulCase, Norm]]
) -> list[Floats]:
    """Runs all cases in one process; of each the output [rows, N], then the residual [rows, K]."""
    shapes = [shape for case, _ in cases for shape in ((len(case.x), case.n), case.x.shape)]
    return _run_driver([*command, isa], (len(cases), 0, 0, 0), cases, shapes)


def run_layers(command: list[str], isas: list[str], cases: list[MlpCase]) -> list[Floats]:
    """Runs all layers in one process; each output is [rows, N]."""
    shapes = [(len(case.x), case.down.n) for case in cases]
    products = [(of, None) for case in cases for of in _parts(case)]
    return _run_driver([*command, *isas], (0, len(cases), 0, 0), products, shapes)


def run_normalized_layers(
    command: list[str], isas: list[str], cases: list[tuple[MlpCase, Norm]]
) -> list[Floats]:
    """Runs all layers in one process; of each the output [rows, N], then the residual [rows, K]."""
    shapes = [shape for case, _ in cases for shape in ((len(case.x), case.down.n), case.x.shape)]
    products = []
    for case, norm in cases:
        first, second = _parts(case)
        products += [(first, norm), (second, None)]
    return _run_driver([*command, *isas], (0, len(cases), 0, 0), products, shapes)


def run_coarse(
    command: list[str],
    isa: str,
    cases: list[tuple[MatMulCase, list[Asked]]],
    at_once: bool = False,
) -> list[list[Floats]]:
    """Runs cases and what their calls ask in one process; of each case each call's [rows, N]."""
    parts, shapes = [struct.pack("4q", 0, 0, len(cases), 0)], []
    for case, calls in cases:
        parts += [_serialize(case), struct.pack("q", len(calls))]
        for exact, *optional in calls:
            parts.append(exact.tobytes())
            for given in optional:
                parts.append(struct.pack("q", given is not None))
                parts.append(b"" if given is None else given.tobytes())
        parts.append(struct.pack("q", at_once))
        shapes += [(len(case.x), case.n)] * len(calls)
    found = iter(_run_bytes([*command, isa], b"".join(parts), shapes))
    return [[next(found) for _ in calls] for _, calls in cases]


def run_experts(command: list[str], isas: list[str], cases: list[ExpertsCase]) -> list[Floats]:
    """Runs all layers of experts in one process; each output is [rows, N]."""
    parts, shapes = [struct.pack("4q", 0, 0, 0, len(cases))], []
    for case in cases:
        parts += [_serialize(of) for of in joined(case)]
        extras = case.extras
        biases = [one for one in (extras.gate_up_bias, extras.down_bias) if one is not None]
        assert len(biases) in (0, 2), "both biases or none"
        sizes = (len(case.experts), case.top_k, case.normalize, len(biases) > 0)
        parts.append(struct.pack("4q3f", *sizes, extras.alpha, extras.up_offset, extras.limit))
        parts += [bias.tobytes() for bias in biases]
        parts.append(case.logits.tobytes())
        shapes.append((len(case.x), case.experts[0].down.n))
    return _run_bytes([*command, *isas], b"".join(parts), shapes)


def _parts(case: MlpCase) -> tuple[MatMulCase, MatMulCase]:
    return case.gate_up, case.down.replace(x=case.down.x[:0])


def _run_driver(
    command: list[str],
    counts: tuple[int, int, int, int],
    products: Sequence[tuple[MatMulCase, Norm | None]],
    shapes: list[tuple[int, ...]],
) -> list[Floats]:
    parts = [struct.pack("4q", *counts), *(_serialize(case, norm) for case, norm in products)]
    return _run_bytes(command, b"".join(parts), shapes)


def _serialize(case: MatMulCase, norm: Norm | None = None) -> bytes:
    rows = case.rows()
    zeros = 1 if case.zero_points is not None else 2 if case.offsets is not None else 0
    flags = (norm is not None, case.is_fp4, zeros)
    sizes = (case.k, case.n, case.bits, case.block_size, len(rows), *flags)
    arrays = [rows, case.quants, case.stored_scales]
    if case.zero_points is not None:
        arrays.append(case.stored_zero_points)
    if case.offsets is not None:
        arrays.append(case.offsets)
    if norm is not None:
        arrays += [np.float32(norm.epsilon), norm.skip, norm.gamma]
    return struct.pack("8q", *sizes) + b"".join(np.asarray(a, order="C").tobytes() for a in arrays)


def _run_bytes(command: list[str], data: bytes, shapes: list[tuple[int, ...]]) -> list[Floats]:
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    values = np.frombuffer(done.stdout, np.float32)
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    assert ends[-1] == len(values)
    outputs = np.split(values, ends[:-1])
    return [part.reshape(shape) for part, shape in zip(outputs, shapes, strict=True)]
