"""Multi-head latent attention on the cpu provider: one cache a layer, of rows as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxport.cache_rows import row_bytes, row_elements
from onnxport.errors import OptionError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.providers import rows
from onnxport.providers.cpu import library
from onnxport.providers.cpu import provider as cpu
from onnxport.providers.cpu.library import find_library
from tests.exporter import checkpoints
from tests.exporter.checkpoints import LATENT
from tests.providers.models import opened, run_rows
from tests.providers.test_cpu import two_steps

TOKENS = checkpoints.tokens(count=40).tolist()
ROW = 48  # channels of the tiny models' rows
DENSE = {**LATENT, "first_k_dense_replace": 3}  # no experts, of which rounding may choose others


def exported(folder: Path, precision: str = "fp32", **config: object) -> Path:
    """An artifact without experts."""
    case = checkpoints.Case("deepseek_v3", {**DENSE, "n_group": 1, "topk_group": 1, **config})
    checkpoints.make(case, folder / "checkpoint")
    options = ExportOptions(
        precision=precision, **({"group_size": 32} if precision == "int4" else {})
    )  # type: ignore[arg-type]
    return export_model(folder / "checkpoint", folder / "artifact", options)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [("float32", 1e-5), ("float16", 5e-3), ("bfloat16", 5e-2), ("int8", 1e-1)],
)
def test_each_type_of_cache_is_near_the_decomposed_graph(
    dense: Path, dtype: str, allowed: float
) -> None:
    with opened(dense, "decomposed") as plain, opened(dense, "custom", kv_cache_dtype=dtype) as own:
        limits = own.capabilities
        assert (limits.attention, limits.kv_cache_dtype) == ("custom", dtype)
        for step in two_steps(TOKENS):
            expected, found = plain.run(step).copy(), own.run(step)
            error = np.abs(found - expected).max() / np.abs(expected).max()
            assert error < allowed
            assert dtype == "float32" or error > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_a_block_has_a_row_a_token(dense: Path, dtype: str) -> None:
    with opened(dense, "custom", kv_cache_dtype=dtype) as model:
        limits, form = model.capabilities, model.capabilities.kv_format
    assert (form.parts, form.num_kv_heads, form.head_size) == (1, 1, ROW)
    tokens = form.num_layers * limits.block_size
    assert limits.kv_block_bytes == tokens * row_bytes(dtype, ROW)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_blocks_move_to_another_model_and_on(dense: Path, dtype: str) -> None:
    """What is read of one is written to another, where the sequence goes on with the same bits."""
    blocks, others = [0, 1, 2], [5, 3, 4]
    with (
        opened(dense, "custom", kv_cache_dtype=dtype) as first,
        opened(dense, "custom", kv_cache_dtype=dtype) as second,
    ):
        size = first.capabilities.block_size
        prompt = TOKENS[: 2 * size + 3]
        run_rows(first, [(prompt, 0, blocks)])
        content = first.read_blocks(blocks)
        shape = (3, first.capabilities.kv_format.num_layers, 1, 1, size, row_elements(dtype, ROW))
        assert content.shape == shape
        second.write_blocks(others, content)
        assert second.read_blocks(others).tobytes() == content.tobytes()
        going_on = [(TOKENS[len(prompt) :][:1], len(prompt), ids) for ids in (blocks, others)]
        expected = run_rows(first, going_on[:1])
        assert run_rows(second, going_on[1:]).tobytes() == expected.tobytes()
        second.copy_blocks(others, [9, 8, 7])
        after = second.read_blocks([9, 8, 7])
        assert after.tobytes() == second.read_blocks(others).tobytes()


def test_blocks_of_another_type_are_converted(dense: Path) -> None:
    """Of floats and int8 alike: canonical rows are what `providers.rows` converts."""
    with (
        opened(dense, "decomposed") as plain,
        opened(dense, "custom", kv_cache_dtype="int8") as small,
    ):
        run_rows(plain, [(TOKENS[:16], 0, [0])])
        exact = plain.read_blocks([0])
        small.write_blocks([3], rows.convert(exact, np.int8))
        found = rows.convert(small.read_blocks([3]), np.float32)
        assert np.abs(found - exact).max() <= np.abs(exact).max() / 127
        wanted = run_rows(plain, [(TOKENS[16:17], 16, [0, 1])])
        near = run_rows(small, [(TOKENS[16:17], 16, [3, 1])])
        assert 0 < np.abs(near - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.mark.parametrize(("level", "layout"), [(1, "rows"), (4, "paired")])
def test_products_are_of_pairs_where_they_may_be_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int, layout: str
) -> None:
    monkeypatch.setattr(library, "prefers_pairs", lambda: True)
    layouts = []
    allocate = cpu.allocate

    def note(spec: object, groups: object, pool: object, dtype: str, layout: str) -> object:
        layouts.append((dtype, layout))
        return allocate(spec, groups, pool, dtype, layout)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu, "allocate", note)
    path = exported(tmp_path, "int4")
    options = {"kv_cache_dtype": "bfloat16", "matmul_accuracy_level": level}
    with opened(path, "custom", **options) as model, opened(path, "decomposed") as plain:
        found, expected = (run_rows(one, [(TOKENS, 0, [0, 1, 2])]) for one in (model, plain))
    assert layouts[0] == ("bfloat16", layout)
    assert np.abs(found - expected).max() < 0.3 * np.abs(expected).max()


def test_a_cache_of_int4_is_refused(dense: Path) -> None:
    words = "custom attention of latents stores float32, float16, bfloat16, int8 or auto"
    with pytest.raises(OptionError, match=words), opened(dense, "custom", kv_cache_dtype="int4"):
        pass


@pytest.mark.parametrize(
    ("config", "words", "warning"),
    [
        ({"kv_lora_rank": 24}, "head size 40, allowed are multiples of 16", "have 24 channels"),
        (
            {"kv_lora_rank": 24, "qk_rope_head_dim": 8},
            "values of 24 channels, allowed are multiples of 16",
            "have 24 channels",
        ),
    ],
)
def test_rows_that_the_kernel_does_not_take(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, object],
    words: str,
    warning: str,
) -> None:
    """Run decomposed, unless the kernel was asked for by name."""
    path = exported(tmp_path, **config)
    if find_library() is not None:
        with pytest.raises(ProviderError, match=words), opened(path, "custom"):
            pass
    with opened(path, None) as model:
        assert model.capabilities.attention == "decomposed"
        run_rows(model, [(TOKENS[:5], 0, [0])])
    assert find_library() is None or warning in caplog.text
