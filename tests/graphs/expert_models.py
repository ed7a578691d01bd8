"""One layer of experts, written as the exporter writes it, weights in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxport.exporter import mxfp4
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.experts import FP4, ExpertWeights, Routing, Swiglu, expert_layer
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.passes.retype import external_placeholder
from onnxport.graphs.tensors import WEIGHTS_FILE, TensorRef

HIDDEN, SIZE, COUNT, PER_TOKEN, BLOCK = 64, 96, 6, 2, 32
# All that an activation may have; a quarter of what is made here is beyond the limit.
CLAMPED = Swiglu(alpha=1.702, up_offset=1.0, limit=0.75)
VARIANTS = {
    "plain": (Swiglu(), False),
    "biased": (Swiglu(), True),
    "alpha": (Swiglu(alpha=1.702), False),
    "offset": (Swiglu(up_offset=1.0), False),
    "limit": (Swiglu(limit=0.75), False),
    "all": (CLAMPED, True),
}
# Without a gate, which ONNX Runtime itself does not compute.
UNGATED = {
    "relu2": (Swiglu(is_relu2=True), False),
    "relu2-biased": (Swiglu(is_relu2=True), True),
}
Array = NDArray[np.float32]
Edit = Callable[[onnx.ModelProto], None]  # of a layer's graph, in place


@dataclass
class Layer:
    """What there is of a layer: its graph, in `folder`, and its weights as they are meant."""

    model: onnx.ModelProto
    folder: Path
    gate_up: (
        Array  # [experts, 2 * size, hidden], gate and up take turns; or [experts, size, hidden]
    )
    down: Array  # [experts, hidden, size]
    normalized: bool
    swiglu: Swiglu
    biases: tuple[Array, Array] | None  # [experts, rows of gate_up] and [experts, hidden]
    sigmoid: bool = False
    correction: Array | None = None  # [experts]
    grouped: bool = False  # two of three pairs are chosen first, by what their scores add up to

    def run(
        self,
        model: onnx.ModelProto,
        x: Array,
        logits: Array,
        library: Path | None = None,
        attached: Mapping[str, NDArray[Any]] | None = None,
    ) -> Array:
        """What a graph makes of the layer's inputs; `library` has operators of our own."""
        options = ort.SessionOptions()
        if library is not None:
            options.register_custom_ops_library(str(library))
        options.log_severity_level = 4
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self.folder)
        )
        values = {
            name: ort.OrtValue.ortvalue_from_numpy(one) for name, one in (attached or {}).items()
        }
        options.add_external_initializers(list(values), list(values.values()))
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
        feeds = {"x": x.astype(dtype), "router": logits.astype(dtype)}
        found: Array = session.run(None, feeds)[0].astype(np.float32)
        return found

    def read(self, tensor: TensorProto) -> NDArray[Any]:
        """The contents of an initializer."""
        if tensor.data_location != TensorProto.EXTERNAL:
            return numpy_helper.to_array(tensor)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        content = (self.folder / entries["location"]).read_bytes()
        kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        begin = int(entries["offset"])
        raw = content[begin : begin + int(entries["length"])]
        return np.frombuffer(raw, kind).reshape(tensor.dims)

    def expected(self, x: Array, logits: Array) -> Array:
        """The definition, token by token."""
        rows = np.zeros_like(x)
        for row, (values, router) in enumerate(zip(x, logits, strict=True)):
            if self.sigmoid:
                scores = 1 / (1 + np.exp(-router))
            else:
                scores = np.exp(router - router.max())
                scores /= scores.sum()
            ranked = scores if self.correction is None else scores + self.correction
            if self.grouped:
                pairs = ranked.reshape(3, 2).copy()
                pairs[pairs.sum(-1).argmin()] = -np.inf
                ranked = pairs.reshape(-1)
            chosen = np.argsort(-ranked, kind="stable")[:PER_TOKEN]
            total = scores[chosen].sum() if self.normalized else 1
            for expert in chosen:
                joined, added = self.gate_up[expert] @ values, np.float32(0)
                if self.biases is not None:
                    joined, added = joined + self.biases[0][expert], self.biases[1][expert]
                made = self.down[expert] @ self._activated(joined) + added
                rows[row] += scores[expert] / total * made
        return rows

    def _activated(self, joined: Array) -> Array:
        if len(joined) == SIZE:  # without a gate
            up: Array = np.square(np.maximum(joined, 0)) if self.swiglu.is_relu2 else joined
            return up
        gate, up = joined[0::2], joined[1::2]
        if self.swiglu.limit is not None:
            gate = np.minimum(gate, self.swiglu.limit)
            up = np.clip(up, -self.swiglu.limit, self.swiglu.limit)
        sigmoid = 1 / (1 + np.exp(-self.swiglu.alpha * gate))
        activated: Array = gate * sigmoid * (up + self.swiglu.up_offset)
        return activated


