"""Run random cases and refusals through a sanitized library; a report of the sanitizer's is fatal.

LD_PRELOAD=libasan.so ASAN_OPTIONS=detect_leaks=0 python -m tests.kernels.sanitized LIBRARY CASES
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
from pathlib import Path

from onnxport.providers.cpu.library import load_library
from tests.kernels import (
    coarse_cases,
    experts_cases,
    float_experts_cases,
    fp4_cases,
    gather_cases,
    latent_cases,
    linear_cases,
    matmul_cases,
    matmul_lora_cases,
    mlp_cases,
    mlp_lora_cases,
    norm_cases,
    run_ort,
)
from tests.kernels.cases import random_case
from tests.kernels.checks import check
from tests.kernels.conftest import ISAS
from tests.kernels.test_errors import BAD_INPUTS, small_case
from tests.kernels.test_matmul import ISAS as MATMUL_ISAS

FIRST_SEED = 10_000  # others than the plain tests'


def main() -> None:
    path, num_cases = Path(sys.argv[1]), int(sys.argv[2])
    library = load_library(path)
    isas = [isa for isa in ISAS if library.onnxport_cpu_set_isa(isa.encode())]
    seeds = range(FIRST_SEED, FIRST_SEED + num_cases)
    latents = [latent_cases.random_case(seed) for seed in seeds[: num_cases // 4]]
    for case in itertools.chain(map(random_case, seeds), latents):
        for isa in isas:
            library.onnxport_cpu_set_isa(isa.encode())
            check(case, run_ort.run(path, case))
    matmul_isas = [n for n in MATMUL_ISAS if library.onnxport_cpu_set_matmul_isa(n.encode())]
    for seed in range(FIRST_SEED, FIRST_SEED + num_cases // 2):
        product = matmul_cases.random_case(seed)
        for isa in matmul_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            matmul_cases.check(product, matmul_cases.run(path, product))
        layer = mlp_cases.random_case(seed)
        for isa in matmul_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            fused = mlp_cases.run(path, layer, mlp_cases.fused(layer))
            apart = mlp_cases.run(path, layer, mlp_cases.separate(layer))
            assert fused.tobytes() == apart.tobytes(), (seed, isa)
            norm = norm_cases.random_norm(seed, layer.x)
            serialized = norm_cases.add_norm(mlp_cases.fused(layer), norm)
            _, residual = norm_cases.run(path, serialized, layer.x, norm)
            assert residual.tobytes() == (layer.x + norm.skip).tobytes(), (seed, isa)
    for seed in range(FIRST_SEED, FIRST_SEED + num_cases // 10):
        dtype = ("int8", "int4")[seed // 2 % 2]
        adapted = mlp_lora_cases.make_case(seed, 1 + seed % 40, dtype)
        alone = matmul_lora_cases.make_case(seed, 1 + seed % 40, (4, 8)[seed % 2], dtype)
        for isa in isas:
            library.onnxport_cpu_set_isa(isa.encode())
            found = mlp_lora_cases.run(path, adapted, mlp_lora_cases.fused(adapted))
            mlp_lora_cases.check(adapted, found)
            matmul_lora_cases.check(alone, matmul_lora_cases.run(path, alone))
    for seed in range(FIRST_SEED, FIRST_SEED + num_cases // 5):
        make = (experts_cases.random_case, experts_cases.random_case_with_extras)[seed % 2]
        second = (
            fp4_cases.random_case(seed) if seed % 2 else experts_cases.without_gates(make(seed))
        )
        both = (make(seed), second)
        for isa, experts in itertools.product(matmul_isas, both):
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            wanted = experts_cases.expected(path, experts)
            assert experts_cases.run(path, experts).tobytes() == wanted.tobytes(), (seed, isa)
        floats = float_experts_cases.random_case(seed)
        if seed % 3 == 0:
            floats = float_experts_cases.without_gates(floats, seed)
        for isa in isas:
            library.onnxport_cpu_set_isa(isa.encode())
            float_experts_cases.check(floats, float_experts_cases.run(path, floats))
    for seed in range(FIRST_SEED, FIRST_SEED + num_cases // 10):
        few, calls = coarse_cases.with_calls(coarse_cases.random_case(seed), seed)
        for isa in matmul_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            whole = matmul_cases.run(path, few)
            coarse = matmul_cases.session(path, coarse_cases.add_asked(matmul_cases.model(few)))
            for asked in calls:
                found = coarse.run(["y"], {"x": few.x, **asked.feeds()})[0]
                coarse_cases.check(found, whole, *asked)
    for seed in range(FIRST_SEED, FIRST_SEED + num_cases // 5):
        for linear in (linear_cases.random_conv(seed), linear_cases.random_delta(seed)):
            for isa in isas:
                library.onnxport_cpu_set_isa(isa.encode())
                linear_cases.check(linear, linear_cases.run(path, linear))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(FIRST_SEED, FIRST_SEED + num_cases // 2):
            gather_cases.check(path, Path(folder), gather_cases.random_case(seed))
    for feeds in BAD_INPUTS.values():
        with contextlib.suppress(Exception):
            run_ort.run(path, small_case(rotary_offset=0), feeds=feeds)
            raise SystemExit(f"accepted {feeds}")
    print(f"{num_cases} cases with each of {', '.join(isas + matmul_isas)}")


if __name__ == "__main__":
    main()
