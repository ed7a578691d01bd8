"""What the operator refuses, and in which words. None of these may touch memory it does not own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import run_ort
from tests.kernels.cases import rotary
from tests.kernels.reference import Case


def small_case(**changes: object) -> Case:
    rng = np.random.default_rng(0)
    shape = (4, 16, 2, 32)
    case = Case(
        num_heads=4,
        kv_heads=2,
        head_size=32,
        query=np.ones((6, 4, 32), np.float32),
        key=np.ones((6, 2, 32), np.float32),
        value=np.ones((6, 2, 32), np.float32),
        key_cache=np.zeros(shape, np.float32),
        value_cache=np.zeros(shape, np.float32),
        past_lengths=[20, 0],
        new_lengths=[1, 5],
        block_table=np.array([[0, 1], [2, 3]], np.int32),
        **rotary(rng, 32, 21),
    )
    return case.replace(**changes)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


BAD_INPUTS = {
    "cumulative_sequence_length must begin with 0, found 1": {
        "cumulative_sequence_length": int32(1, 1, 6)
    },
    "cumulative_sequence_length must not decrease, found 6 after 7": {
        "cumulative_sequence_length": int32(0, 7, 6)
    },
    "must end with the number of tokens 6, found 5": {"cumulative_sequence_length": int32(0, 1, 5)},
    r"cumulative_sequence_length must have the shape \(3\), found \(4\)": {
        "cumulative_sequence_length": int32(0, 1, 6, 6)
    },
    r"past_seqlens\[1\] must not be negative, found -1": {"past_seqlens": int32(20, -1)},
    r"past_seqlens must have the shape \(2\)": {"past_seqlens": int32(20)},
    r"block_table\[0\]\[1\] must be in \[0, 4\), found 4": {
        "block_table": np.array([[0, 4], [2, 3]], np.int32)
    },
    r"block_table\[1\]\[0\] must be in \[0, 4\), found -1": {
        "block_table": np.array([[0, 1], [-1, 3]], np.int32)
    },
    "sequence 0 has 21 tokens, more than the 1 blocks of 16": {
        "block_table": np.array([[0], [2]], np.int32)
    },
    "sequence 0 reaches position 20, but cos_cache and sin_cache hold 20": {
        "cos_cache": zeros(20, 16),
        "sin_cache": zeros(20, 16),
    },
    r"sin_cache must have the shape \(21, 16\), found \(20, 16\)": {
        "cos_cache": zeros(21, 16),
        "sin_cache": zeros(20, 16),
    },
    "cos_cache of width 24 at rotary_offset 0 does not fit a head of 32": {
        "cos_cache": zeros(21, 24),
        "sin_cache": zeros(21, 24),
    },
    r"query must have the shape \(any, 256\), found \(6, 250\)": {"query": zeros(6, 250)},
}


@pytest.mark.parametrize("words", BAD_INPUTS)
def test_bad_inputs(library_path: Path, words: str) -> None:
    with pytest.raises(Exception, match=words):
        run_ort.run(library_path, small_case(rotary_offset=0), feeds=BAD_INPUTS[words])


@pytest.mark.parametrize("slot", [-2, 64, 2**31 - 1])
def test_bad_slot(library_path: Path, slot: int) -> None:
    case = small_case(slot_mapping=int32(0, 1, 2, slot, 4, 5))
    words = rf"slot_mapping\[3\] must be -1 or in \[0, 64\), found {slot}"
    with pytest.raises(Exception, match=words):
        run_ort.run(library_path, case)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_sink": zeros(3)}, r"head_sink must have the shape \(4\), found \(3\)"),
        ({"q_norm": zeros(32)}, "q_norm_weight and k_norm_weight must be given together"),
        ({"key_cache": zeros(4, 16, 2, 24)}, "value_cache must have the shape"),
    ],
)
def test_bad_combinations(library_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words):
        run_ort.run(library_path, small_case(**changes))


def test_tiled_block_size(library_path: Path) -> None:
    case = small_case(key_cache=zeros(4, 12, 2, 32), value_cache=zeros(4, 12, 2, 32))
    session = run_ort.session_for(library_path, case, extra={"cache_layout": "tiled"})
    feeds = run_ort.inputs(case) | {"key_cache": case.key_cache, "value_cache": case.value_cache}
    with pytest.raises(Exception, match="needs a block size that is a multiple of 16, found 12"):
        session.run(None, feeds)


@pytest.mark.parametrize("head_size", [4, 36, 520])
def test_bad_head_size(library_path: Path, head_size: int) -> None:
    case = small_case(
        head_size=head_size,
        query=zeros(6, 4, head_size),
        key=zeros(6, 2, head_size),
        value=zeros(6, 2, head_size),
        key_cache=zeros(4, 16, 2, head_size),
        value_cache=zeros(4, 16, 2, head_size),
        cosine=None,
        sine=None,
    )
    with pytest.raises(Exception, match=f"multiple of 8 from 8 to 512, found {head_size}"):
        run_ort.run(library_path, case)


BAD_ATTRIBUTES = [
    ({"kv_cache_layout": "LATENT"}, "kv_num_heads must be 1 in the LATENT layout, found 2"),
    (
        {"cache_layout": "blocked"},
        "cache_layout must be canonical, tiled or paired, found 'blocked'",
    ),
    ({"num_heads": 5}, "num_heads must be a positive multiple of kv_num_heads, found 5 and 2"),
    ({"kv_num_heads": 0}, "num_heads must be a positive multiple"),
    ({"num_heads": "4"}, "attribute num_heads has the wrong type"),
    ({"local_window_size": 0}, "local_window_size must be -1 or positive, found 0"),
    ({"local_window_chunked": 1}, "local_window_chunked needs a local_window_size"),
    ({"is_causal": 2}, "attribute is_causal must be 0 or 1, found 2"),
    ({"softcap": -1.0}, "softcap must not be negative, found -1"),
    ({"scale": 1}, "attribute scale has the wrong type"),
    ({"rotary_offset": 4}, "rotary_offset must be a multiple of 8, found 4"),
    ({"v_head_size": 16}, "v_head_size needs the LATENT layout, found 16"),
    ({"k_cache_dtype": "int4"}, "k_cache_dtype is 'int4', but the cache tensor holds float"),
    ({"v_quant_type": "PER_TENSOR"}, "v_quant_type must be NONE for a floating-point cache"),
    ({"cache_layout": "x" * 100}, "attribute cache_layout is 100 characters long"),
]


@pytest.mark.parametrize(("attributes", "words"), BAD_ATTRIBUTES)
def test_bad_attributes(library_path: Path, attributes: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=re.escape(words)):
        run_ort.session_for(library_path, small_case(), extra=attributes)


@pytest.mark.parametrize("cache_type", ["float8e4m3fn"])
def test_unsupported_cache_types(library_path: Path, cache_type: str) -> None:
    words = f"cache type {cache_type}.* is not supported; allowed are float, float16, bfloat16"
    with pytest.raises(Exception, match=words):
        run_ort.session_for(library_path, small_case(cache_type=cache_type))


INT8 = {
    "cache_type": "int8",
    "key_cache": np.zeros((4, 16, 2, 36), np.int8),
    "value_cache": np.zeros((4, 16, 2, 36), np.int8),
    "layout": "tiled",
}


INT4 = {
    "cache_type": "int4",
    "key_cache": np.zeros((4, 16, 2, 22), np.uint8),
    "value_cache": np.zeros((4, 16, 2, 22), np.uint8),
    "layout": "tiled",
}


@pytest.mark.parametrize("granularity", ["NONE", "PER_TENSOR", "PER_CHANNEL", "PER_GROUP"])
def test_int8_of_another_granularity(library_path: Path, granularity: str) -> None:
    words = f"v_quant_type must be PER_TOKEN for an int8 cache, found '{granularity}'"
    with pytest.raises(Exception, match=words):
        run_ort.session_for(library_path, small_case(**INT8), extra={"v_quant_type": granularity})


@pytest.mark.parametrize("granularity", ["NONE", "PER_TOKEN"])
def test_int4_of_another_granularity(library_path: Path, granularity: str) -> None:
    words = f"k_quant_type must be PER_GROUP for an int4 cache, found '{granularity}'"
    with pytest.raises(Exception, match=words):
        run_ort.session_for(library_path, small_case(**INT4), extra={"k_quant_type": granularity})


@pytest.mark.parametrize("cache", [INT8, INT4], ids=["int8", "int4"])
def test_integers_in_the_canonical_layout(library_path: Path, cache: dict[str, object]) -> None:
    words = f"an {cache['cache_type']} cache needs the tiled cache layout"
    with pytest.raises(Exception, match=words):
        run_ort.run(library_path, small_case(**cache | {"layout": "canonical"}))


def test_int4_of_a_width_that_no_head_has(library_path: Path) -> None:
    caches = {name: np.zeros((4, 16, 2, 23), np.uint8) for name in ("key_cache", "value_cache")}
    words = "the last dimension of an int4 cache is 23, which no head"
    with pytest.raises(Exception, match=words):
        run_ort.run(library_path, small_case(**INT4 | caches | {"layout": "canonical"}))


def test_int8_without_room_for_scales(library_path: Path) -> None:
    caches = {name: np.zeros((4, 16, 2, 32), np.int8) for name in ("key_cache", "value_cache")}
    words = r"query must have the shape \(any, 224\), found \(6, 256\)"
    with pytest.raises(Exception, match=words):
        run_ort.run(library_path, small_case(**INT8 | caches))


@pytest.mark.parametrize("cache", [{}, INT8, INT4], ids=["float", "int8", "int4"])
def test_scales_as_inputs(library_path: Path, cache: dict[str, object]) -> None:
    case = small_case(**cache)
    present = frozenset(run_ort.inputs(case)) | {"key_cache", "value_cache", "k_scale"}
    items = tuple(sorted(run_ort.attributes(case).items()))
    session = run_ort.session(library_path, present, case.cache_type, items, 1)
    feeds = run_ort.inputs(case) | {"key_cache": case.key_cache, "value_cache": case.value_cache}
    with pytest.raises(Exception, match="the scales of an int8 or int4 cache lie in the cache"):
        session.run(None, feeds | {"k_scale": np.ones(1, np.float32)})


def test_unknown_isa(library: object) -> None:
    assert library.onnxport_cpu_set_isa(b"sse9") == 0


def test_no_tokens(library_path: Path) -> None:
    case = small_case(
        query=zeros(0, 4, 32),
        key=zeros(0, 2, 32),
        value=zeros(0, 2, 32),
        past_lengths=[3, 0],
        new_lengths=[0, 0],
    )
    output, _, _ = run_ort.run(library_path, case)
    assert output.shape == (0, 128)


def test_paired_layout_of_another_type(library_path: Path) -> None:
    with pytest.raises(Exception, match="the paired cache layout holds bfloat16 only"):
        run_ort.run(library_path, small_case(layout="paired"))
