"""onnxport.GatherRows: what ONNX Runtime's operators give, of tables in memory and in files."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.kernels import matmul_cases

Array = NDArray[Any]
IDS = np.array([[5, 0, 5], [1, 2, 6]], np.int64)
FLOATS = {
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
    ml_dtypes.bfloat16: TensorProto.BFLOAT16,
}
LINUX = pytest.mark.skipif(platform.system() != "Linux", reason="tables stay in memory elsewhere")


def model(ours: bool, tensors: list[TensorProto], **sizes: int) -> onnx.ModelProto:
    """Rows of a table "t"; with scales "s" of one in 8 bits."""
    names = [tensor.name for tensor in tensors]
    inputs = [names[0], "ids", *names[1:]]
    values = ["rows"] if len(names) > 1 or ours else ["stored"]
    if ours:
        node = helper.make_node("GatherRows", inputs, values, domain="onnxport", **sizes)
    elif len(names) > 1:
        kind = {"bits": 8, "gather_axis": 0, "quantize_axis": 1}
        op, domain = "GatherBlockQuantized", "com.microsoft"
        node = helper.make_node(op, inputs, values, domain=domain, **kind, **sizes)
    else:
        node = helper.make_node("Gather", inputs, values)
    nodes = [node]
    if values == ["stored"]:
        nodes.append(helper.make_node("Cast", values, ["rows"], to=TensorProto.FLOAT))
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, None)
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "test", [ids], [rows], tensors)
    opsets = [
        helper.make_opsetid(*one) for one in (("", 21), ("onnxport", 1), ("com.microsoft", 1))
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def tensor(name: str, values: Array) -> TensorProto:
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    return helper.make_tensor(name, kind, values.shape, values.tobytes(), raw=True)


def quantized(rows: int, width: int, block: int, scale: type) -> list[TensorProto]:
    dice = np.random.default_rng(rows + width)
    table: Array = dice.integers(0, 256, (rows, width)).astype(np.uint8)
    scales: Array = dice.standard_normal((rows, width // block)).astype(scale)
    return [tensor("t", table), tensor("s", scales)]


def gathered(library: Path, made: onnx.ModelProto, ids: Array) -> Array:
    session = matmul_cases.session(library, made.SerializeToString())
    found: Array = session.run(None, {"ids": ids})[0]
    return found


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


def stored(folder: Path, tensors: list[TensorProto], **sizes: int) -> Path:
    """A model whose tensors are in a file beside it."""
    made = model(True, tensors, **sizes)
    place = folder / "model.onnx"
    onnx.save_model(
        made, place, save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )
    return place


def open_model(library: Path, place: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(str(place), options, providers=["CPUExecutionProvider"])


def resident_mib() -> float:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


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
