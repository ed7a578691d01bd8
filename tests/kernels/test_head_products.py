"""onnxport.HeadProducts: right, and the same bits for a row whatever else there is."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.kernels import matmul_cases

Array = NDArray[Any]
DTYPES = {
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
    ml_dtypes.bfloat16: TensorProto.BFLOAT16,
}
# heads, K, N: with and without whole registers, and of real models
SIZES = [(4, 16, 32), (3, 7, 5), (1, 1, 1), (5, 24, 130), (2, 192, 512), (2, 512, 256)]
PARTS = [slice(0, 1), slice(69, 70), slice(3, 5), slice(5, 41), slice(2, 70)]


def model(weights: Array, **changes: int) -> bytes:
    heads, outputs, depth = weights.shape
    sizes = {"heads": heads, "K": depth, "N": outputs} | changes
    node = helper.make_node("HeadProducts", ["x", "w"], ["y"], domain="onnxport", **sizes)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy")
    kind = DTYPES[weights.dtype.type]
    stored = helper.make_tensor("w", kind, weights.shape, weights.tobytes(), raw=True)
    graph = helper.make_graph([node], "test", [x], [y], [stored])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxport", 1)]
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return made


def numbers(sizes: tuple[int, int, int], dtype: type, rows: int) -> tuple[Array, Array]:
    """Rows [rows, heads, K] and weights [heads, N, K]."""
    heads, depth, outputs = sizes
    dice = np.random.default_rng(depth)
    x = dice.standard_normal((rows, heads, depth)).astype(np.float32)
    return x, dice.standard_normal((heads, outputs, depth)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_right_and_the_same_alone_and_in_any_batch(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    sizes: tuple[int, int, int],
    dtype: type,
) -> None:
    x, weights = numbers(sizes, dtype, 70)
    wide = weights.astype(np.float64)
    expected = np.einsum("thk,hnk->thn", x, wide)
    size = np.einsum("thk,hnk->thn", np.abs(x), np.abs(wide))
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        session = matmul_cases.session(library_path, model(weights))
        whole = session.run(None, {"x": x})[0]
        assert (np.abs(whole - expected) <= 1e-6 * size).all()
        for part in PARTS:
            assert session.run(None, {"x": x[part]})[0].tobytes() == whole[part].tobytes()
        alone = matmul_cases.session(library_path, model(weights), threads=1)
        assert alone.run(None, {"x": x})[0].tobytes() == whole.tobytes()


def test_there_may_be_no_rows_and_more_axes(library_path: Path) -> None:
    x, weights = numbers((4, 16, 32), np.float16, 6)
    session = matmul_cases.session(library_path, model(weights))
    assert session.run(None, {"x": x[:0]})[0].shape == (0, 4, 32)
    flat = session.run(None, {"x": x})[0]
    deep = session.run(None, {"x": x.reshape(2, 3, 4, 16)})[0]
    assert deep.tobytes() == flat.tobytes()
    assert deep.shape == (2, 3, 4, 32)


@pytest.mark.parametrize("shape", [(6, 3, 16), (6, 4, 15), (64,)], ids=str)
def test_inputs_of_another_shape_are_refused(library_path: Path, shape: tuple[int, ...]) -> None:
    _, weights = numbers((4, 16, 32), np.float16, 1)
    session = matmul_cases.session(library_path, model(weights))
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="4, 16"):
        session.run(None, {"x": np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("changes", "message"), [({"N": 0}, "N must be 1 or more"), ({"K": 8}, "weights")]
)
def test_weights_of_another_size_are_refused(
    library_path: Path, changes: dict[str, int], message: str
) -> None:
    _, weights = numbers((4, 16, 32), np.float16, 1)
    with pytest.raises(Exception, match=message):
        matmul_cases.session(library_path, model(weights, **changes))


def test_what_is_not_finite_spoils_its_own_row_and_head_alone(library_path: Path) -> None:
    x, weights = numbers((4, 16, 32), np.float16, 40)
    session = matmul_cases.session(library_path, model(weights))
    plain = session.run(None, {"x": x})[0]
    x[3, 1, 5] = np.nan
    found = session.run(None, {"x": x})[0]
    assert np.isnan(found[3, 1]).all()
    found[3, 1] = plain[3, 1]
    assert found.tobytes() == plain.tobytes()
