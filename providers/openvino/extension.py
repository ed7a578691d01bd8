"""Our extension of OpenVINO: an operator that computes what LoRA adapters add to a product."""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from onnxport.graphs.lora import RANKS, SCALES, WEIGHTS
from onnxport.providers.adapters import Arrays, Values
from onnxport.providers.cpu import library

logger = logging.getLogger(__name__)

OPERATOR: Final = "LoraDelta"
TYPES: Final = {"float32": 0, "float16": 1, "int8": 2}  # LoraType in csrc
MOST_AXES: Final = 4

_NAMES: Final = ("onnxport_openvino.so", "onnxport_openvino.dylib", "onnxport_openvino.dll")
_FOLDER = Path(__file__).parent  # tests choose another one
_numbers: Final = itertools.count(1)  # of models in this process


class Extension:
    """The library, with the kernel that it computes with."""

    def __init__(self, path: Path, kernels: Path) -> None:
        """Load it.

        Args:
            path: the library.
            kernels: the CPU provider's, whose kernel it gets.

        Raises whatever ctypes and OpenVINO raise where it does not fit.
        """
        from openvino.utils.node_factory import NodeFactory  # OpenVINO's libraries come first

        self._library = _declared(ctypes.CDLL(str(path)))
        found, wanted = self._library.onnxport_openvino_adapters_size(), ctypes.sizeof(_Adapters)
        if found != wanted:
            raise OSError(
                f"{path.name} is of another version: it takes {found} bytes, not {wanted}"
            )
        add = ctypes.CDLL(str(kernels)).onnxport_cpu_add_lora
        self._factory = NodeFactory("opset15")
        self._factory.add_extension(str(path))
        self._library.onnxport_openvino_set_kernel(ctypes.cast(add, ctypes.c_void_p))

    def node(self, activations: Any, slots: Any, attributes: Mapping[str, int]) -> Any:
        """A node of an OpenVINO graph: what a model's adapters add, float32 [tokens, columns].

        Args:
            activations: float32 [tokens, depth].
            slots: int32 [tokens].
            attributes: those of AddLora, and `model`, see `Loaded`.
        """
        return self._factory.create(OPERATOR, [activations, slots], dict(attributes)).output(0)

    def give(self, model: int, arrays: Arrays | None) -> None:
        """Let nodes of a model read arrays, which must stay as long as it runs; None: no more."""
        given = None if arrays is None else ctypes.byref(_adapters(arrays))
        self._library.onnxport_openvino_set_adapters(model, given)


class Loaded:
    """The adapters of one model."""

    def __init__(self, extension: Extension) -> None:
        self.model = next(_numbers)  # the attribute of its nodes
        self._extension = extension

    def __call__(self, arrays: Arrays) -> Values:
        """See `providers.adapters.Place`: nodes read the arrays, and the graph is given none."""
        self._extension.give(self.model, arrays)
        return {}

    def __del__(self) -> None:
        """Take back what was given: nobody keeps it from here on."""
        self._extension.give(self.model, None)


def load_extension() -> Extension | None:
    """Returns the extension; None where adapters do without.

    It is missing where `onnxport` was installed without the package `openvino` to build against,
    and it fits only the release that it was built against.
    """
    kernels = library.find_library()
    own = next((file for name in _NAMES if (file := _FOLDER / name).is_file()), None)
    if own is None or kernels is None:
        logger.info(
            "LoRA adapters are computed without our operator for OpenVINO: it was not built"
        )
        return None
    try:
        return Extension(own, kernels)
    except Exception as error:  # OpenVINO's own classes derive from Exception alone
        logger.warning("LoRA adapters are computed without our operator for OpenVINO: %s", error)
        return None


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dims", ctypes.c_int64 * MOST_AXES),
        ("rank", ctypes.c_size_t),
    )


class _Adapters(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int64),
        ("ranks", _Tensor),
        ("weights", _Tensor),
        ("scales", _Tensor),
    )


def _adapters(arrays: Arrays) -> _Adapters:
    weights = arrays[WEIGHTS]
    scales = _tensor(arrays[SCALES]) if SCALES in arrays else _Tensor()
    return _Adapters(TYPES[weights.dtype.name], _tensor(arrays[RANKS]), _tensor(weights), scales)


def _tensor(array: NDArray[Any]) -> _Tensor:
    assert array.flags.c_contiguous
    dims = (ctypes.c_int64 * MOST_AXES)(*array.shape)
    return _Tensor(array.ctypes.data, dims, array.ndim)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.onnxport_openvino_set_kernel.restype = None
    library.onnxport_openvino_set_kernel.argtypes = [ctypes.c_void_p]
    library.onnxport_openvino_set_adapters.restype = None
    library.onnxport_openvino_set_adapters.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    library.onnxport_openvino_adapters_size.restype = ctypes.c_size_t
    library.onnxport_openvino_adapters_size.argtypes = []
    return library
