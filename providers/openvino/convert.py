"""From an artifact's graph to an `openvino.Model`.

OpenVINO's own ONNX frontend reads the lowered graph. Two things are done for it here:

- Weights reach OpenVINO as constants over the artifact's memory map. The graph that the frontend
  reads declares them as inputs; afterwards each one is replaced by its constant.
- `FlatPagedAttention`, `MatMulNBits` and `GatherBlockQuantized` have conversions of our own: the
  first into OpenVINO's paged attention, the others into the pattern of a compressed weight that
  OpenVINO's kernels take, again over the memory map. So have experts that `lower` kept, see
  `experts.py`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.contract import MICROSOFT
from onnxport.graphs.experts import DOWN_BITS, OFFSETS, Swiglu
from onnxport.graphs.inspect import attribute_text
from onnxport.graphs.lora import RANKS, SCALES, WEIGHTS
from onnxport.graphs.passes.chunk_linear import chunk_linear
from onnxport.graphs.passes.flat_paged import FLAT_PAGED_ATTENTION, SINKS, flatten_paged
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.lora import ADD_LORA
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.row_states import take_row_states
from onnxport.graphs.passes.split_experts import BIASES, MOE, QMOE, is_swiglu, split_experts
from onnxport.graphs.passes.split_matmul import split_matmul
from onnxport.providers.int8_experts import int8_experts
from onnxport.providers.openvino.experts import ExpertWeights, write_experts

RELEASE: Final = "2026.4"  # whose PagedAttentionExtension is known here
CACHE_PREFIX: Final = "past_key_values."
HANDED_OVER: Final = (RANKS, WEIGHTS, SCALES)  # to our extension, which reads them by itself
Weights = Mapping[str, NDArray[Any]]
Conversion = Callable[[Any], list[Any]]  # from a node of ONNX to outputs


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted graph; what is compiled from it points to the memory, too."""

    model: Any  # openvino.Model; cache inputs have dynamic types, compiling decides them
    memory: Sequence[Any]  # openvino.Tensor; to be kept until the compiled model is gone


def lower(
    artifact: Artifact,
    lora: Callable[[onnx.ModelProto], PassResult] | None = None,
    *,
    keep_experts: bool = False,
) -> Iterator[PassResult]:
    """Apply the passes in turn; the last result holds the graph to convert.

    Args:
        artifact: what to read.
        lora: the pass that lets adapters be inputs of the graph; None: they are not.
        keep_experts: leave experts to `convert`, for a plugin that gives tokens to some of them;
            not those with a GELU, which the plugin's pattern does not have.
    """
    step = made = int8_experts(artifact, artifact.load_graph("paged"), "float32")
    yield step
    step = split_experts(step.model, lambda node: not (keep_experts and _is_known(node)), made)
    yield step
    step = split_matmul(step.model)
    yield step
    step = retype(step.model, artifact.read_tensor)
    yield step
    if lora is not None:
        step = lora(step.model)
        yield step
    yield from finish(artifact, step.model)


def finish(artifact: Artifact, model: onnx.ModelProto) -> Iterator[PassResult]:
    """Apply the passes behind the one that adds adapters, or behind all others without it."""
    if artifact.manifest.model.linear is not None:
        step = take_row_states(model)
        yield step
        step = chunk_linear(step.model, takes_tile=True)
        yield step
        model = step.model
    yield flatten_paged(model)


def _is_known(node: onnx.NodeProto) -> bool:
    """Whether `openvino.experts` writes what a layer of experts computes."""
    return is_swiglu(node) and attribute_text(node, "activation_type") == "swiglu"


def collect_weights(
    artifact: Artifact, model: onnx.ModelProto, attached: Weights
) -> dict[str, NDArray[Any]]:
    """Every initializer: attached by a pass, inline, or a view of the weights file."""
    return {
        tensor.name: attached[tensor.name]
        if tensor.name in attached
        else artifact.read_tensor(tensor)
        for tensor in model.graph.initializer
    }


