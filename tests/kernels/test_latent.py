"""Latent rows: right with every instruction set, to the same bits in any batch and chunks."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import run_ort
from tests.kernels.cases import rotary
from tests.kernels.checks import check
from tests.kernels.latent_cases import KINDS, latent, random_case
from tests.kernels.reference import Case, quantize
from tests.kernels.test_invariance import (
    check_each_alone,
    check_in_chunks,
    mixed_case,
    most_floats,
    sharing_case,
)
from tests.kernels.test_unused_slots import LENGTHS, case_with_garbage
from tests.tiers import crossed, every

NUM_CASES = 200
GROUP = 20
VALUE_SIZE = 32  # of the 64 channels that cases of invariance have


@pytest.mark.parametrize("first", every(5, range(0, NUM_CASES, GROUP)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], first: int
) -> None:
    for seed in range(first, first + GROUP):
        case = random_case(seed)
        for isa in available_isas:
            assert library.onnxport_cpu_set_isa(isa.encode())
            check(case, run_ort.run(library_path, case))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", every(2, [0, 1]))
def test_batch_chunks_and_threads(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    kind: tuple[str, str],
    seed: int,
) -> None:
    case = latent(mixed_case(seed, *kind, heads=(1, (16, 5)[seed])), VALUE_SIZE)
    for isa in available_isas:
        check_in_chunks(library_path, library, isa, case)


@pytest.mark.parametrize(("kind", "seed"), crossed(2, KINDS, [2, 3]))
def test_sequences_that_share_blocks(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    kind: tuple[str, str],
    seed: int,
) -> None:
    """Rows of several go together over the keys they share, and get the bits they have alone."""
    case = latent(sharing_case(seed, *kind), VALUE_SIZE)
    for isa in available_isas:
        check_each_alone(library_path, library, isa, case)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_are_divided_or_not(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], kind: tuple[str, str]
) -> None:
    """Along their keys, as far as memory is meant for that: a part of them, all, or none."""
    case = latent(mixed_case(0, *kind, heads=(1, 16)), VALUE_SIZE)
    for isa in available_isas:
        library.onnxport_cpu_set_isa(isa.encode())
        whole = run_ort.run(library_path, case, threads=2)[0].tobytes()
        for floats in (0, 3_000, 30_000, 1 << 40):
            with most_floats(library, floats):
                assert run_ort.run(library_path, case, threads=2)[0].tobytes() == whole


@pytest.mark.parametrize(("lengths", "kind"), crossed(5, LENGTHS, KINDS))
def test_nothing_of_an_unused_slot_is_seen(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    kind: tuple[str, str],
    lengths: tuple[int, int],
) -> None:
    for window in (None, 21, 300):
        garbage = case_with_garbage(np.random.default_rng(7), kind, lengths, window, heads=(1, 16))
        case = latent(garbage, VALUE_SIZE)
        for isa in available_isas:
            assert library.onnxport_cpu_set_isa(isa.encode())
            found = run_ort.run(library_path, case)
            assert np.isfinite(found[0]).all(), (isa, case.name)
            check(case, found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_with_memory_of_its_own(library_path: Path, kind: tuple[str, str]) -> None:
    case = random_case(KINDS.index(kind))
    before = case.key_cache.copy()
    in_place = run_ort.run(library_path, case)
    apart = run_ort.run(library_path, case, in_place=False)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(in_place[:2], apart[:2], strict=True))
    assert case.key_cache.tobytes() == before.tobytes()


def test_integers_have_the_same_bits_with_every_set(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """What is stored, whose rounding depends on no set; products of it are exact."""
    case = latent(mixed_case(0, "int8", "canonical", heads=(1, 16)), VALUE_SIZE)
    caches = []
    for isa in available_isas:
        library.onnxport_cpu_set_isa(isa.encode())
        caches.append(run_ort.run(library_path, case)[1].tobytes())
    assert len(set(caches)) == 1


def small_case(**changes: object) -> Case:
    rng = np.random.default_rng(0)
    case = Case(
        num_heads=4,
        kv_heads=1,
        head_size=48,
        query=np.ones((6, 4, 48), np.float32),
        key=np.ones((6, 1, 48), np.float32),
        value=None,
        key_cache=np.zeros((4, 16, 1, 48), np.float32),
        value_cache=None,
        past_lengths=[20, 0],
        new_lengths=[1, 5],
        block_table=np.array([[0, 1], [2, 3]], np.int32),
        packed=False,
        latent=32,
        scale=0.1,
    )
    return case.replace(**rotary(rng, 48, 21)).replace(**changes)


BAD_ATTRIBUTES = [
    ({"kv_cache_layout": "SHARED"}, "kv_cache_layout must be SEPARATE or LATENT, found 'SHARED'"),
    ({"num_heads": 4, "kv_num_heads": 2}, "kv_num_heads must be 1 in the LATENT layout, found 2"),
    ({"v_head_size": -16}, "v_head_size must not be negative, found -16"),
    ({"v_quant_type": "PER_TOKEN"}, "v_quant_type is 'PER_TOKEN', but there is no value cache"),
    ({"v_cache_dtype": "float"}, "v_cache_dtype is 'float', but there is no value cache"),
    ({"k_quant_type": "PER_TOKEN"}, "k_quant_type must be NONE for a floating-point cache"),
]


@pytest.mark.parametrize(("attributes", "words"), BAD_ATTRIBUTES)
def test_bad_attributes(library_path: Path, attributes: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=re.escape(words)):
        run_ort.session_for(library_path, small_case(), extra=attributes)


def test_an_int4_cache(library_path: Path) -> None:
    case = small_case(cache_type="int4", key_cache=np.zeros((4, 16, 1, 32), np.uint8))
    with pytest.raises(Exception, match="an int4 cache cannot be LATENT; allowed are float"):
        run_ort.session_for(library_path, case)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def of_size(head_size: int, latent_size: int) -> dict[str, object]:
    return {
        "head_size": head_size,
        "query": zeros(6, 4, head_size),
        "key": zeros(6, 1, head_size),
        "key_cache": zeros(4, 16, 1, head_size),
        "latent": latent_size,
        "cosine": None,
        "sine": None,
        "rotary_offset": 0,
    }


BAD_CASES = [
    (of_size(40, 32), "head_size of a latent cache must be a multiple of 16 from 16 to 1024"),
    (of_size(1040, 32), "multiple of 16 from 16 to 1024, found 1040"),
    (of_size(48, 40), "v_head_size must be a multiple of 16 from 16 to the head_size 48, found 40"),
    (of_size(48, 64), "v_head_size must be a multiple of 16 from 16 to the head_size 48, found 64"),
    ({"scale": None}, "scale is required where v_head_size 32 differs from head_size 48"),
    ({"layout": "tiled"}, "the canonical or the paired cache layout, not the tiled one"),
    ({"layout": "paired"}, "the paired cache layout holds bfloat16 only"),
    ({"value": zeros(6, 1, 32)}, "input value must be absent in the LATENT layout"),
    ({"value_cache": zeros(4, 16, 1, 48)}, "input value_cache must be absent in the LATENT layout"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_CASES)
def test_bad_cases(library_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=re.escape(words)):
        run_ort.run(library_path, small_case(**changes))


def test_keys_are_required(library_path: Path) -> None:
    case = small_case()
    items = tuple(sorted(run_ort.attributes(case).items()))
    present = frozenset((*run_ort.inputs(case), "key_cache")) - {"key"}
    session = run_ort.session(library_path, present, case.cache_type, items, 1)
    feeds = run_ort.inputs(case) | {"key_cache": case.key_cache}
    del feeds["key"]
    with pytest.raises(Exception, match="input key is missing"):
        session.run(None, feeds)


def test_without_a_value_size_rows_are_the_values(library_path: Path) -> None:
    """As the schema has it; the scale has its default then."""
    case = latent(mixed_case(0, "float", "canonical", heads=(1, 16)), 64)
    session = run_ort.session_for(library_path, case, extra={"v_head_size": 0, "scale": 0.125})
    feeds = run_ort.inputs(case) | {"key_cache": case.key_cache}
    default = run_ort.session_for(library_path, case, extra={"v_head_size": 0, "scale": 0.0})
    found, again = (one.run(["output"], feeds)[0] for one in (session, default))
    assert found.tobytes() == again.tobytes()
    check(case.replace(scale=0.125), (found, *run_ort.run(library_path, case)[1:]))


def test_rows_of_int8_are_numbers_and_a_scale(library_path: Path) -> None:
    """So that blocks move as they lie in memory: `onnxport.cache_rows` describes them."""
    case = small_case(
        cache_type="int8", key_cache=np.zeros((4, 16, 1, 52), np.int8), cosine=None, sine=None
    )
    key = np.random.default_rng(3).standard_normal((6, 1, 48)).astype(np.float32)
    _, cache, _ = run_ort.run(library_path, case.replace(key=key, rotary_offset=0))
    assert cache[2, :5].tobytes() == quantize(key[1:]).tobytes()
