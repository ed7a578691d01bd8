"""Tensors that live in the weights file, and the ONNX names of NumPy's dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import TensorProto

WEIGHTS_FILE: Final = "model.onnx.data"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Bytes of a weights file seen as a tensor; `ArtifactWriter.add_weight` returns it."""

    name: str
    data_type: int  # onnx.TensorProto.DataType
    dims: tuple[int, ...]
    offset: int  # bytes from the start of the file
    length: int  # bytes
    location: str = WEIGHTS_FILE  # or that of an artifact within the folder, see `shared_tensors`

    def view(self, name: str, dims: tuple[int, ...]) -> TensorRef:
        """The same bytes under another name and shape, stored once.

        ONNX Runtime maps external data into memory on the CPU, so both share one page cache.
        """
        assert math.prod(dims) == math.prod(self.dims), f"{self.name} {self.dims} to {dims}"
        return replace(self, name=name, dims=dims)

    def initializer(self) -> TensorProto:
        """The external-data initializer that declares this tensor."""
        from onnx import TensorProto

        tensor = TensorProto(name=self.name, data_type=self.data_type, dims=self.dims)
        tensor.data_location = TensorProto.EXTERNAL
        entries = (("location", self.location), ("offset", self.offset), ("length", self.length))
        for key, value in entries:
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def onnx_dtype(dtype: np.dtype[Any]) -> int:
    """The ONNX element type of a NumPy (or ml_dtypes) dtype; raises ValueError for others."""
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(dtype))


def numpy_dtype(data_type: int) -> np.dtype[Any]:
    """The NumPy (or ml_dtypes) dtype of an ONNX element type; raises KeyError for others."""
    from onnx import helper

    dtype: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(data_type))
    return dtype


def convert(name: str, value: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`value` as a contiguous array of a floating type.

    Raises ArtifactError where a finite number becomes infinite, with the largest of `value`.
    """
    with np.errstate(over="ignore"):
        converted = np.asarray(value, dtype, order="C")  # which keeps a scalar one
    lost = ~np.isfinite(converted)
    if not lost.any() or not (lost & np.isfinite(value)).any():
        return converted
    largest = np.abs(value[np.isfinite(value)].astype(np.float64)).max()
    raise ArtifactError(
        f"retype: {name!r} holds {largest:g}, which is too large for {dtype.name}; run the model "
        "in a type of a wider range, such as float32"
    )
