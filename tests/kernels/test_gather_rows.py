"""onnxport.GatherRows: what ONNX Runtime's operators give, of tables in memory and in files."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from tests.kernels.gather_cases import (
    FLOATS,
    check,
    gathered,
    model,
    open_model,
    quantized,
    random_case,
    stored,
    tensor,
)

Array = NDArray[Any]
IDS = np.array([[5, 0, 5], [1, 2, 6]], np.int64)
LINUX = pytest.mark.skipif(platform.system() != "Linux", reason="tables stay in memory elsewhere")


@pytest.mark.parametrize("scale", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("width", "block"), [(64, 16), (96, 32), (256, 128), (9 * 1024, 1024), (20 * 1024, 128)]
)
def test_rows_of_8_bits_are_those_of_the_runtime(
    library_path: Path, width: int, block: int, scale: type
) -> None:
    # Its operator has scales and results of one type; ours widens scales first, as `retype` does.
    tensors = quantized(7, width, block, scale)
    wide = onnx.numpy_helper.to_array(tensors[1]).astype(np.float32)
    expected = gathered(
        library_path, model(False, [tensors[0], tensor("s", wide)], block_size=block), IDS
    )
    found = gathered(library_path, model(True, tensors, block_size=block), IDS)
    assert found.shape == (2, 3, width)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 48, 5001])
def test_rows_of_floats_are_those_of_the_runtime(
    library_path: Path, dtype: type, width: int
) -> None:
    table: Array = np.random.default_rng(width).standard_normal((7, width)).astype(dtype)
    table[0, 0] = np.inf
    tensors = [tensor("t", table)]
    expected = gathered(library_path, model(False, tensors), IDS)
    assert gathered(library_path, model(True, tensors), IDS).tobytes() == expected.tobytes()


@pytest.mark.parametrize("seed", range(0, 96, 8))
def test_rows_of_random_tables(library_path: Path, tmp_path: Path, seed: int) -> None:
    for one in (seed, seed + 1):
        check(library_path, tmp_path, random_case(one))


def test_there_may_be_no_rows_and_very_many(library_path: Path) -> None:
    made = model(True, quantized(7, 64, 16, np.float16), block_size=16)
    assert gathered(library_path, made, IDS[:0]).shape == (0, 3, 64)
    many = np.random.default_rng(0).integers(0, 7, 3000)
    found = gathered(library_path, made, many)
    assert found.tobytes() == gathered(library_path, made, np.arange(7))[many].tobytes()


@pytest.mark.parametrize("wrong", [-1, 7, 1 << 40])
def test_what_is_no_row_is_refused(library_path: Path, wrong: int) -> None:
    made = model(True, quantized(7, 64, 16, np.float16), block_size=16)
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument) as error:
        gathered(library_path, made, np.array([0, wrong, 1]))
    assert f"indices must be from 0 to 6, found {wrong}" in str(error.value)


@pytest.mark.parametrize("block", [8, 24, 0, 16384])
def test_blocks_that_do_not_fit_are_refused(library_path: Path, block: int) -> None:
    made = model(True, quantized(7, 64, 16, np.float16), block_size=block)
    with pytest.raises(Exception, match="block_size must be from 16 to 8192 and divide"):
        gathered(library_path, made, IDS)


def resident_mib() -> float:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


def test_floats_with_scales_are_refused(library_path: Path) -> None:
    floats: Array = np.ones((7, 64), np.float32)
    scales: Array = np.ones((7, 4), np.float32)
    made = model(True, [tensor("t", floats), tensor("s", scales)], block_size=16)
    with pytest.raises(Exception, match="a table of floats has no scales"):
        gathered(library_path, made, IDS)


@LINUX
@pytest.mark.parametrize("floats", [False, True])
def test_a_large_table_does_not_come_into_memory(
    library_path: Path, tmp_path: Path, floats: bool
) -> None:
    rows, width = 32768, 2048  # 64 MiB, and scales of 2 MiB
    if floats:
        table: Array = (
            np.random.default_rng(0).standard_normal((rows, width // 2)).astype(np.float16)
        )
        place, width = stored(tmp_path, [tensor("t", table)]), width // 2
        wide: Array = table[::16].astype(np.float32)
    else:
        tensors = quantized(rows, width, 64, np.float16)
        place = stored(tmp_path, tensors, block_size=64)
        table, scales = (onnx.numpy_helper.to_array(one)[::16] for one in tensors)
        wide = (table.astype(np.float32) - 128).reshape(-1, width // 64, 64)
        wide = (wide * scales.astype(np.float32)[..., None]).reshape(-1, width)
        del tensors, scales
    del table
    session = open_model(library_path, place)
    session.run(None, {"ids": np.arange(0, 160, 16)})  # makes what it keeps
    before = resident_mib()
    for first in range(0, rows, 1024):  # a row of each of the table's pages, and more
        ids = np.arange(first, first + 1024, 16)
        found = session.run(None, {"ids": ids})[0]
        assert found.tobytes() == wide[first // 16 : first // 16 + 64].tobytes()
    assert resident_mib() - before < 12


@LINUX
def test_the_file_may_get_another_name_or_none(library_path: Path, tmp_path: Path) -> None:
    tensors = quantized(2048, 2048, 64, np.float32)
    place = stored(tmp_path, tensors, block_size=64)
    session = open_model(library_path, place)
    ids = np.array([0, 1023, 2047])
    expected = session.run(None, {"ids": ids})[0]
    data = tmp_path / "model.onnx.data"
    shutil.move(data, tmp_path / "other")
    data.write_bytes(bytes(8 << 20))
    assert session.run(None, {"ids": ids})[0].tobytes() == expected.tobytes()
    (tmp_path / "other").unlink()
    assert session.run(None, {"ids": ids})[0].tobytes() == expected.tobytes()
