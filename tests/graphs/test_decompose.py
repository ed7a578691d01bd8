"""PagedAttention in standard operators equals the kernel tests' NumPy reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from onnxport.errors import ArtifactError
from onnxport.graphs import attention_ops
from onnxport.graphs import contract as c
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.passes.decompose import Bounds, decompose
from tests.graphs.paged_models import (
    feeds,
    latent_case,
    op_types,
    paged_case,
    paged_model,
    run,
    start,
)
from tests.kernels.reference import Case, attend, write_cache
from tests.tiers import crossed, every, examples

SEEDS = [seed for seed in range(216) if seed % 4 != 3]  # those have an int8 cache


def varied(seed: int) -> tuple[Case, int]:
    """A case, its metadata exact, loose, unknown or absent, and a tile size."""
    r = np.random.default_rng(1000 + seed)
    case = paged_case(seed)
    longest = max(np.add(case.past_lengths, case.new_lengths))
    bounds = [(max(case.new_lengths), longest, 1), (999, 9999, 0), (0, 0, 0), None][seed % 4]
    metadata = None if bounds is None else np.array(bounds, np.int32)
    return case.replace(metadata=metadata), int(r.choice([1, 3, 16, 64]))


def agrees(case: Case, found: dict[str, np.ndarray], atol: float = 1e-5) -> None:
    """Compare the caches, and attention over the very caches that were found.

    A key that is stored in few bits may round the other way where float32 decides.
    """
    present = found["present.0.key"], found.get("present.0.value")
    for value, expected in zip(present, write_cache(case), strict=True):
        if value is None:
            assert expected is None
            continue
        if case.cache_type == "float":
            np.testing.assert_allclose(value, expected, atol=2e-6)
        else:
            assert (value.astype(np.float32) != expected.astype(np.float32)).mean() < 1e-3
    np.testing.assert_allclose(found["out0"], attend(case, *present), atol=atol, rtol=atol)


@pytest.mark.parametrize("seed", every(6, SEEDS))
def test_equals_the_reference(seed: int) -> None:
    case, tile_tokens = varied(seed)
    result = decompose(paged_model(case), tile_tokens=tile_tokens)
    agrees(case, run(result.model, feeds(case, result.model)))


@pytest.mark.parametrize("bounds", ["metadata", "shapes"])
@pytest.mark.parametrize("seed", every(6, [seed for seed in range(120) if seed % 5 != 4]))
def test_attention_of_latents_equals_the_reference(seed: int, bounds: Bounds) -> None:
    case = latent_case(seed)
    if bounds == "shapes":
        case = case.replace(slot_mapping=None)
    result = decompose(paged_model(case), tile_tokens=[1, 3, 16, 64][seed % 4], bounds=bounds)
    assert op_types(result.model).count("ScatterND") == 1
    agrees(case, run(result.model, feeds(case, result.model)))


def test_layers_of_latents_share_one_plan() -> None:
    case = latent_case(0)
    result = decompose(paged_model(case, layers=3))
    assert result.changes == {"PagedAttention decomposed": 3, "plans": 1}
    assert op_types(result.model).count("ScatterND") == 3


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        ({"kv_num_heads": 2}, "kv_num_heads 2, which must be 1"),
        ({"v_head_size": -1}, "v_head_size -1 in rows of"),
        ({"v_head_size": 1000}, "v_head_size 1000 in rows of"),
        ({"scale": 0.0, "v_head_size": 8}, "no scale, and values narrower than keys"),
        ({"kv_cache_layout": "SEPARATE"}, "2 outputs; at most 17 and exactly 3"),
        ({"kv_cache_layout": "OTHER"}, "2 outputs"),
    ],
)
def test_latents_that_no_operator_has_are_refused(
    attributes: dict[str, object], found: str
) -> None:
    with pytest.raises(ArtifactError, match=found):
        decompose(paged_model(latent_case(0), **attributes))


@pytest.mark.parametrize(
    ("position", "name", "found"),
    [
        (1, "", "no key of its own"),
        (2, "value", "values"),
        (4, c.past_value(0), "a cache of values"),
    ],
)
def test_inputs_that_latents_cannot_have_are_refused(position: int, name: str, found: str) -> None:
    model = paged_model(latent_case(0))
    model.graph.node[0].input[position] = name
    with pytest.raises(ArtifactError, match=found):
        decompose(model)


@pytest.mark.parametrize(
    ("seed", "left"),
    crossed(6, [seed for seed in SEEDS if seed % 3 == 0], [np.nan, np.inf, 3e38]),
)
def test_what_others_left_in_the_pool_changes_nothing(seed: int, left: float) -> None:
    """Neither numbers that are none nor very large ones, wherever no key of a sequence is."""
    case, tile_tokens = varied(seed)
    case = case.replace(cache_type="float", slot_mapping=None)
    model = decompose(paged_model(case), tile_tokens=tile_tokens).model
    expected = run(model, feeds(case, model))["out0"]
    caches = [cache.astype(np.float32) for cache in (case.key_cache, case.value_cache)]
    size = caches[0].shape[1]
    own = np.zeros(caches[0].shape[:2], bool)
    for row, past in enumerate(case.past_lengths):
        for position in range(past):
            own[case.block_table[row][position // size], position % size] = True
    for cache in caches:
        cache[~own] = left
    spoiled = case.replace(key_cache=caches[0], value_cache=caches[1])
    found = run(model, feeds(spoiled, model))["out0"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("bounds", ["metadata", "shapes"])
@pytest.mark.parametrize("seed", every(6, [seed for seed in SEEDS if seed % 3 == 0]))
def test_bfloat16_is_near_the_reference(seed: int, bounds: Bounds) -> None:
    """By ONNX's own evaluator, for ONNX Runtime's CPU provider has no products in bfloat16."""
    case = paged_case(seed).replace(cache_type="float", slot_mapping=None)
    model = decompose(paged_model(case, dtype=TensorProto.BFLOAT16), bounds=bounds).model
    onnx.checker.check_model(model, full_check=True)
    names = [info.name for info in model.graph.output]
    values = ReferenceEvaluator(model).run(names, feeds(case, model))
    found = {name: value.astype(np.float32) for name, value in zip(names, values, strict=True)}
    expected = attend(case, found["present.0.key"], found["present.0.value"])
    np.testing.assert_allclose(found["out0"], expected, atol=0.15)  # measured: 0.08
    assert {value.dtype.name for value in values} == {"bfloat16"}


def test_the_cases_cover_every_feature() -> None:
    cases = [paged_case(seed) for seed in SEEDS]
    for feature in ("cosine", "scale", "window", "head_sink", "q_norm", "slot_mapping"):
        assert sum(getattr(case, feature) is not None for case in cases) >= 20, feature
    assert sum(case.softcap != 0 for case in cases) >= 20
    assert sum(not case.causal for case in cases) >= 20
    assert sum(case.interleaved for case in cases) >= 20
    assert sum(case.rotary_offset != 0 for case in cases) >= 5
    assert sum(0 in case.new_lengths for case in cases) >= 5
    assert sum(not case.packed for case in cases) >= 20
    assert sum(len(set(case.new_lengths)) > 1 for case in cases) >= 20
    assert {case.cache_type for case in cases} == {"float", "float16", "bfloat16"}


def test_no_operator_of_another_domain_is_left() -> None:
    result = decompose(paged_model(paged_case(2), layers=2))
    assert {node.domain for node in result.model.graph.node} == {""}
    assert not {"If", "Loop", "Scan"} & set(op_types(result.model))


def test_layers_share_one_plan() -> None:
    case = paged_case(0)
    one, three = decompose(paged_model(case)), decompose(paged_model(case, layers=3))
    assert three.changes == {"PagedAttention decomposed": 3, "plans": 1}
    for op_type in ("Range", "CumSum", "LessOrEqual", "GatherND", "Mod"):
        assert op_types(one.model).count(op_type) == op_types(three.model).count(op_type)
    assert op_types(three.model).count("ScatterND") == 6


def test_the_model_passed_in_is_left_as_it_was() -> None:
    model = paged_model(paged_case(5))
    before = model.SerializeToString()
    decompose(model)
    assert model.SerializeToString() == before


def test_a_graph_without_paged_attention_is_left_alone() -> None:
    model = decompose(paged_model(paged_case(1))).model
    again = decompose(model)
    assert again.changes == {}
    assert again.model == model


def test_the_same_operator_of_another_domain_is_left_alone() -> None:
    model = paged_model(paged_case(1))
    model.graph.node[0].domain = "example"
    assert decompose(model).model == model


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        ({"kv_cache_layout": "LATENT"}, "3 outputs; at most 17 and exactly 2"),
        ({"kv_cache_layout": "OTHER"}, "a OTHER cache"),
        ({"k_cache_dtype": "int4"}, "int4"),
        ({"cache_layout": "tiled"}, "cache_layout"),
        ({"v_head_size": 4}, "v_head_size"),
    ],
)
def test_what_is_not_covered_is_refused(attributes: dict[str, object], found: str) -> None:
    with pytest.raises(ArtifactError, match=found):
        decompose(paged_model(paged_case(1), **attributes))


def test_a_cos_table_that_is_no_initializer_is_refused() -> None:
    case = next(case for case in map(paged_case, SEEDS) if case.cosine is not None)
    model = paged_model(case)
    model.graph.node[0].input[8] = "query"
    with pytest.raises(ArtifactError, match="cos table"):
        decompose(model)


def test_float16_throughout() -> None:
    case = paged_case(0, cache_type="float", softcap=0.0)
    model = decompose(paged_model(case, dtype=TensorProto.FLOAT16)).model
    found = run(model, feeds(case, model))["out0"]
    np.testing.assert_allclose(found, attend(case, *write_cache(case)), atol=3e-2)


def test_tokens_do_not_depend_on_how_they_are_batched() -> None:
    """A ragged batch, and the same tokens one at a time: the same rows."""
    case = next(
        case
        for case in map(paged_case, range(0, 160, 4))
        if len(case.new_lengths) > 2 and case.causal and case.slot_mapping is None
    )
    model = decompose(paged_model(case.replace(metadata=None)), tile_tokens=4).model
    together = run(model, feeds(case, model))["out0"]
    keys, values, rows, t = case.key_cache, case.value_cache, [], 0
    for b, count in enumerate(case.new_lengths):
        for i in range(count):
            single = case.replace(
                new_lengths=[1],
                past_lengths=[case.past_lengths[b] + i],
                block_table=case.block_table[b : b + 1],
                query=case.query[t : t + 1],
                key=case.key[t : t + 1],
                value=case.value[t : t + 1],
                key_cache=keys,
                value_cache=values,
            )
            found = run(model, feeds(single, model))
            keys, values = found["present.0.key"], found["present.0.value"]
            rows.append(found["out0"])
            t += 1
    np.testing.assert_allclose(together, np.concatenate(rows), atol=1e-5)


class Ragged:
    """One session for each tile size, which serves every shape of batch."""

    block_size = 4
    shape = (40, block_size, 1, 8)  # of a pool

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        model = paged_model(self.case([1], [0]))
        self.models = {t: decompose(model, tile_tokens=t).model for t in (1, 3, 64)}
        self.sessions = {t: start(model) for t, model in self.models.items()}

    def case(self, new: list[int], past: list[int]) -> Case:
        needed = [-(-(n + p) // self.block_size) for n, p in zip(new, past, strict=True)]
        ids = self.random.permutation(self.shape[0])
        table = np.full((len(new), max(needed)), -1, np.int32)
        for b, count in enumerate(needed):
            table[b, :count], ids = ids[:count], ids[count:]
        angles = np.outer(np.arange(64), [1.0, 0.1])
        return Case(
            num_heads=2,
            kv_heads=1,
            head_size=8,
            query=self.draw(sum(new), 2, 8),
            key=self.draw(sum(new), 1, 8),
            value=self.draw(sum(new), 1, 8),
            key_cache=self.draw(*self.shape),
            value_cache=self.draw(*self.shape),
            new_lengths=new,
            past_lengths=past,
            block_table=table,
            window=9,
            cosine=np.cos(angles).astype(np.float32),
            sine=np.sin(angles).astype(np.float32),
            metadata=np.array([max(new), max(np.add(new, past)), 0], np.int32),
        )

    def draw(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def ragged() -> Ragged:
    return Ragged()


batches = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=5).filter(
    lambda batch: any(new for new, _ in batch)
)


@settings(max_examples=examples(60), deadline=None)
@given(batch=batches, tile=st.sampled_from([1, 3, 64]))
def test_one_session_serves_every_ragged_batch(
    ragged: Ragged, batch: list[tuple[int, int]], tile: int
) -> None:
    case = ragged.case([new for new, _ in batch], [past for _, past in batch])
    names = ["out0", c.present_key(0), c.present_value(0)]
    found = ragged.sessions[tile].run(names, feeds(case, ragged.models[tile]))
    agrees(case, dict(zip(names, found, strict=True)))


def gqa_model(case: Case) -> onnx.ModelProto:
    """ONNX Runtime's own GroupQueryAttention over a contiguous cache."""
    g = GraphBuilder("gqa")
    packed = case.num_heads + 2 * case.kv_heads
    qkv = g.input("qkv", TensorProto.FLOAT, [1, "seq", packed * case.head_size])
    shape = [1, case.kv_heads, "past", case.head_size]
    caches = [g.input(name, TensorProto.FLOAT, shape) for name in ("k", "v")]
    presents = [g.output(name, TensorProto.FLOAT, None) for name in ("ko", "vo")]
    rope = {"do_rotary": case.cosine is not None, "rotary_interleaved": case.interleaved}
    attributes = attention_ops.AttentionAttributes(
        num_heads=case.num_heads,
        kv_num_heads=case.kv_heads,
        scale=case.scale,
        softcap=case.softcap or None,
        local_window_size=case.window,
        **rope,
    )
    tables = {} if case.cosine is None else {"cos": case.cosine, "sin": case.sine}
    out = attention_ops.group_query_attention(
        g,
        qkv,
        *caches,
        (presents[0], presents[1]),
        sequence_lengths_minus_one=g.input("less_one", TensorProto.INT32, [1]),
        total_sequence_length=g.input("total", TensorProto.INT32, []),
        attributes=attributes,
        **{name: g.constant(table, name) for name, table in tables.items()},
    )
    g.output(out, TensorProto.FLOAT, None)
    return g.build()


