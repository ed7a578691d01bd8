"""Layers of experts in MXFP4: random cases."""

from __future__ import annotations

import numpy as np

from tests.kernels import experts_cases, matmul_cases
from tests.kernels.experts_cases import COUNTS, DEPTHS, INNERS, INT4, ROWS, WIDTHS, ExpertsCase
from tests.kernels.mlp_cases import MlpCase


def random_case(seed: int) -> ExpertsCase:
    """With GPT-OSS's activation, but a power of two for alpha, and biases; some without them."""
    rng = np.random.default_rng(2000 + seed)
    sizes = (int(rng.choice(DEPTHS)), int(rng.choice(INNERS)), int(rng.choice(WIDTHS)))
    # What fits in float16 with and without subnormal numbers, and what does not.
    exponents = ((115, 124), (104, 130), (60, 140))[seed // 3 % 3]
    count = COUNTS[seed % len(COUNTS)]
    case = make_case(seed, sizes, ROWS[seed % len(ROWS)], count, exponents)
    case = case.replace(normalize=bool(rng.integers(2)))
    if seed % 4 == 0:
        return case
    extras = experts_cases.random_extras(seed, case)
    return case.replace(extras=extras.replace(alpha=(0.5, 1.0, 2.0)[seed % 3]))


def make_case(
    seed: int,
    sizes: tuple[int, int, int],
    rows: int,
    count: tuple[int, int],
    exponents: tuple[int, int] = (115, 124),
) -> ExpertsCase:
    """A layer in MXFP4, whose scales are E8M0 from one to another."""
    case = experts_cases.make_case(seed, (INT4, INT4), sizes, rows, count)
    experts = [
        MlpCase(
            matmul_cases.as_fp4(seed + 2 * i, of.gate_up, exponents),
            matmul_cases.as_fp4(seed + 2 * i + 1, of.down, exponents),
        )
        for i, of in enumerate(case.experts)
    ]
    return case.replace(experts=experts)
