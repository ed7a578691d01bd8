"""Compares what the operator did with the reference."""

from __future__ import annotations

import numpy as np

from tests.kernels import int4_rows, reference
from tests.kernels.reference import Case

TOLERANCE = 1e-5  # of outputs, whose magnitude is about 1
# What one step of the cache's type is next to a stored value.
STEP = {"float": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def check_cache(case: Case, expected: np.ndarray, found: np.ndarray, exact: bool) -> None:
    if exact:
        assert found.tobytes() == expected.tobytes(), case.name
        return
    if case.cache_type == "int8":
        check_quantized(case, expected, found)
        return
    if case.cache_type == "int4":
        check_levels(case, expected, found)
        return
    # The operator rounds once more, to float32 ahead of the cache's type, so that a value next to
    # the middle of two steps may go to the other one; 2e-6 is for cancellation in the rotation.
    a, b = expected.astype(float), found.astype(float)
    step = STEP[case.cache_type] * (np.abs(a) + 1e-6)
    assert np.all(np.abs(a - b) <= step * 1.01 + 2e-6), case.name
    if case.cache_type != "float":
        assert np.mean(a != b) < 0.003, case.name


def check_quantized(case: Case, expected: np.ndarray, found: np.ndarray) -> None:
    """Scales a rounding apart, and numbers next to the middle of two steps at either."""
    (a, b) = (np.ascontiguousarray(x[..., -4:]).view(np.float32) for x in (expected, found))
    np.testing.assert_allclose(b, a, rtol=2.0**-14, err_msg=case.name)
    difference = np.abs(expected[..., :-4].astype(int) - found[..., :-4])
    assert difference.max() <= 1, case.name
    assert np.mean(difference != 0) < 0.003, case.name


def check_levels(case: Case, expected: np.ndarray, found: np.ndarray) -> None:
    """As `check_quantized`; another number next to the middle of two may be another level."""
    (a, b) = (int4_rows.split(rows) for rows in (expected, found))
    np.testing.assert_allclose(b[3], a[3], rtol=2.0**-14, err_msg=case.name)
    for one, other in zip(a[1:3], b[1:3], strict=True):  # steps, firsts
        assert np.abs(one - other).max() <= 1, case.name
    numbers = np.abs(int4_rows.numbers_of(expected) - int4_rows.numbers_of(found))
    assert numbers.max() <= 20, case.name  # a step, and what the first has moved by
    assert np.mean(numbers != 0) < 0.01, case.name


def check(case: Case, found: tuple[np.ndarray, np.ndarray, np.ndarray | None]) -> None:
    """Checks the output and every byte of both caches, written and untouched."""
    output, key_cache, value_cache = found
    expected_key, expected_value = reference.write_cache(case)
    plain_keys = case.cosine is None and case.k_norm is None
    check_cache(case, expected_key, key_cache, exact=plain_keys)
    if not case.latent:
        check_cache(case, expected_value, value_cache, exact=True)
    untouched = (expected_key == case.key_cache).all(axis=(2, 3))  # [num_blocks, block_size]
    assert (key_cache == case.key_cache)[untouched].all(), case.name
    # Rounded like the operator's own cache, so that what is left is the attention's error.
    expected = reference.attend(case, key_cache, value_cache)
    if case.layout == "paired":
        # Weights are rounded to bfloat16 too, each by 2 ** -8 of it at most.
        values = key_cache if case.latent else value_cache
        bound = reference.attend(case, key_cache, np.abs(values)) * 2.0**-8
        assert np.all(np.abs(output - expected) <= bound + TOLERANCE), case.name
        return
    if case.has_integers:
        check_integers(case, expected, output)
        return
    allowed = TOLERANCE * max(1.0, case.head_size / 256)  # a score is a sum over channels
    np.testing.assert_allclose(output, expected, rtol=allowed, atol=allowed, err_msg=case.name)


def check_integers(case: Case, expected: np.ndarray, found: np.ndarray) -> None:
    """The reference's numbers, but where a query or a weight lies in the middle of two steps."""
    difference = np.abs(found - expected)
    np.testing.assert_array_less(difference, 0.02, err_msg=case.name)
    other = np.mean(difference > TOLERANCE * (1 + np.abs(expected)))
    assert other < 0.15, (
        f"{case.name}: {other:.0%} differ"
    )  # all rows of few may have such a number
