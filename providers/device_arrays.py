"""Host arrays put into a device's memory, by a small graph that every execution provider runs."""

from __future__ import annotations

from typing import Any

from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.tensors import onnx_dtype
from onnxport.providers.adapters import Arrays, Values
from onnxport.providers.ort import Target, ort_value, quiet_options, start_session

_Sizes = dict[str, tuple[int, ...]]  # by name


class DeviceArrays:
    """Copies sets of arrays of the same names; sizes may differ from one set to the next.

    What fails on the device is raised as ONNX Runtime raises it.
    """

    def __init__(self, target: Target, *, steady: bool = False) -> None:
        """Start nothing yet.

        Args:
            target: the execution provider that reads the arrays.
            steady: put a set where the last one was, if sizes are the same, and return the same
                object; what was recorded on a device finds it there.
        """
        self._target = target
        self._steady = steady
        self._session: Any = None
        self._kept: tuple[_Sizes, Values] | None = None

    def __call__(self, arrays: Arrays) -> Values:
        """The arrays where the target reads them, onnxruntime.OrtValue; on the host, themselves."""
        if not self._steady:
            return self._put(arrays, None)
        sizes = {name: array.shape for name, array in arrays.items()}
        if self._kept is None or self._kept[0] != sizes:
            self._kept = sizes, self._put(arrays, None)
        else:
            self._put_over(arrays, self._kept[1])
        return self._kept[1]

    def _put_over(self, arrays: Arrays, values: Values) -> None:
        if not self._target.is_host:
            self._put(arrays, values)
            return
        for name, array in arrays.items():
            values[name].update_inplace(array)

    def _put(self, arrays: Arrays, places: Values | None) -> Values:
        if self._target.is_host:
            return {name: ort_value(array) for name, array in arrays.items()}
        if self._session is None:
            model = _copies(arrays).SerializeToString()
            self._session = start_session(model, None, quiet_options(), self._target)
        binding = self._session.io_binding()
        for name, array in arrays.items():
            binding.bind_ortvalue_input(name, ort_value(array))
            if places is None:
                binding.bind_output(_copy(name), self._target.memory, self._target.device_id)
            else:
                binding.bind_ortvalue_output(_copy(name), places[name])
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
