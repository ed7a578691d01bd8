"""The CPU kernel in place of another device's 16-bit PagedAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.inspect import element_types
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.passes.emulated_kernels import emulate_kernels
from onnxport.graphs.passes.kv_dtype import set_kv_dtype
from onnxport.graphs.passes.native import NativeLimits, keep_native
from onnxport.providers.cpu.library import find_library
from tests.graphs.paged_models import feeds, op_types, paged_case, paged_model, run
from tests.kernels.reference import Case, attend, write_cache

FLOAT16, BFLOAT16 = TensorProto.FLOAT16, TensorProto.BFLOAT16
SEEDS = [seed for seed in range(0, 160, 4) if not paged_case(seed).softcap][:20]


def on_kernel(model: onnx.ModelProto, inputs: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Run on the CPU with our kernel; the outputs are float32."""
    library = find_library()
    if library is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    return run(widened(model), inputs, library)


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Outputs that NumPy knows: the attention in float32."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for info in copy.graph.output:
        if info.name.startswith("out"):
            wide = f"wide.{info.name}"
            cast = helper.make_node("Cast", [info.name], [wide], to=TensorProto.FLOAT)
            copy.graph.node.append(cast)
            info.name, info.type.tensor_type.elem_type = wide, TensorProto.FLOAT
    return copy


def rounded(case: Case, dtype: int) -> Case:
    """The case with the numbers that 16-bit inputs hold."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    floats = ("query", "key", "value", "cosine", "sine", "head_sink", "q_norm", "k_norm")
    values = {name: getattr(case, name) for name in floats}
    return case.replace(
        **{n: v.astype(kind).astype(np.float32) for n, v in values.items() if v is not None}
    )


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_reference(seed: int, dtype: int) -> None:
    cache_type = "float16" if dtype == FLOAT16 else "bfloat16"
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    case = rounded(paged_case(seed), dtype)
    case = case.replace(
        cache_type=cache_type,
        key_cache=case.key_cache.astype(kind),
        value_cache=case.value_cache.astype(kind),
    )
    result = emulate_kernels(paged_model(case, dtype=dtype))
    found = on_kernel(result.model, feeds(case, result.model))
    present = found[c.present_key(0)], found[c.present_value(0)]
    assert [value.dtype for value in present] == [kind, kind]
    for value, expected in zip(present, write_cache(case), strict=True):
        assert (value.astype(np.float32) != expected.astype(np.float32)).mean() < 1e-3
    expected = attend(case, *present)
    step = float(np.finfo(np.float16).eps) if dtype == FLOAT16 else 2**-7
    np.testing.assert_allclose(found["wide.out0"], expected, atol=1e-5, rtol=step)
    if dtype == FLOAT16:  # ONNX Runtime decomposes bfloat16 for no CPU
        lowered = widened(decompose(paged_model(case, dtype=dtype)).model)
        other = run(lowered, feeds(case, lowered))
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(other["wide.out0"], found["wide.out0"], atol=3e-2 * scale)


@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16"])
def test_caches_and_foreign_attributes_are_left(cache: str) -> None:
    case = next(x for x in map(paged_case, SEEDS) if x.cosine is not None)
    limits = NativeLimits(
        activation_dtypes=frozenset({"float16"}),
        cache_dtypes=frozenset({cache}),
        max_head_size=256,
        latent=True,
        attributes={"only_there": 3},
    )
    model = set_kv_dtype(paged_model(case, dtype=FLOAT16, layers=2), cache).model
    native = keep_native(model, limits).model
    result = emulate_kernels(native)
    assert result.changes == {"PagedAttention in float32": 2}
    assert result.model.graph.input == native.graph.input
    assert result.model.graph.output == native.graph.output
    before = [n for n in native.graph.node if n.op_type == "PagedAttention"]
    after = [n for n in result.model.graph.node if n.op_type == "PagedAttention"]
    types = element_types(result.model)
    for old, new in zip(before, after, strict=True):
        assert old.attribute == new.attribute
        assert "only_there" in {a.name for a in new.attribute}
        changed = {
            i for i, pair in enumerate(zip(old.input, new.input, strict=True)) if len(set(pair)) > 1
        }
        assert changed == {
            i for i in (0, 1, 2, 8, 9, 11, 12, 13) if i < len(old.input) and old.input[i]
        }
        assert {types[new.input[i]] for i in changed} == {TensorProto.FLOAT}
        assert list(old.output[1:]) == list(new.output[1:])
    # Both layers read the same query and tables: each is cast once, each output back.
    assert op_types(result.model).count("Cast") == len(changed) + 2


def test_a_rotary_graph_with_a_foreign_attribute_runs() -> None:
    case = rounded(paged_case(SEEDS[0]), FLOAT16)
    model = emulate_kernels(paged_model(case, dtype=FLOAT16, only_there=3)).model
    assert case.cache_type == "float"
    feed = feeds(case, model)
    found = on_kernel(model, feed)
    present = found[c.present_key(0)], found[c.present_value(0)]
    np.testing.assert_allclose(found["wide.out0"], attend(case, *present), atol=1e-5, rtol=1e-3)


def test_float32_attention_is_left_alone() -> None:
    model = paged_model(paged_case(SEEDS[0]), layers=2)
    result = emulate_kernels(model)
    assert result.model == model
    assert not result.changes


def test_the_same_operator_of_another_domain_is_left_alone() -> None:
    model = paged_model(paged_case(SEEDS[0]), dtype=FLOAT16)
    model.graph.node[0].domain = "example"
    assert emulate_kernels(model).model == model


def test_activations_of_unknown_type_are_refused() -> None:
    model = paged_model(paged_case(SEEDS[0]), dtype=FLOAT16)
    model.graph.node[0].input[0] = "mystery"
    with pytest.raises(ArtifactError, match="attention"):
        emulate_kernels(model)
