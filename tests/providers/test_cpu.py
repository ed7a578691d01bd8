"""What is particular to the cpu provider; tests/conformance has what it shares with others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.cache_rows import row_bytes
from onnxport.errors import CapacityError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.graphs.passes import retype
from onnxport.providers.base import LoadOptions, Model, StepInputs
from onnxport.providers.cpu import library
from onnxport.providers.cpu import provider as cpu
from onnxport.providers.cpu.library import converts_half, find_library, load_library
from onnxport.providers.registry import open_model
from tests.exporter import checkpoints
from tests.exporter.checkpoints import VOCAB
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened

PROMPT = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-2), ("bfloat16", 1e-1)])
def test_a_16_bit_cache_is_near_the_float32_one(
    tiny_artifact: ArtifactMaker, dtype: str, tolerance: float
) -> None:
    path = tiny_artifact("llama", "fp32")
    with opened(path, "custom") as exact, opened(path, "custom", kv_cache_dtype=dtype) as rounded:
        assert rounded.capabilities.kv_cache_dtype == dtype
        assert rounded.capabilities.kv_block_bytes * 2 == exact.capabilities.kv_block_bytes
        for step in two_steps(PROMPT):
            expected, found = exact.run(step).copy(), rounded.run(step)
            assert 0 < np.abs(found - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("has_pairs", "has_half", "fastest"),
    [(True, True, "bfloat16"), (False, True, "float16"), (False, False, "float32")],
)
@pytest.mark.parametrize(
    ("precision", "level", "is_exact"),
    [("int4", None, False), ("int4", 1, True), ("fp16", 4, True), ("fp32", 4, True)],
)
def test_16_bits_are_chosen_where_they_are_faster_and_no_loss(
    tiny_artifact: ArtifactMaker,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    level: int | None,
    has_pairs: bool,
    has_half: bool,
    fastest: str,
    is_exact: bool,
) -> None:
    monkeypatch.setattr(library, "prefers_pairs", lambda: has_pairs)
    monkeypatch.setattr(library, "converts_half", lambda: has_half)
    path, options = tiny_artifact("llama", precision), {"matmul_accuracy_level": level}
    with (
        opened(path, "custom", **options) as chosen,
        opened(path, "custom", kv_cache_dtype="float32", **options) as exact,
    ):
        dtype = "float32" if is_exact else fastest
        assert chosen.capabilities.kv_cache_dtype == dtype
        for step in two_steps(PROMPT):
            expected, found = exact.run(step).copy(), chosen.run(step)
            largest = np.abs(found - expected).max()
            assert (largest > 0) == (dtype != "float32")
            assert largest < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_16_bit_weights_are_planned_as_what_they_become(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Before they are read: what cannot fit is refused, not made."""
    planned: list[int] = []
    plain = cpu._pool_planner

    def planner(*arguments: Any) -> Any:
        plan = plain(*arguments)

        def record(weight_bytes: int, state_bytes: int = 0) -> Any:
            planned.append(weight_bytes)
            return plan(weight_bytes=weight_bytes, state_bytes=state_bytes)

        return record

    monkeypatch.setattr(cpu, "_pool_planner", planner)
    monkeypatch.setattr(retype, "INLINE_BYTES", 0)  # as if these were of a large model
    artifact = Artifact.read(tiny_artifact(case, "fp16"))
    cpu.CpuProvider().load(artifact, LoadOptions(kv_cache_tokens=64)).close()
    before, after = planned
    assert artifact.manifest.files[WEIGHTS_FILE].size < before <= after < 1.7 * before


def test_every_set_but_the_portable_one_converts_float16() -> None:
    library = load_library(find_library() or pytest.skip("the C++ kernels were not built"))
    found = {}
    try:
        for name in ("amx", "avx512bf16", "avx512", "avx2", "neon", "portable"):
            if library.onnxport_cpu_set_isa(name.encode()):
                found[name] = converts_half()
    finally:
        library.onnxport_cpu_set_isa(None)
    assert found == {name: name != "portable" for name in found}


