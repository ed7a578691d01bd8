"""Whether a plugin's paged attention can be trusted; see `providers.self_test`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.graphs.passes.flat_paged import flatten_paged
from onnxport.providers import self_test
from onnxport.providers.base import StepInputs
from onnxport.providers.openvino.compiled import bind_caches, cache_format
from onnxport.providers.openvino.convert import convert
from onnxport.providers.openvino.model import flat_inputs
from onnxport.providers.openvino.plugin import NAMES, Plugin


def distrust(core: Any, plugin: Plugin, config: Mapping[str, Any]) -> str:
    """Return why the paged attention of a plugin is not to be used; "" where it may be.

    Args:
        core: openvino.Core.
        plugin: to be tested.
        config: its properties, `INFERENCE_PRECISION_HINT` among them.
    """
    dtype = NAMES[config["INFERENCE_PRECISION_HINT"]]
    return self_test.distrust_runner(
        partial(_run, core, plugin, config), TensorProto.FLOAT, dtype, self_test.PLAIN
    )


def _run(
    core: Any,
    plugin: Plugin,
    config: Mapping[str, Any],
    model: onnx.ModelProto,
    tried: self_test.Tried,
) -> list[NDArray[np.float32]]:
    """See `providers.self_test.Runner`."""
    flat = flatten_paged(model).model
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in flat.graph.initializer}
    converted = convert(flat, weights)
    compiled = core.compile_model(converted.model, plugin.device, config)
    heads = (tried.num_kv_heads, tried.head_size)
    form = cache_format(compiled, heads, transposed_keys=plugin.transposed_keys)
    pairs, _ = plugin.allocate(core, form, 1, self_test.NUM_BLOCKS)
    request = compiled.create_infer_request()
    bind_caches(request, pairs)
    # A port has all the names of what was folded into it.
    known = {name for port in compiled.inputs for name in port.get_names()}
    return [_step(request, known, form.block_size, step) for step in self_test.step_inputs(tried)]


def _step(
    request: Any, known: set[str], block_size: int, step: dict[str, Any]
) -> NDArray[np.float32]:
    import openvino as ov

    qkv, none = step.pop(self_test.QKV), np.empty(0, np.int32)
    tokens = np.zeros(len(qkv), np.int64)  # only how many there are matters
    inputs = StepInputs(input_ids=tokens, logits_indices=none, more_block_tables=(), **step)
    for name, array in {self_test.QKV: qkv, **flat_inputs(inputs, block_size)}.items():
        if name in known:
            request.set_tensor(name, ov.Tensor(array))
    request.infer()
    return np.array(request.get_tensor(self_test.OUT).data)