def convert(
    model: onnx.ModelProto, weights: Weights, add_lora: Conversion | None = None
) -> Converted:
    """Convert a lowered graph.

    Args:
        model: the graph.
        weights: its initializers.
        add_lora: converts AddLora, where the graph has that.

    Raises:
        ProviderError: OpenVINO refuses the graph.
    """
    import openvino as ov
    from openvino.frontend import FrontEndManager
    from openvino.frontend.onnx import ConversionExtension

    conversions = _Conversions(weights)
    frontend = FrontEndManager().load_by_framework("onnx")
    for name, domain, conversion in (
        (FLAT_PAGED_ATTENTION, DOMAIN, conversions.paged_attention),
        *([(ADD_LORA, DOMAIN, add_lora)] if add_lora is not None else []),
        ("MatMulNBits", MICROSOFT, conversions.matmul_nbits),
        ("GatherBlockQuantized", MICROSOFT, conversions.gather_block_quantized),
        (MOE, MICROSOFT, conversions.experts),
        (QMOE, MICROSOFT, conversions.quantized_experts),
    ):
        frontend.add_extension(ConversionExtension(name, domain, conversion))
    try:
        source = io.BytesIO(_with_weights_as_inputs(model).SerializeToString())
        converted = frontend.convert(frontend.load(source))
        for parameter in list(converted.get_parameters()):
            name = parameter.get_friendly_name()
            if name in weights:
                parameter.output(0).replace(conversions.constant(name).output(0))
                converted.remove_parameter(parameter)
            elif name in HANDED_OVER and not parameter.output(0).get_target_inputs():
                converted.remove_parameter(parameter)
            elif name.startswith(CACHE_PREFIX):
                kv_heads = parameter.get_partial_shape()[2]
                parameter.set_element_type(ov.Type.dynamic)
                parameter.set_partial_shape(ov.PartialShape([-1, kv_heads, -1, -1]))
        converted.validate_nodes_and_infer_types()
    except Exception as error:  # OpenVINO's own classes derive from Exception alone
        raise ProviderError(
            f"OpenVINO {ov.__version__} could not convert the graph: {error}"
        ) from error
    return Converted(converted, conversions.memory)


def _with_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph without external data: such initializers become inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    external = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    inline = [t for t in model.graph.initializer if t.data_location != TensorProto.EXTERNAL]
    del graph.initializer[:]
    graph.initializer.extend(inline)
    graph.input.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in external
    )
    return copy


