"""Memory of a device that is written to piece by piece, such as slots for adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.tensors import onnx_dtype
from onnxport.providers.adapters import Arrays, Values
from onnxport.providers.ort import Target

# Copies an array to an address in the memory of a device.
Copy = Callable[[int, NDArray[Any]], None]


class DeviceSlots:
    """Arrays of one size in a device's memory, onnxruntime.OrtValue."""

    def __init__(self, target: Target, copy: Copy) -> None:
        """Take nothing yet.

        Args:
            target: whose memory it is.
            copy: to it; whatever reads there has ended by then.
        """
        self._target = target
        self._copy = copy
        self._values: dict[str, Any] = {}
        self._item_bytes: dict[str, int] = {}

    def place(self, arrays: Arrays) -> Values:
        """Make room for arrays: small ones are copied, of others only the size is taken."""
        import onnxruntime as ort

        for name, array in arrays.items():
            self._values[name] = ort.OrtValue.ortvalue_from_shape_and_type(
                list(array.shape),
                int(onnx_dtype(array.dtype)),
                self._target.memory,
                self._target.device_id,
            )
            self._item_bytes[name] = array.itemsize
            if array.dtype == np.int32:
                self.write(name, 0, array)
        return self._values

    def write(self, name: str, begin: int, numbers: NDArray[Any]) -> None:
        """Copy numbers over those from `begin` on. Raises ProviderError where the device fails."""
        address = self._values[name].data_ptr() + begin * self._item_bytes[name]
        self._copy(address, np.ascontiguousarray(numbers))
