"""Memory of a device that is written to piece by piece, such as slots for adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.block_transfers import SHAPE, ZEROS, zeros_graph
from onnxport.graphs.tensors import onnx_dtype
from onnxport.providers.adapters import Arrays, Values
from onnxport.providers.ort import Target, quiet_options, start_session

# Copies an array to an address in the memory of a device, and returns when it is there.
Copy = Callable[[int, NDArray[Any]], None]


class DeviceSlots:
    """Arrays of one size in a device's memory, onnxruntime.OrtValue."""

    def __init__(self, target: Target, copy: Copy) -> None:
        """Take nothing yet.

        Args:
            target: whose memory it is.
            copy: to it; nothing reads there meanwhile.
        """
        self._target = target
        self._copy = copy
        self._values: dict[str, Any] = {}
        self._item_bytes: dict[str, int] = {}

    def place(self, arrays: Arrays) -> Values:
        """Make arrays of these sizes and types, which hold 0 whatever is in the given ones."""
        for name, array in arrays.items():
            self._values[name] = self._zeros(array)
            self._item_bytes[name] = array.itemsize
        return self._values

    def write(self, name: str, begin: int, numbers: NDArray[Any]) -> None:
        """Copy numbers over those from `begin` on. Raises ProviderError where the device fails."""
        address = self._values[name].data_ptr() + begin * self._item_bytes[name]
        self._copy(address, np.ascontiguousarray(numbers))

    def _zeros(self, array: NDArray[Any]) -> Any:
        """Memory of an execution provider, as much as is asked for, which goes with the value."""
        model = zeros_graph(onnx_dtype(array.dtype), array.ndim).SerializeToString()
        session = start_session(model, None, quiet_options(), self._target)
        binding = session.io_binding()
        binding.bind_cpu_input(SHAPE, np.array(array.shape, np.int64))
        binding.bind_output(ZEROS, self._target.memory, self._target.device_id)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0]