@pytest.mark.parametrize(("level", "layout"), [(1, "tiled"), (4, "paired")])
def test_a_bfloat16_cache_lies_in_pairs_where_products_may_be_rounded(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, level: int, layout: str
) -> None:
    monkeypatch.setattr(library, "prefers_pairs", lambda: True)
    layouts = []
    allocate = cpu.allocate

    def note(spec: object, groups: object, pool: object, dtype: str, layout: str) -> object:
        layouts.append((dtype, layout))
        return allocate(spec, groups, pool, dtype, layout)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "allocate", note)
    path = tiny_artifact("llama", "int4")
    with opened(path, "custom", kv_cache_dtype="bfloat16", matmul_accuracy_level=level):
        assert layouts == [("bfloat16", layout)]


@pytest.mark.parametrize(("dtype", "allowed"), [("int8", 5e-2), ("int4", 0.6)])
def test_a_cache_of_integers_is_near_the_float32_one_and_counts_its_scales(
    tiny_artifact: ArtifactMaker, dtype: str, allowed: float
) -> None:
    path = tiny_artifact("llama", "fp32")
    with opened(path, "custom") as exact, opened(path, "custom", kv_cache_dtype=dtype) as small:
        limits, form = small.capabilities, small.capabilities.kv_format
        assert (limits.kv_cache_dtype, form.dtype) == (dtype, dtype)
        rows = 2 * form.num_layers * form.num_kv_heads * limits.block_size
        assert limits.kv_block_bytes == rows * row_bytes(dtype, form.head_size)
        assert exact.capabilities.kv_block_bytes == rows * form.head_size * 4
        for step in two_steps(PROMPT):
            expected, found = exact.run(step).copy(), small.run(step)
            assert 0 < np.abs(found - expected).max() < allowed * np.abs(expected).max()


def test_a_pool_of_integers_holds_more_tokens_of_the_same_memory(
    tiny_artifact: ArtifactMaker,
) -> None:
    path, tokens = tiny_artifact("llama", "fp32"), []
    for dtype in ("float32", "int8", "int4"):
        with opened(path, "custom", kv_cache_dtype=dtype, kv_memory=1 << 20) as model:
            limits = model.capabilities
            assert (
                0 <= (1 << 20) - limits.num_blocks * limits.kv_block_bytes < limits.kv_block_bytes
            )
            tokens.append(limits.num_blocks * limits.block_size)
    size = model.capabilities.kv_format.head_size
    for dtype, count in (("int8", tokens[1]), ("int4", tokens[2])):
        more = 4 * size / row_bytes(dtype, size)
        assert count / tokens[0] == pytest.approx(more, rel=0.05)


@pytest.mark.parametrize(
    ("short", "long"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")]
)
def test_types_have_short_names(tiny_artifact: ArtifactMaker, short: str, long: str) -> None:
    assert LoadOptions(dtype=short, kv_cache_dtype=short) == LoadOptions(
        dtype=long, kv_cache_dtype=long
    )
    with opened(tiny_artifact("llama", "fp32"), "custom", kv_cache_dtype=short) as model:
        assert model.capabilities.kv_cache_dtype == long


def two_steps(prompt: list[int]) -> list[StepInputs]:
    """A prompt in two chunks, blocks in falling order."""
    blocks = np.arange(4, 0, -1, dtype=np.int32)[None]
    half = len(prompt) // 2
    return [
        StepInputs(
            input_ids=np.array(ids, np.int64),
            block_table=blocks,
            cumulative_sequence_lengths=np.array([0, len(ids)], np.int32),
            past_sequence_lengths=np.array([past], np.int32),
            attention_metadata=np.array([len(ids), past + len(ids), past + len(ids)], np.int32),
            logits_indices=np.array([len(ids) - 1], np.int32),
        )
        for past, ids in ((0, prompt[:half]), (half, prompt[half:]))
    ]


def test_what_is_in_an_array_by_the_next_run_is_read_and_nothing_is_written(
    tiny_artifact: ArtifactMaker,
) -> None:
    path = tiny_artifact("llama", "fp32")
    prompts = [PROMPT, list(reversed(PROMPT))]
    with opened(path, "custom") as model:
        expected = [model.run(two_steps(prompt)[0]).copy() for prompt in prompts]
        assert np.abs(expected[0] - expected[1]).max() > 0
        step, other = two_steps(prompts[0])[0], two_steps(prompts[1])[0]
        assert model.run(step).tobytes() == expected[0].tobytes()
        step.input_ids[:] = other.input_ids
        assert model.run(step).tobytes() == expected[1].tobytes()
        third = two_steps(prompts[0])[0]
        assert model.run(third).tobytes() == expected[0].tobytes()
        assert (step.input_ids == other.input_ids).all()


def test_every_node_runs_on_the_cpu_and_the_report_says_so(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "int4"), "custom") as model:
        capabilities = model.capabilities
    assert set(capabilities.placement) == {"CPUExecutionProvider"}
    assert sum(capabilities.placement.values()) > 10
    assert capabilities.attention == "custom"
    assert capabilities.compute_dtype == "float32"
    assert capabilities.num_blocks * capabilities.block_size == 1024


