"""Host arrays put into a device's memory, by a small graph that every execution provider runs."""

from __future__ import annotations

from typing import Any

from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.tensors import onnx_dtype
from onnxport.providers.adapters import Arrays, Values
from onnxport.providers.ort import Target, ort_value, quiet_options, start_session


class DeviceArrays:
    """Copies sets of arrays of the same names; sizes may differ from one set to the next.

    What fails on the device is raised as ONNX Runtime raises it.
    """

    def __init__(self, target: Target) -> None:
        """Start nothing yet.

        Args:
            target: the execution provider that reads the arrays.
        """
        self._target = target
        self._session: Any = None

    def __call__(self, arrays: Arrays) -> Values:
        """The arrays where the target reads them, onnxruntime.OrtValue; on the host, themselves."""
        if self._target.is_host:
            return {name: ort_value(array) for name, array in arrays.items()}
        if self._session is None:
            model = _copies(arrays).SerializeToString()
            self._session = start_session(model, None, quiet_options(), self._target)
        binding = self._session.io_binding()
        for name, array in arrays.items():
            binding.bind_ortvalue_input(name, ort_value(array))
            binding.bind_output(_copy(name), self._target.memory, self._target.device_id)
        self._session.run_with_iobinding(binding)
        return dict(zip(arrays, binding.get_outputs(), strict=True))


def _copy(name: str) -> str:
    return f"{name}.copy"


def _copies(arrays: Arrays) -> Any:
    """A graph that returns each of its inputs; sizes are free."""
    g = GraphBuilder("copies")
    for name, array in arrays.items():
        dims = [f"{name}.{axis}" for axis in range(array.ndim)]
        kind = onnx_dtype(array.dtype)
        g.output(_copy(name), kind, dims)
        g.node("Identity", [g.input(name, kind, dims)], outputs=[_copy(name)])
    return g.build()
