"""What no token of a sequence lies in, or none that it sees, reaches no output."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import run_ort
from tests.kernels.cases import cache_contents
from tests.kernels.checks import check
from tests.kernels.reference import Case
from tests.tiers import crossed

KINDS = [("float", "tiled"), ("float16", "tiled"), ("bfloat16", "paired"), ("int8", "tiled")]
KINDS += [("int4", "tiled")]
# Past and new tokens: one row, few and many, whose keys end in the middle of a pair, of a tile, of
# what is multiplied at once, and behind a whole chunk.
LENGTHS = [(900, 1), (0, 1), (70, 3), (64, 49), (531, 60), (0, 97), (127, 65)]

# Tokens whose rows are multiplied together, at most: in two tiles with AMX, else in registers,
# where a token has three rows. See `attention.h`.
TOKENS_TOGETHER = {"amx": 32}
FEW_TOKENS = 7


def case_with_garbage(
    rng: np.random.Generator,
    kind: tuple[str, str],
    lengths: tuple[int, int],
    window: int | None,
    heads: tuple[int, int] = (2, 3),
) -> Case:
    """One sequence in a cache whose other slots are NaN, or of integers have it as their scale."""
    (cache_type, layout), (past, new) = kind, lengths
    block_size, (kv_heads, group), head_size = 32, heads, 64
    blocks = -(-(past + new) // block_size)
    table = rng.permutation(blocks).astype(np.int32)[None]
    shape = (blocks, block_size, kv_heads, head_size)

    def normal(heads: int) -> np.ndarray:
        return rng.standard_normal((new, heads, head_size)).astype(np.float32)

    def cache() -> np.ndarray:
        contents = cache_contents(rng, shape, cache_type)
        seen = range(max(0, past - window + 1) if window else 0, past + new)
        unused = np.ones(shape[:2], bool)
        unused[[table[0, t // block_size] for t in seen], [t % block_size for t in seen]] = False
        contents[unused] = np.frombuffer(b"\xff" * 4, contents.dtype)[0]
        return contents

    return Case(
        num_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=head_size,
        query=normal(kv_heads * group),
        key=normal(kv_heads),
        value=normal(kv_heads),
        key_cache=cache(),
        value_cache=cache(),
        past_lengths=[past],
        new_lengths=[new],
        block_table=table,
        cache_type=cache_type,
        layout=layout,
        window=window,
        name=f"{kind} {lengths} {window}",
    )


@pytest.mark.parametrize(("lengths", "kind"), crossed(5, LENGTHS, KINDS))
def test_nothing_of_an_unused_slot_is_seen(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    kind: tuple[str, str],
    lengths: tuple[int, int],
) -> None:
    for window in (None, 21, 300):
        case = case_with_garbage(np.random.default_rng(7), kind, lengths, window)
        for isa in available_isas:
            assert library.onnxport_cpu_set_isa(isa.encode())
            output, keys, values = run_ort.run(library_path, case)
            assert np.isfinite(output).all(), (isa, case.name)
            check(case, (output, keys, values))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", [np.inf, np.nan])
def test_a_value_that_is_not_finite_reaches_no_tokens_but_those_right_before(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    kind: tuple[str, str],
    what: float,
) -> None:
    case = case_with_garbage(np.random.default_rng(7), kind, (3, 97), None)
    at = 44
    spoiled = replace(case, value=case.value.copy())
    spoiled.value[at] = what
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        output, *_ = run_ort.run(library_path, case)
        found, *_ = run_ort.run(library_path, spoiled)
        reach = 0 if case.has_integers else TOKENS_TOGETHER.get(isa, FEW_TOKENS) - 1
        assert np.array_equal(found[: at - reach], output[: at - reach]), isa
        assert not np.isfinite(found[at:]).any(), isa