def layer(
    folder: Path,
    bits: int | str | None,
    dtype: int,
    variant: str = "plain",
    *,
    normalized: bool = True,
    level: int = 1,
    sigmoid: bool = False,
    corrected: bool = False,
    grouped: bool = False,
    down_bits: int | None = None,
    offsets: bool = False,
) -> Layer:
    """A layer with random weights; without bits they are of the activations' type.

    `bits` may be FP4. Those of down may be others, and blocks of both may have offsets.
    """
    swiglu, biased = {**VARIANTS, **UNGATED}[variant]
    rows = swiglu.parts * SIZE
    random = np.random.default_rng(7)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    g, content, meant, names, added = GraphBuilder("layer"), bytes(64), [], [], ["", ""]

    def store(name: str, value: NDArray[np.generic]) -> str:
        nonlocal content
        element = helper.np_dtype_to_tensor_dtype(value.dtype)
        ref = TensorRef(name, element, value.shape, len(content), value.nbytes)
        content += value.tobytes()
        return g.weight(ref)

    for name, shape in (("gate_up", (COUNT, rows, HIDDEN)), ("down", (COUNT, HIDDEN, SIZE))):
        if bits is None:
            value = (random.standard_normal(shape) / 8).astype(kind)
            names.append((store(f"{name}.weight", value), ""))
            meant.append(value.astype(np.float32))
            continue
        if bits == FP4:
            blocks = random.integers(0, 256, (*shape[:2], shape[2] // BLOCK, 16), np.uint8)
            exponents = random.integers(120, 124, blocks.shape[:-1], np.uint8)
            flat = blocks.reshape(-1, *blocks.shape[2:]), exponents.reshape(-1, exponents.shape[2])
            meant.append(mxfp4.decode(*flat).reshape(shape))
            numbers = store(f"{name}.weight", blocks.reshape(*shape[:2], -1))
            powers = exponents.view(ml_dtypes.float8_e8m0fnu)
            names.append((numbers, store(f"{name}.scales", powers)))
            continue
        assert isinstance(bits, int)
        own = down_bits or bits if name == "down" else bits
        quants, scales, numbers = _integers(random, shape, own, kind)
        if offsets:
            ends = (random.standard_normal(scales.shape) / 4).astype(kind)
            numbers += np.repeat(ends.astype(np.float32), BLOCK, axis=-1)
            added[name == "down"] = store(f"{name}.offsets", ends)
        meant.append(numbers)
        names.append((store(f"{name}.weight", quants), store(f"{name}.scales", scales)))
    x = g.input("x", dtype, ["tokens", HIDDEN])
    logits = g.input("router", dtype, ["tokens", COUNT])
    biases, stored = [], ["", ""]
    if biased:
        for place, (name, size) in enumerate((("gate_up", rows), ("down", HIDDEN))):
            value = (random.standard_normal((COUNT, size)) / 2).astype(kind)
            stored[place] = store(f"{name}.bias", value)
            biases.append(value.astype(np.float32))
    weights = ExpertWeights(
        count=COUNT,
        gate_up=names[0][0],
        down=names[1][0],
        gate_up_scales=names[0][1],
        down_scales=names[1][1],
        gate_up_bias=stored[0],
        down_bias=stored[1],
        gate_up_offsets=added[0],
        down_offsets=added[1],
        bits=4 if bits == FP4 else bits,  # type: ignore[arg-type]
        down_bits=down_bits,
        block_size=None if bits is None else BLOCK,
        is_fp4=bits == FP4,
    )
    correction = random.standard_normal(COUNT).astype(np.float32) / 2 if corrected else None
    name = "" if correction is None else g.constant(correction, "correction")
    routing = Routing(
        per_token=PER_TOKEN,
        normalized=normalized,
        sigmoid=sigmoid,
        correction=name,
        groups=3 if grouped else None,
        groups_per_token=2,
        group_best=2,
    )
    y = expert_layer(g, x, logits, weights, routing, swiglu, dtype=dtype, accuracy_level=level)
    g.node("Identity", [y], outputs=[g.output("y", dtype, ["tokens", HIDDEN])])
    (folder / WEIGHTS_FILE).write_bytes(content)
    both = (biases[0], biases[1]) if biased else None
    return Layer(
        *(g.build(), folder, meant[0], meant[1], normalized, swiglu, both, sigmoid, correction),
        grouped,
    )


def _integers(
    random: np.random.Generator, shape: tuple[int, int, int], bits: int, kind: np.dtype[Any]
) -> tuple[NDArray[np.uint8], NDArray[Any], Array]:
    """Quants and scales as they are stored, and what they mean."""
    scales = (random.random((*shape[:2], shape[2] // BLOCK)) / 2 ** (bits + 1)).astype(kind)
    quants = random.integers(0, 256, (*shape[:2], shape[2] * bits // 8), np.uint8)
    levels = quants
    if bits == 4:
        levels = np.stack([quants & 15, quants >> 4], axis=-1).reshape(shape)
    centred = levels.reshape(*scales.shape, BLOCK) - np.float32(2 ** (bits - 1))
    return quants, scales, (centred * scales[..., None].astype(np.float32)).reshape(shape)


def inputs(tokens: int, seed: int = 0) -> tuple[Array, Array]:
    """Activations and a router's logits."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, HIDDEN)).astype(np.float32)
    return x, (2 * random.standard_normal((tokens, COUNT))).astype(np.float32)


TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def with_attribute(name: str, value: int | str) -> Edit:
    """The operator of experts says something else."""

    def edit(model: onnx.ModelProto) -> None:
        set_attribute(
            next(n for n in model.graph.node if n.op_type in {"MoE", "QMoE"}), name, value
        )

    return edit


def in_float16(name: str) -> Edit:
    """A tensor is declared in float16."""

    def edit(model: onnx.ModelProto) -> None:
        (tensor,) = [one for one in model.graph.initializer if one.name == name]
        dims = tuple(tensor.dims)
        tensor.CopyFrom(external_placeholder(name, TensorProto.FLOAT16, dims))

    return edit


def as_input(name: str) -> Edit:
    """A tensor may be given at run time."""

    def edit(model: onnx.ModelProto) -> None:
        (tensor,) = [one for one in model.graph.initializer if one.name == name]
        model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))

    return edit
