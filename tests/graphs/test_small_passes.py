"""KV cache types, MatMulNBits accuracy, and the limits of native attention."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.cache_rows import row_elements
from onnxport.errors import ArtifactError, ProviderError
from onnxport.graphs import contract as c
from onnxport.graphs.inspect import attribute_int
from onnxport.graphs.paged import PER_GROUP, PER_TOKEN, attention_nodes
from onnxport.graphs.passes.accuracy import has_int8_products, set_accuracy, takes_int8
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.passes.kv_dtype import KV_DTYPES, set_kv_dtype
from onnxport.graphs.passes.native import NativeLimits, keep_native
from tests.graphs.paged_models import paged_case, paged_model
from tests.kernels.reference import Case

FLOAT_CASE = 4  # any seed with a float32 cache


def case_with(**changes: object) -> Case:
    case = paged_case(FLOAT_CASE, **changes)
    assert case.cache_type == "float"
    return case


def kinds(model: object) -> dict[str, int]:
    infos = (*model.graph.input, *model.graph.output)
    return {info.name: info.type.tensor_type.elem_type for info in infos}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_only_the_caches_change_type(dtype: str) -> None:
    model = paged_model(case_with(), layers=2)
    result = set_kv_dtype(model, dtype)
    assert result.changes == {f"caches to {dtype}": 8}
    changed = {name for name, kind in kinds(result.model).items() if kind != kinds(model)[name]}
    assert changed == {
        name(layer)
        for name in (c.past_key, c.past_value, c.present_key, c.present_value)
        for layer in range(2)
    }
    assert list(result.model.graph.node) == list(model.graph.node)


def test_the_type_that_is_there_changes_nothing() -> None:
    model = paged_model(case_with())
    result = set_kv_dtype(model, "float32")
    assert result.model == model
    assert str(result) == "kv_dtype: nothing to do"


@pytest.mark.parametrize(
    ("dtype", "element", "granularity"),
    [("int8", TensorProto.INT8, PER_TOKEN), ("int4", TensorProto.UINT8, PER_GROUP)],
)
def test_a_cache_of_integers_has_room_for_scales(
    dtype: str, element: int, granularity: str
) -> None:
    case = case_with()
    before = paged_model(case, layers=2)
    result = set_kv_dtype(before, dtype)
    assert result.changes == {f"caches to {dtype}": 8}
    infos = (*result.model.graph.input, *result.model.graph.output)
    caches = [info.type.tensor_type for info in infos if "key_values" in info.name]
    caches += [info.type.tensor_type for info in infos if "present" in info.name]
    assert len(caches) == 8
    for cache in caches:
        assert cache.elem_type == element
        assert cache.shape.dim[3].dim_value == row_elements(dtype, case.head_size)
    for old, new in zip(attention_nodes(before), attention_nodes(result.model), strict=True):
        assert (old.k_quant_type, old.is_quantized) == ("NONE", False)
        assert new == replace(old, k_quant_type=granularity, v_quant_type=granularity)
        assert new.is_quantized


@pytest.mark.parametrize(("dtype", "granularity"), [("int8", "PER_TOKEN"), ("int4", "PER_GROUP")])
def test_no_other_lowering_takes_a_cache_of_integers(dtype: str, granularity: str) -> None:
    model = set_kv_dtype(paged_model(case_with()), dtype).model
    with pytest.raises(ArtifactError, match=f"uses a cache quantized {granularity}"):
        decompose(model)
    with pytest.raises(ProviderError, match=r"a KV cache of u?int8, allowed are"):
        keep_native(model, LIMITS)


def test_rows_of_int4_that_no_head_has_are_refused() -> None:
    model = set_kv_dtype(paged_model(case_with()), "int4").model
    for info in model.graph.input:
        if "key_values" in info.name:
            info.type.tensor_type.shape.dim[3].dim_value += 2
    with pytest.raises(ArtifactError, match="which no head has in int4"):
        attention_nodes(model)


def test_an_unknown_cache_type_is_refused() -> None:
    with pytest.raises(ValueError, match="float8"):
        set_kv_dtype(paged_model(case_with()), "float8")
    assert set(KV_DTYPES) == {"float32", "float16", "bfloat16", "int8", "int4"}


def test_a_graph_without_or_with_quantized_attention_is_refused() -> None:
    model = paged_model(case_with())
    with pytest.raises(ArtifactError, match="quantized already"):
        set_kv_dtype(set_kv_dtype(model, "int8").model, "float16")
    with pytest.raises(ArtifactError, match="no PagedAttention"):
        set_kv_dtype(decompose(model).model, "float16")


def matmuls() -> object:
    weight = numpy_helper.from_array(np.zeros((8, 1, 16), np.uint8), "w")
    scales = numpy_helper.from_array(np.ones((8, 1), np.float32), "s")
    plain = numpy_helper.from_array(np.ones((8, 8), np.float32), "p")
    options = {"K": 32, "N": 8, "bits": 4, "block_size": 32}
    nodes = [
        helper.make_node("MatMulNBits", ["x", "w", "s"], ["a"], domain=c.MICROSOFT, **options),
        helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["b"], domain=c.MICROSOFT, accuracy_level=1, **options
        ),
        helper.make_node("MatMulNBits", ["x", "w", "s"], ["e"], domain="example", **options),
        helper.make_node("MatMul", ["a", "p"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight, scales, plain]))


def test_accuracy_is_set_on_every_matmulnbits_and_nothing_else() -> None:
    model = matmuls()
    result = set_accuracy(model, 4)
    levels = [attribute_int(node, "accuracy_level", -1) for node in result.model.graph.node]
    assert levels == [4, 4, -1, -1]
    assert result.changes == {"MatMulNBits at level 4": 2}
    assert [attribute_int(n, "accuracy_level", -1) for n in model.graph.node] == [-1, 1, -1, -1]


def test_whether_some_product_takes_int8() -> None:
    mixed = matmuls()
    assert not has_int8_products(mixed)
    mixed.graph.node[0].attribute.append(helper.make_attribute("accuracy_level", c.INT8_LEVEL))
    assert has_int8_products(mixed)  # the other one has level 1
    assert not takes_int8(mixed)
    for level in c.ACCURACY_LEVELS:
        assert has_int8_products(set_accuracy(mixed, level).model) == (level == c.INT8_LEVEL)


def test_an_unknown_accuracy_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level 5"):
        set_accuracy(matmuls(), 5)


LIMITS = NativeLimits(
    activation_dtypes=frozenset({"float32"}),
    cache_dtypes=frozenset({"float32", "float16"}),
    max_head_size=256,
    attributes={"cache_layout": "tiled"},
)


def test_native_nodes_stay_and_get_attributes() -> None:
    model = paged_model(case_with(), layers=2)
    result = keep_native(model, LIMITS)
    assert result.changes == {"PagedAttention kept": 2}
    for before, after in zip(model.graph.node, result.model.graph.node, strict=True):
        assert list(before.input) == list(after.input)
        added = [a for a in after.attribute if a not in before.attribute]
        assert [helper.get_attribute_value(a) for a in added] == [b"tiled"]


def test_native_limits_are_all_reported() -> None:
    limits = NativeLimits(
        activation_dtypes=frozenset({"float16"}),
        cache_dtypes=frozenset({"float16"}),
        max_head_size=16,
        softcap=False,
        local_window=False,
        head_sink=False,
        qk_norm=False,
        rotary_interleaved=False,
        separate_qkv=False,
        slot_mapping=False,
        non_causal=False,
    )
    case = case_with(
        softcap=2.0,
        window=4,
        head_sink=np.ones(paged_case(FLOAT_CASE).num_heads, np.float32),
        q_norm=np.ones(paged_case(FLOAT_CASE).head_size, np.float32),
        k_norm=np.ones(paged_case(FLOAT_CASE).head_size, np.float32),
        packed=False,
        causal=False,
    )
    with pytest.raises(ProviderError) as error:
        keep_native(paged_model(case, layers=2, rotary_interleaved=1, rotary_offset=8), limits)
    for part in (
        "activations of float32",
        "KV cache of float32",
        "head size",
        "softcap",
        "sliding window",
        "head sinks",
        "QK norm",
        "interleaved",
        "separate",
        "not causal",
        "latent",
        "in 2 layers",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("head_size", [40, 256])
def test_native_limits_are_inclusive(head_size: int) -> None:
    r = np.random.default_rng(0)
    case = case_with(packed=True, q_norm=None, k_norm=None, cosine=None, sine=None, rotary_offset=0)
    tokens = len(case.query)
    case = case.replace(
        head_size=head_size,
        query=r.standard_normal((tokens, case.num_heads, head_size)).astype(np.float32),
        key=r.standard_normal((tokens, case.kv_heads, head_size)).astype(np.float32),
        value=r.standard_normal((tokens, case.kv_heads, head_size)).astype(np.float32),
    )
    keep_native(paged_model(case), LIMITS)
    smaller = replace(LIMITS, max_head_size=head_size - 1)
    with pytest.raises(ProviderError, match=f"head size {head_size}"):
        keep_native(paged_model(case), smaller)


@pytest.mark.parametrize(("head_size", "rotary_dim"), [(40, 16), (48, 24)])
def test_native_rope_in_part_of_a_head(head_size: int, rotary_dim: int) -> None:
    r = np.random.default_rng(0)
    case = case_with(packed=True, q_norm=None, k_norm=None, rotary_offset=0)
    tokens, positions = len(case.query), len(paged_case(FLOAT_CASE).cosine)
    case = case.replace(
        head_size=head_size,
        query=r.standard_normal((tokens, case.num_heads, head_size)).astype(np.float32),
        key=r.standard_normal((tokens, case.kv_heads, head_size)).astype(np.float32),
        value=r.standard_normal((tokens, case.kv_heads, head_size)).astype(np.float32),
        cosine=np.ones((positions, rotary_dim // 2), np.float32),
        sine=np.ones((positions, rotary_dim // 2), np.float32),
    )
    keep_native(paged_model(case), replace(LIMITS, rotary_multiple=8))
    with pytest.raises(ProviderError, match=f"RoPE of {rotary_dim} of {head_size} channels"):
        keep_native(paged_model(case), replace(LIMITS, rotary_multiple=16))
    whole = case.replace(cosine=None, sine=None)
    keep_native(paged_model(whole), replace(LIMITS, rotary_multiple=16))


def test_native_without_attention_is_refused() -> None:
    with pytest.raises(ProviderError, match="no PagedAttention"):
        keep_native(decompose(paged_model(case_with())).model, LIMITS)