def test_without_the_kernel_the_decomposed_graph_runs_and_says_so(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "find_library", lambda: None)
    with opened(tiny_artifact("llama", "int4"), None) as model:
        assert model.capabilities.attention == "decomposed"
    assert "not built" in caplog.text
    assert any("not built" in note for note in cpu.CpuProvider().probe().notes)
    with (
        pytest.raises(ProviderError, match="install a compiler"),
        opened_without_skip(tiny_artifact("llama", "int4"), LoadOptions(attention="custom")),
    ):
        pass


@contextmanager
def opened_without_skip(path: Path, options: LoadOptions) -> Iterator[Model]:
    model = open_model(path, "cpu", options)
    yield model
    model.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (LoadOptions(attention="native"), ProviderError, "custom or decomposed"),
        (
            LoadOptions(kv_cache_dtype="u8"),
            ProviderError,
            "float32, float16, bfloat16, int8, int4 or auto",
        ),
        (
            LoadOptions(kv_cache_dtype="float16", attention="decomposed"),
            ProviderError,
            "stores float32 or auto",
        ),
        (
            LoadOptions(kv_cache_dtype="int8", attention="decomposed"),
            ProviderError,
            "decomposed attention stores float32 or auto",
        ),
        (LoadOptions(block_size=24), ProviderError, "multiples of 16"),
        (LoadOptions(max_model_len=129), ProviderError, "context of 128"),
        (LoadOptions(max_model_len=100, kv_cache_tokens=64), CapacityError, "4 blocks of 16"),
        (LoadOptions(kv_cache_tokens=7), CapacityError, "is 7, .* smallest cache"),
        (LoadOptions(kv_cache_tokens=10**12), CapacityError, "is 1000000000000, "),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tiny_artifact: ArtifactMaker, options: LoadOptions, error: type[Exception], message: str
) -> None:
    with (
        pytest.raises(error, match=message),
        opened_without_skip(tiny_artifact("llama", "fp32"), options),
    ):
        pass


def test_a_pool_without_limits_is_sized_from_free_memory(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "fp32"), None, kv_cache_tokens=None) as model:
        capabilities = model.capabilities
    assert capabilities.max_model_len == 128
    assert capabilities.num_blocks * capabilities.block_size == 256 * 128


def test_a_closed_model_says_so(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "fp32"), None) as model:
        model.close()
        with pytest.raises(ProviderError, match="closed"):
            model.run(two_steps(PROMPT)[0])


def test_heads_that_the_kernel_does_not_take(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Run decomposed, unless the kernel was asked for by name."""
    case = checkpoints.Case("llama", {"head_dim": 20})
    peer = checkpoints.make(case, tmp_path / "checkpoint")
    path = export_model(
        tmp_path / "checkpoint", tmp_path / "artifact", ExportOptions(precision="fp32")
    )
    if find_library() is not None:
        with (
            pytest.raises(ProviderError, match="head size 20, allowed are multiples of 8"),
            opened(path, "custom"),
        ):
            pass
    tokens = checkpoints.tokens().tolist()
    expected = checkpoints.logits(peer, np.array(tokens))
    with opened(path, None) as model:
        assert model.capabilities.attention == "decomposed"
        for inputs in two_steps(tokens):
            found = model.run(inputs)
    np.testing.assert_allclose(found[-1], expected[-1], atol=1e-4)
    assert find_library() is None or "slower decomposed graph" in caplog.text
