"""Tensors that a model's graph and the graph of an artifact within its folder both name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.manifest import FileInfo
from onnxport.graphs.tensors import TensorRef, onnx_dtype

LEAST_BYTES: Final = 4096  # less is not worth a look
_CHUNK_BYTES: Final = 16 << 20  # compared at once


class SharedTensors:
    """The tensors of an inner artifact, for the outer one's graphs to name.

    ONNX lets a graph name files in its own folder and in folders within, and none outside. So what
    both have lies in the inner artifact's weights file: either folder is whole by itself, however
    it is copied, as long as an outer one is copied with what it contains.
    """

    def __init__(self, inner: Artifact, folder: str) -> None:
        """Look through the inner artifact's paged graph.

        Args:
            inner: what the outer folder contains.
            folder: the name that it has there.

        Raises:
            ArtifactError: Its graph is damaged.
        """
        from onnx import TensorProto

        self._inner = inner
        self._refs: dict[tuple[int, int], list[TensorRef]] = {}  # by type and bytes
        for tensor in inner.load_graph("paged").graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            location, offset, length = inner.external(tensor)
            if length >= LEAST_BYTES:
                ref = TensorRef(
                    *(tensor.name, tensor.data_type, tuple(tensor.dims), offset, length),
                    location=f"{folder}/{location}",
                )
                self._refs.setdefault((tensor.data_type, length), []).append(ref)

    def find(self, name: str, array: NDArray[Any]) -> TensorRef | None:
        """Where the inner artifact has the bytes of an array, as a tensor `name` of its shape.

        None where it has none such.
        """
        key = onnx_dtype(array.dtype), array.nbytes
        for ref in self._refs.get(key, ()):
            if _are_same(self._bytes(ref), np.ascontiguousarray(array).reshape(-1).view(np.uint8)):
                return replace(ref, name=name, dims=array.shape)
        return None

    def file(self, ref: TensorRef) -> FileInfo:
        """The file in which such a tensor lies, for the outer manifest to list."""
        return self._inner.manifest.files[_within(ref)]

    def _bytes(self, ref: TensorRef) -> NDArray[np.uint8]:
        return self._inner.map_file(_within(ref), ref.offset, (ref.length,), np.dtype(np.uint8))


def _within(ref: TensorRef) -> str:
    return ref.location.partition("/")[2]


def _are_same(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> bool:
    """Whether two tensors have the same bytes, [bytes] of each; stops at a part that differs."""
    return all(
        np.array_equal(ours[start : start + _CHUNK_BYTES], theirs[start : start + _CHUNK_BYTES])
        for start in range(0, len(ours), _CHUNK_BYTES)
    )
