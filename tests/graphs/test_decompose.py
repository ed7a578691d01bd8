"""PagedAttention in standard operators equals the schema, written out in NumPy."""

from __future__ import annotations

import copy
import time

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.passes.decompose import decompose
from tests.graphs.paged_models import feeds, op_types, paged_model, run, start
from tests.graphs.paged_reference import Case, random_case, reference


def check(case: Case, *, packed: bool, tile: int, metadata: str) -> None:
    model = paged_model(case, packed=packed, metadata=metadata != "absent")
    result = decompose(model, tile_tokens=tile)
    bounds = {"unknown": (0, 0, 0), "loose": (100, 1000, 0)}.get(metadata)
    inputs = feeds(case, model, bounds)
    expected = reference(case)
    found = run(result.model, inputs)
    np.testing.assert_allclose(found["out0"], expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(found["present.0.key"], case.key_cache, atol=2e-6)
    np.testing.assert_array_equal(found["present.0.value"], case.value_cache)


@pytest.mark.parametrize("seed", range(120))
def test_equals_the_reference(seed: int) -> None:
    r = np.random.default_rng(1000 + seed)
    check(
        random_case(seed),
        packed=bool(r.random() < 0.6),
        tile=int(r.choice([1, 3, 4, 64])),
        metadata=str(r.choice(["exact", "unknown", "loose", "absent"])),
    )


def test_the_cases_cover_every_feature() -> None:
    cases = [random_case(seed) for seed in range(120)]
    for feature in ("rope", "scale", "softcap", "window", "sink", "norm"):
        assert sum(feature in case.features for case in cases) >= 20, feature
    assert sum(0 in case.new for case in cases) >= 10
    assert sum(case.cos is not None and case.cos.shape[1] * 2 < case.head_size for case in cases)


def test_no_operator_of_another_domain_is_left() -> None:
    result = decompose(paged_model(random_case(3), layers=2))
    assert {node.domain for node in result.model.graph.node} == {""}
    assert not {"If", "Loop", "Scan"} & set(op_types(result.model))


def test_layers_share_one_plan() -> None:
    one = decompose(paged_model(random_case(3)))
    three = decompose(paged_model(random_case(3), layers=3))
    assert three.changes == {"PagedAttention decomposed": 3, "plans": 1}
    for op_type in ("Range", "CumSum", "LessOrEqual", "GatherND", "Mod"):
        assert op_types(one.model).count(op_type) == op_types(three.model).count(op_type)
    assert op_types(three.model).count("ScatterND") == 6


def test_the_model_passed_in_is_left_as_it_was() -> None:
    model = paged_model(random_case(5))
    before = model.SerializeToString()
    decompose(model)
    assert model.SerializeToString() == before


def test_a_graph_without_paged_attention_is_left_alone() -> None:
    model = decompose(paged_model(random_case(1))).model
    again = decompose(model)
    assert again.changes == {}
    assert again.model == model


def test_the_same_operator_of_another_domain_is_left_alone() -> None:
    model = paged_model(random_case(1))
    model.graph.node[0].domain = "example"
    assert decompose(model).model == model


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        ({"kv_cache_layout": "LATENT"}, "LATENT"),
        ({"is_causal": 0}, "not causal"),
        ({"rotary_offset": 8}, "RoPE offset"),
        ({"k_cache_dtype": "int4"}, "int4"),
        ({"cache_layout": "tiled"}, "cache_layout"),
        ({"v_head_size": 4}, "v_head_size"),
    ],
)
def test_what_is_not_covered_is_refused(attributes: dict[str, object], found: str) -> None:
    with pytest.raises(ArtifactError, match=found):
        decompose(paged_model(random_case(1), **attributes))


def test_a_slot_mapping_is_refused() -> None:
    model = paged_model(random_case(1))
    model.graph.node[0].input[10] = "slots"
    with pytest.raises(ArtifactError, match="slot mapping"):
        decompose(model)


@pytest.mark.parametrize("cache_dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_16_bit_cache_under_float32(cache_dtype: int) -> None:
    case = random_case(11)
    model = paged_model(case, cache_dtype=cache_dtype)
    found = run_cast(decompose(model).model, case)
    tolerance = 4e-3 if cache_dtype == TensorProto.FLOAT16 else 4e-2
    np.testing.assert_allclose(found, reference(case), atol=tolerance)


def run_cast(model: object, case: Case) -> np.ndarray:
    """Run with caches of any type, through OrtValues where NumPy has no such dtype."""
    session = start(model)
    binding = session.io_binding()
    for name, value in feeds(case, model).items():
        if value.dtype.name == "bfloat16":
            raw = value.view(np.uint16)
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, TensorProto.BFLOAT16)
        else:
            value = ort.OrtValue.ortvalue_from_numpy(value)
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out0", "cpu")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy()


def test_float16_throughout() -> None:
    case = random_case(12)
    model = decompose(paged_model(case, dtype=TensorProto.FLOAT16)).model
    found = run(model, feeds(case, model))["out0"]
    np.testing.assert_allclose(found, reference(case), atol=2e-2)


def test_tokens_do_not_depend_on_how_they_are_batched() -> None:
    """Whole, chunked, and one of several in a batch: the same rows."""
    case = random_case(2)
    case = copy.deepcopy(case)
    assert len(case.new) > 1
    model = decompose(paged_model(case), tile_tokens=4).model
    together = run(model, feeds(case, model))["out0"]
    key_cache, value_cache = case.key_cache, case.value_cache
    rows = []
    for b, count in enumerate(case.new):
        for i in range(count):
            t = int(case.cumulative[b]) + i
            single = copy.copy(case)
            single.new, single.past = [1], [case.past[b] + i]
            single.block_table = case.block_table[b : b + 1]
            single.query, single.key = case.query[t : t + 1], case.key[t : t + 1]
            single.value = case.value[t : t + 1]
            single.key_cache, single.value_cache = key_cache, value_cache
            found = run(model, feeds(single, model))
            key_cache, value_cache = found["present.0.key"], found["present.0.value"]
            rows.append(found["out0"])
    np.testing.assert_allclose(together, np.concatenate(rows), atol=1e-5)


def test_a_cache_bound_as_input_and_output_is_not_copied() -> None:
    """64 MiB of cache: bound to itself it is written in place, orders of magnitude faster."""
    case = random_case(2)
    blocks = (64 << 20) // case.key_cache[0].nbytes
    case.key_cache = np.zeros((blocks, *case.key_cache.shape[1:]), np.float32)
    case.value_cache = np.zeros_like(case.key_cache)
    model = decompose(paged_model(case)).model
    session = start(model)
    inputs = {k: ort.OrtValue.ortvalue_from_numpy(v) for k, v in feeds(case, model).items()}
    caches = {name: value for name, value in inputs.items() if name.startswith("past_key")}

    def measure(aliased: bool) -> float:
        binding = session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in caches.items():
            shape, present = value.shape(), name.replace("past_key_values", "present")
            out = value if aliased else ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, "f4"))
            binding.bind_ortvalue_output(present, out)
        binding.bind_output("out0", "cpu")
        times = []
        for _ in range(5):
            start_s = time.perf_counter()
            session.run_with_iobinding(binding)
            times.append(time.perf_counter() - start_s)
        return min(times)

    copied = measure(aliased=False)
    in_place = measure(aliased=True)
    reference(case)
    np.testing.assert_allclose(caches[c.past_key(0)].numpy(), case.key_cache, atol=2e-6)
    np.testing.assert_array_equal(caches[c.past_value(0)].numpy(), case.value_cache)
    assert in_place < copied / 4
