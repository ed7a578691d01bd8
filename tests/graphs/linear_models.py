"""Graphs of the standard operators of linear attention around the cases of the kernels' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.graphs import contract as c
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.linear_attention import StatePool
from tests.graphs.paged_models import start
from tests.kernels.linear_cases import Case, ConvCase, Floats

NAMES = {"lengths": c.CUMULATIVE_SEQUENCE_LENGTHS, "reads": c.STATE_READS, "writes": c.STATE_WRITES}
FLOAT32_INPUTS = ("decay", "beta", "a_log", "dt_bias")  # whatever the activations are


def linear_model(case: Case, dtype: int = TensorProto.FLOAT, **attributes: Any) -> onnx.ModelProto:
    """A model of one standard operator on the pool; `attributes` replace the node's."""
    g = GraphBuilder("linear")
    values = {}
    for name, value in feeds(case).items():
        kind = TensorProto.INT32 if value.dtype == np.int32 else dtype
        kind = TensorProto.FLOAT if name in FLOAT32_INPUTS else kind
        rank = [f"{name}{axis}" for axis in range(value.ndim)]
        values[name] = g.input(name, kind, rank)
    is_conv = isinstance(case, ConvCase)
    pool = _declare_pool(g, case, dtype if is_conv else TensorProto.FLOAT)
    lengths, state = c.CUMULATIVE_SEQUENCE_LENGTHS, pool.read(g)
    given: dict[str, Any]
    if isinstance(case, ConvCase):
        kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
        weight = g.constant(case.weight.astype(kind), "weight")
        bias = "" if case.bias is None else g.constant(case.bias.astype(kind), "bias")
        operator, inputs = "VarlenCausalConvWithState", ["x", weight, lengths, bias, state]
        given = {"activation": "silu"} if case.has_silu else {}
    else:
        gate = [values.get(name, "") for name in ("a_log", "dt_bias")]
        projections = [values.get(name, "") for name in ("query", "key", "value")]
        if case.has_steps:
            total = g.node("Add", ["decay", "dt_bias"], name="total")
            steps = g.node("Softplus", [total], name="steps")
            column = g.node("Unsqueeze", [steps, ops.last_axis(g)], name="column")
            projections[2] = g.node("Mul", ["value", column], name="stepped")
        operator, inputs = "GatedDeltaNet", [*projections, lengths, "decay"]
        inputs += [values.get("beta", ""), state, *gate]
        given = {"qk_l2_norm": int(case.is_normalized), "update_rule": "gated_delta"}
        given |= {} if case.beta is not None else {"update_rule": "gated"}
        given |= {"gate_activation": "qwen"} if gate[0] else {}
        given |= {"channel_decay": 1} if case.has_channels else {}
        given |= {"beta_activation": "sigmoid"} if case.has_sigmoid else {}
        given |= {} if case.scale is None else {"scale": case.scale}
    outputs = [g.output("y", dtype, None), "states"]
    g.node(
        operator,
        inputs,
        outputs=outputs,
        domain=c.MICROSOFT,
        name="layer",
        **{**given, **attributes},
    )
    pool.write(g, "states")
    return g.build()


def feeds(case: Case) -> dict[str, NDArray[Any]]:
    """What changes from step to step, by the contract's names."""
    return {NAMES.get(name, name): value for name, value in case.feeds().items()}


def run(model: onnx.ModelProto, case: Case, library: Path | None = None) -> tuple[Floats, Floats]:
    """The output, and the pool, which is bound in place. Of float32 models."""
    session = start(model, library)
    states = case.pool.copy()
    held = ort.OrtValue.ortvalue_from_numpy(states)  # which is in its memory
    binding = session.io_binding()
    binding.bind_output("y", "cpu")
    for name, value in feeds(case).items():
        binding.bind_cpu_input(name, np.ascontiguousarray(value))
    binding.bind_ortvalue_input(c.past_conv_state(0), held)
    binding.bind_ortvalue_output(c.present_conv_state(0), held)
    session.run_with_iobinding(binding)
    output: Floats = binding.get_outputs()[0].numpy()
    return output, states


def _declare_pool(g: GraphBuilder, case: Case, dtype: int) -> StatePool:
    shape = [c.NUM_STATES, *case.pool.shape[1:]]
    past = g.input(c.past_conv_state(0), dtype, shape)
    return StatePool(past, g.output(c.present_conv_state(0), dtype, shape), "pool")