class _Conversions:
    """The operators that we convert ourselves; each returns a node's outputs."""

    def __init__(self, weights: Weights) -> None:
        import openvino.opset15 as ops

        self._weights = weights
        self._ops = ops
        self.memory: list[Any] = []  # what the constants point to

    def constant(self, name: str) -> Any:
        """A weight as it is stored, in shared memory."""
        import openvino as ov

        return self._shared(ov.Tensor(_writable(self._weights[name]), shared_memory=True))

    def _shared(self, tensor: Any) -> Any:
        """A constant over a tensor's memory, which it does not keep alive by itself."""
        import openvino as ov

        self.memory.append(tensor)
        return ov.op.Constant(tensor, True)

    def paged_attention(self, node: Any) -> list[Any]:
        """FlatPagedAttention as OpenVINO's own operator.

        Its inputs are those of `PagedAttentionExtension` in RELEASE, by position; what the model
        has no use for is empty. The CPU plugin learns the heads' sizes from runtime information.
        """
        import openvino as ov

        flat = [node.get_input(index) for index in range(node.get_input_size())]
        scale, window = node.get_attribute("scale"), node.get_attribute("local_window_size")

        def none(kind: Any) -> Any:
            # A constant of its own for each input: the GPU plugin puts a conversion to float16
            # behind one that is shared, and then refuses what has to be constant.
            return self._value([], kind)

        def zero() -> Any:
            return self._value(0, np.int32)

        inputs = [
            *flat[:9],  # query, key, value, caches, past, sequence begins, block indices, begins
            self._value(scale, np.float32),
            self._value(window, np.int32),  # sliding_window, 0: none
            none(np.float32),  # alibi_slopes
            flat[9],  # max_context_len
            none(np.int32),  # score_aggregation_window
            *(none(np.int32), none(np.int32), none(np.float32)),  # rotated blocks, deltas, table
            *(none(np.float32), zero(), zero()),  # xattention threshold, block size, stride
            flat[SINKS] if len(flat) > SINKS else none(np.float32),
            *(zero(), none(np.int32), none(np.int32), none(np.int32)),  # adaptive RKV
            none(np.int32),  # token_type_ids
            *(none(np.uint8), none(np.int32)),  # qq_bias and its begins
        ]
        attention = ov.op._PagedAttentionExtension(inputs)
        info = attention.get_rt_info()
        info["num_k_heads"] = info["num_v_heads"] = node.get_attribute("kv_num_heads")
        info["k_head_size"] = info["v_head_size"] = node.get_attribute("head_size")
        return [attention.output(0)]

    def matmul_nbits(self, node: Any) -> list[Any]:
        """A product with a compressed weight; scales are float32 after `retype`."""
        features, depth = node.get_attribute("N"), node.get_attribute("K")
        bits, block_size = node.get_attribute("bits"), node.get_attribute("block_size")
        if node.get_input_size() > 4:
            raise ValueError("MatMulNBits with an order of inputs or a bias")
        zero_points = _name(node, 3) if node.get_input_size() == 4 else None
        weight = self._dequantized(
            _name(node, 1), _name(node, 2), [features], bits, block_size, zero_points
        )
        x = node.get_input(0)
        padding = -depth % block_size
        if padding:  # the last block is stored whole
            x = self._ops.pad(x, [0, 0], [0, padding], "constant", self._value(0, np.float32))
        return [self._ops.matmul(x, weight, False, True).output(0)]

    def gather_block_quantized(self, node: Any) -> list[Any]:
        """Rows of a compressed table."""
        bits, block_size = node.get_attribute("bits"), node.get_attribute("block_size")
        axes = node.get_attribute("gather_axis"), node.get_attribute("quantize_axis")
        table = self._weights[_name(node, 0)]
        if axes != (0, 1) or node.get_input_size() > 3 or table.dtype != np.uint8:
            raise ValueError("GatherBlockQuantized with other axes, types or zero points")
        rows = self._dequantized(_name(node, 0), _name(node, 2), [len(table)], bits, block_size)
        return [self._ops.gather(rows, node.get_input(1), self._value(0, np.int64)).output(0)]

    def experts(self, node: Any) -> list[Any]:
        """MoE, whose weights are float32 after `retype`."""
        weights = [self.constant(_name(node, index)) for index in (2, 4)]
        return [self._experts(node, weights, BIASES[MOE])]

    def quantized_experts(self, node: Any) -> list[Any]:
        """QMoE with compressed weights."""
        block_size, first = (
            node.get_attribute(one) for one in ("block_size", "expert_weight_bits")
        )
        weights = []
        for index, bits in ((2, first), (5, node.get_attribute(DOWN_BITS, first))):
            name, scales = _name(node, index), _name(node, index + 1)
            dims, place = self._weights[name].shape[:2], OFFSETS[index // 5]
            offsets = _name(node, place) if self._has(node, place) else None
            weights.append(self._dequantized(name, scales, dims, bits, block_size, offsets=offsets))
        return [self._experts(node, weights, BIASES[QMOE])]

    def _experts(self, node: Any, weights: Sequence[Any], biases: tuple[int, int]) -> Any:
        if node.get_attribute("activation_type", "swiglu") != "swiglu":
            raise ValueError("experts with another activation than swiglu")
        x, logits = (node.get_input(index) for index in range(2))
        if all(self._has(node, index) for index in biases):
            own = ExpertWeights(*weights, *(self._weights[_name(node, index)] for index in biases))
        else:
            own = ExpertWeights(*weights)
        limit = node.get_attribute("swiglu_limit", math.inf)
        swiglu = Swiglu(
            alpha=node.get_attribute("activation_alpha", 1.0),
            up_offset=node.get_attribute("activation_beta", 0.0),
            limit=None if math.isinf(limit) else limit,
        )
        return write_experts(x, logits, own, node.get_attribute("k"), swiglu)

    def _dequantized(
        self,
        name: str,
        scales: str,
        dims: Sequence[int],
        bits: int,
        block_size: int,
        zero_points: str | None = None,
        offsets: str | None = None,
    ) -> Any:
        """Unsigned blocks, each with a scale: float [*dims, columns].

        They are around 2^(bits-1), or zero points of their own.

        Constants in this form are what the plugin's kernels take without unpacking them.
        """
        import openvino as ov

        ops, stored = self._ops, _writable(self._weights[name]).reshape(-1)
        blocks = stored.size * 8 // bits // math.prod(dims) // block_size
        shape = ov.Shape([*dims, blocks, block_size])
        kind = {4: ov.Type.u4, 8: ov.Type.u8}[bits]
        numbers = self._shared(ov.Tensor(stored, shape, kind))
        if zero_points is None:
            zero = ov.op.Constant(kind, ov.Shape([]), [1 << (bits - 1)])
        else:
            side_by_side = _side_by_side(self._weights[zero_points], blocks, bits)
            zero = self._shared(ov.Tensor(side_by_side, ov.Shape([*dims, blocks, 1]), kind))
        factors = _writable(self._weights[scales]).reshape(*dims, blocks, 1)
        if offsets is not None:
            factors, middle = _middles(factors, self._weights[offsets], 1 << (bits - 1))
            zero = self._shared(ov.Tensor(middle, shared_memory=True))
        scale = self._shared(ov.Tensor(factors, shared_memory=True))
        dtype = scale.get_element_type()
        centred = ops.subtract(ops.convert(numbers, dtype), ops.convert(zero, dtype))
        size = self._value([*dims, blocks * block_size], np.int64)
        return ops.reshape(ops.multiply(centred, scale), size, False)

    def _has(self, node: Any, place: int) -> bool:
        """Whether an operator has an optional weight."""
        return place < node.get_input_size() and _name(node, place) in self._weights

    def _value(self, value: Any, dtype: Any) -> Any:
        return self._ops.constant(np.array(value, dtype)).output(0)


def _middles(
    scales: NDArray[Any], offsets: NDArray[Any], zero: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scales, and zero points that are no integers, of blocks that have offsets.

    Where a scale is 0, all numbers of the block are its offset, and its quants the middle.
    """
    scales = np.where(scales == 0, scales.dtype.type(1), scales)
    return scales, zero - offsets.reshape(scales.shape) / scales


def _side_by_side(zero_points: NDArray[Any], blocks: int, bits: int) -> NDArray[np.uint8]:
    """Zero points, of which each row begins with a byte, without what fills up the last one."""
    if bits == 8 or blocks % 2 == 0:
        return np.array(zero_points, np.uint8).reshape(-1)
    rows = zero_points.reshape(-1, -(-blocks // 2))
    both = np.stack([rows & 15, rows >> 4], -1).reshape(len(rows), -1)[:, :blocks].reshape(-1)
    filled = np.pad(both, (0, both.size % 2))
    joined: NDArray[np.uint8] = filled[::2] | filled[1::2] << 4
    return joined


def _writable(weight: NDArray[Any]) -> NDArray[Any]:
    """The same contents in memory that may be written to, as OpenVINO's Python wants it.

    A memory map is mapped again, privately: nobody writes to it, so it stays the file's pages.
    """
    if isinstance(weight, np.memmap) and weight.filename is not None:
        private: NDArray[Any] = np.memmap(
            weight.filename, weight.dtype, "c", weight.offset, weight.shape
        )
        return private
    return weight if weight.flags.writeable else weight.copy()


def _name(node: Any, index: int) -> str:
    """The name of the initializer at an input."""
    name: str = node.get_input(index).get_node().get_friendly_name()
    return name
