"""Finds the extension of OpenVINO with an operator of our own, and gives it its kernel."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Final

from onnxport.providers.cpu import library

logger = logging.getLogger(__name__)

_NAMES: Final = ("onnxport_openvino.so", "onnxport_openvino.dylib", "onnxport_openvino.dll")
_FOLDER = Path(__file__).parent  # tests choose another one


def load_extension() -> Path | None:
    """Returns the library to give to OpenVINO, ready for use; None where adapters do without.

    It is missing where `onnxport` was installed without the package `openvino` to build against,
    and it fits only the release that it was built against. Its kernel is the CPU provider's.
    """
    kernels = library.find_library()
    own = next((file for name in _NAMES if (file := _FOLDER / name).is_file()), None)
    if own is None or kernels is None:
        return None
    from openvino.utils.node_factory import NodeFactory  # OpenVINO's libraries come first

    try:
        use = ctypes.CDLL(str(own)).onnxport_openvino_use
        add = ctypes.CDLL(str(kernels)).onnxport_cpu_add_lora
        NodeFactory().add_extension(str(own))
    except Exception as error:  # OpenVINO's own classes derive from Exception alone
        logger.warning("LoRA adapters are computed without our operator for OpenVINO: %s", error)
        return None
    use.restype, use.argtypes = None, [ctypes.c_void_p]
    use(ctypes.cast(add, ctypes.c_void_p))
    return own
