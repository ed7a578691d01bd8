"""Rows of tables: graphs for ONNX Runtime and of onnxport.GatherRows, and random cases of these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.kernels import matmul_cases

Array = NDArray[Any]
FLOATS = {
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
    ml_dtypes.bfloat16: TensorProto.BFLOAT16,
}


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


@dataclass(frozen=True)
class GatherCase:
    """One call of onnxport.GatherRows."""

    tensors: list[TensorProto]  # a table of floats; or one in 8 bits, and its scales
    ids: Array
    block_size: int | None = None  # with scales

    @property
    def sizes(self) -> dict[str, int]:
        return {} if self.block_size is None else {"block_size": self.block_size}


def random_case(seed: int) -> GatherCase:
    """Every eighth has a table that is large enough to be read from a file."""
    dice = np.random.default_rng(seed)
    block = int(dice.choice((16, 32, 128, 1024)))
    width = block * int(dice.integers(1, 12))
    rows = (1 << 20) // width + 1 if seed % 8 == 0 else int(dice.integers(1, 40))
    ids: Array = dice.integers(0, rows, (int(dice.integers(0, 3)), int(dice.integers(1, 40))))
    if seed // 8 % 2:
        scale = (np.float32, np.float16)[seed // 16 % 2]
        return GatherCase(quantized(rows, width, block, scale), ids, block)
    dtype = list(FLOATS)[seed // 16 % 3]
    width -= seed // 2 % 2  # less than whole blocks, as floats may be
    return GatherCase([tensor("t", dice.standard_normal((rows, width)).astype(dtype))], ids)


def check(library: Path, folder: Path, case: GatherCase) -> None:
    """Run a case with its table in memory and in a file of `folder`."""
    table, *scales = (numpy_helper.to_array(one) for one in case.tensors)
    wide = table[case.ids].astype(np.float32)
    if case.block_size is not None:
        shape = (*case.ids.shape, table.shape[1] // case.block_size, case.block_size)
        blocks = wide.reshape(shape) - 128
        blocks *= scales[0][case.ids].astype(np.float32)[..., None]
        wide = blocks.reshape(wide.shape)
    made = model(True, case.tensors, **case.sizes)
    assert gathered(library, made, case.ids).tobytes() == wide.tobytes()
    session = open_model(library, stored(folder, case.tensors, **case.sizes))
    assert session.run(None, {"ids": case.ids})[0].tobytes() == wide.tobytes()
