"""Pools of states in a device's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxport.graphs import block_transfers as graphs
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import numpy_dtype, onnx_dtype
from onnxport.providers.ort import CacheTensor, Target, quiet_options, start_session
from onnxport.providers.states import StatePlan, state_tensors


def device_states(
    spec: ArchSpec, plan: StatePlan, conv_dtype: int, target: Target
) -> list[CacheTensor]:
    """Zeroed pools of all layers that have states, under the names of the paged graph.

    Args:
        spec: the model.
        plan: how many slots there are; the first one stays zeros, and padding writes the last one.
        conv_dtype: of those of convolutions, onnx.TensorProto.DataType.
        target: the execution provider that holds them.
    """
    sessions: dict[tuple[str, int], Any] = {}
    pools = []
    for pool in state_tensors(spec, numpy_dtype(conv_dtype).name):
        shape = (plan.pool_slots, *pool.shape)
        kind = (pool.dtype, len(shape))
        if kind not in sessions:
            model = graphs.zeros_graph(onnx_dtype(np.dtype(pool.dtype)), len(shape))
            start = (model.SerializeToString(), None, quiet_options(), target)
            sessions[kind] = start_session(*start)
        binding = sessions[kind].io_binding()
        binding.bind_cpu_input(graphs.SHAPE, np.array(shape, np.int64))
        binding.bind_output(graphs.ZEROS, target.memory, target.device_id)
        sessions[kind].run_with_iobinding(binding)
        pools.append(CacheTensor(pool.past, pool.present, binding.get_outputs()[0]))
    return pools
