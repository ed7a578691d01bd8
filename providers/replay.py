"""Decode steps in buffers that keep their addresses, so that a device can replay them.

CUDA can record the kernels of a run and start them all at once the next time, as long as shapes
and addresses stay the same ("CUDA graphs"). ONNX Runtime records one graph for each value of the
run option GRAPH_ID; here that is one for each shape of a padded decode step. The first run with a
value computes the step more than once, which changes nothing: it writes the same K/V again.

The bounds of `attention_metadata` are recorded too, so they are those of the shape, not of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs import contract
from onnxport.graphs.lora import TOKEN_SLOTS
from onnxport.providers.adapters import AdapterStep, Values
from onnxport.providers.base import StepInputs
from onnxport.providers.buckets import PaddedStep, StepShape
from onnxport.providers.device_logits import DeviceLogits
from onnxport.providers.ort import CacheTensor, Target

GRAPH_ID: Final = "gpu_graph_id"
NO_GRAPH: Final = "-1"  # neither record nor replay


@dataclass(frozen=True, slots=True)
class _Recording:
    """The buffers of one shape."""

    binding: Any  # onnxruntime.IOBinding
    inputs: dict[str, Any]  # name -> onnxruntime.OrtValue in device memory
    options: Any  # onnxruntime.RunOptions


class DecodeReplay:
    """Runs padded decode steps of one session."""

    def __init__(
        self,
        session: Any,
        caches: Sequence[CacheTensor],
        target: Target,
        logits: DeviceLogits,
        widths: Sequence[int],
        block_size: int,
    ) -> None:
        """Record nothing yet.

        Args:
            session: an onnxruntime.InferenceSession of a paged graph, all of it on the device.
            caches: the KV caches of all layers.
            target: where they are.
            logits: where all recordings write logits; it has room for the largest, and stays.
            widths: of block tables that steps are padded to.
            block_size: tokens of a KV block.
        """
        self._session = session
        self._caches = caches
        self._target = target
        self._logits = logits
        self._widths = widths
        self._block_size = block_size
        self._names = {node.name for node in session.get_inputs()}
        self._recordings: dict[StepShape, _Recording] = {}
        self._num_recorded = 0
        self._values: Values | None = None  # weights of adapters that the recordings read

    def run(self, step: PaddedStep, adapters: AdapterStep | None = None) -> None:
        """Leave the logits of a step in which every row has one token where `logits` has them.

        Args:
            step: padded.
            adapters: what it reads of these; None: the graph has none. Where that is not the object
                of the last step, all is recorded anew.
        """
        assert step.query_tile == 1, "a step that is not decoding"
        values = None if adapters is None else adapters.values
        if values is not self._values:
            self._recordings.clear()
            self._values = values
        arrays = self._arrays(step.inputs)
        if adapters is not None:
            arrays[TOKEN_SLOTS] = adapters.token_slots
        recording = self._recordings.get(step.shape)
        if recording is None:
            recording = self._recordings[step.shape] = self._record(step, arrays)
        else:
            for name, value in recording.inputs.items():
                value.update_inplace(arrays[name])
        self._session.run_with_iobinding(recording.binding, recording.options)

    def _arrays(self, inputs: StepInputs) -> dict[str, NDArray[Any]]:
        """What differs from step to step, by the name of the graph's input."""
        arrays: dict[str, NDArray[Any]] = {
            contract.INPUT_IDS: inputs.input_ids,
            contract.BLOCK_TABLE: inputs.block_table,
            contract.CUMULATIVE_SEQUENCE_LENGTHS: inputs.cumulative_sequence_lengths,
            contract.PAST_SEQUENCE_LENGTHS: inputs.past_sequence_lengths,
            contract.LOGITS_INDICES: inputs.logits_indices,
        }
        for group, table in enumerate(inputs.more_block_tables, 1):
            arrays[contract.block_table(group)] = table
        return {name: array for name, array in arrays.items() if name in self._names}

    def _record(self, step: PaddedStep, arrays: dict[str, NDArray[Any]]) -> _Recording:
        """Make the buffers of a shape, filled with its first step."""
        import onnxruntime as ort

        place = (self._target.memory, self._target.device_id)
        inputs = {
            name: ort.OrtValue.ortvalue_from_numpy(array.copy(), *place)
            for name, array in arrays.items()
        }
        binding = self._session.io_binding()
        for cache in self._caches:
            binding.bind_ortvalue_input(cache.input_name, cache.value)
            binding.bind_ortvalue_output(cache.output_name, cache.value)
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        if contract.ATTENTION_METADATA in self._names:
            width = step.shape.table_width
            # The longest sequence does not fit in the next narrower table. One that is known to be
            # long is computed in parts side by side.
            least = max([1, *(one * self._block_size for one in self._widths if one < width)])
            bounds = np.array([1, width * self._block_size, least], np.int32)
            binding.bind_cpu_input(contract.ATTENTION_METADATA, bounds)
        for name, value in (self._values or {}).items():
            binding.bind_ortvalue_input(name, value)
        self._logits.bind(binding, len(step.inputs.logits_indices))
        self._num_recorded += 1
        return _Recording(binding, inputs, run_options(str(self._num_recorded)))


def run_options(graph_id: str) -> Any:
    """Options of a run that records and replays a graph, or NO_GRAPH."""
    import onnxruntime as ort

    options = ort.RunOptions()
    options.add_run_config_entry(GRAPH_ID, graph_id)
    return options