@pytest.mark.parametrize("new", [[5, 1, 1, 7], [1, 1, 1], [20]])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 4},
        {"interleaved": True},
        {"softcap": 1.5, "scale": 0.7},
        {"cosine": None, "sine": None},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_agrees_with_group_query_attention(new: list[int], changes: dict[str, object]) -> None:
    """A kernel that no one here wrote, fed the same tokens in the same chunks."""
    r = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return r.standard_normal(shape).astype(np.float32)

    size, past = 16, 0
    angles = np.outer(np.arange(64), 10.0 ** -np.arange(size // 2))
    pool = np.zeros((8, 4, 2, size), np.float32)
    contiguous = [np.zeros((1, 2, 0, size), np.float32)] * 2
    whole = Case(
        num_heads=4,
        kv_heads=2,
        head_size=size,
        query=draw(0, 4, size),
        key=draw(0, 2, size),
        value=draw(0, 2, size),
        key_cache=pool,
        value_cache=pool,
        past_lengths=[0],
        new_lengths=[0],
        block_table=r.permutation(8)[None].astype(np.int32),
        cosine=np.cos(angles).astype(np.float32),
        sine=np.sin(angles).astype(np.float32),
    ).replace(**changes)
    session, model = start(gqa_model(whole)), decompose(paged_model(whole)).model
    for count in new:
        case = whole.replace(
            past_lengths=[past],
            new_lengths=[count],
            query=draw(count, 4, size),
            key=draw(count, 2, size),
            value=draw(count, 2, size),
        )
        found = run(model, feeds(case, model))
        past += count
        packed = np.concatenate([case.query, case.key, case.value], axis=1).reshape(1, count, -1)
        lengths = {"less_one": np.array([past - 1], np.int32), "total": np.array(past, np.int32)}
        inputs = {"qkv": packed, "k": contiguous[0], "v": contiguous[1], **lengths}
        *contiguous, expected = session.run(None, inputs)
        np.testing.assert_allclose(found["out0"], expected[0], atol=1e-5)
        whole = whole.replace(
            key_cache=found["present.0.key"], value_cache=found["present.0.value"]
        )


def test_a_cache_bound_as_input_and_output_is_not_copied(tmp_path: Path) -> None:
    """Of a cache bound to itself only few pages are written; to another place, all of them.

    The caches are private mappings of files: the first write of a page makes a page fault.
    """
    case = paged_case(0)
    resource = pytest.importorskip("resource", reason="Windows counts no page faults of its own")
    assert case.cache_type == "float"
    blocks = (8 << 20) // case.key_cache[0].nbytes
    pool = np.zeros((blocks, *case.key_cache.shape[1:]), np.float32)
    pool.tofile(tmp_path / "pool")
    case = case.replace(key_cache=pool, value_cache=pool)
    model = decompose(paged_model(case)).model
    session = start(model)

    def mapped() -> ort.OrtValue:
        """Zeros, the pages of which were all read and none written."""
        memory = np.memmap(tmp_path / "pool", np.float32, "c", shape=pool.shape)
        assert not memory.any()
        return ort.OrtValue.ortvalue_from_numpy(memory)

    inputs = {k: ort.OrtValue.ortvalue_from_numpy(v) for k, v in feeds(case, model).items()}
    caches = {name: mapped() for name in inputs if name.startswith("past_key")}

    def count_faults(outputs: dict[str, ort.OrtValue]) -> int:
        binding = session.io_binding()
        for name, value in (inputs | caches).items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        binding.bind_output("out0", "cpu")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        session.run_with_iobinding(binding)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    pages = len(caches) * pool.nbytes // resource.getpagesize()
    assert count_faults({name: mapped() for name in caches}) >= pages
    faults = count_faults(caches)
    assert faults < pages / 4
    keys, values = write_cache(case)
    np.testing.assert_allclose(caches[c.past_key(0)].numpy(), keys, atol=2e-6)
    np.testing.assert_array_equal(caches[c.past_value(0)].numpy(), values)
