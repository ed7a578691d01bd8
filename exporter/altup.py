"""A decoder of several streams in both graphs: see `AltUpSpec`.

Streams are [..., streams, hidden_size], the one that layers compute on among them. As all that
reads the residual stream (`families.gemma`), what reads these does not mind how large they are:
coefficients are made of norms, and streams are sums of streams times these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from onnx import TensorProto

from onnxport.exporter.graph_parts import activation_dtype
from onnxport.exporter.layer_inputs import layer_inputs, of_told
from onnxport.exporter.plan import FINAL_NORM
from onnxport.exporter.plan_altup import EPSILON, MERGE, START
from onnxport.graphs import ops
from onnxport.graphs.altup_spec import AltUpSpec
from onnxport.graphs.tensors import numpy_dtype

if TYPE_CHECKING:
    from onnxport.exporter.decoder import Decoder

FLOAT: Final = TensorProto.FLOAT


def altup_body(
    decoder: Decoder, altup: AltUpSpec, select: Callable[[str], str] | None
) -> tuple[str, str]:
    """Token ids to hidden states, normalized and as they are: see `Decoder.body`."""
    spec, of = decoder.spec, _Streams(decoder, altup)
    embedded = decoder.embed()
    told = layer_inputs(decoder, embedded)
    streams = of.begun(embedded)
    for layer in range(spec.num_layers):
        role = f"layers.{layer}"
        with decoder.g.scope(role):
            foretold = of.foretold(role, streams)
            active = of.stream(foretold, altup.active)
            read, active = decoder.read(active, "", f"{role}.input_norm")
            mixed, own = decoder.mixed(layer, read), told[layer]
            if layer == spec.num_layers - 1 and select is not None:
                mixed = {name: select(one) for name, one in mixed.items()}
                foretold, active, read, own = map(select, (foretold, active, read, own))
            added = decoder.output(f"{role}.o", decoder.projected(mixed))
            hidden = of.augmented(role, active, added, read)
            read, hidden = decoder.read(hidden, "", f"{role}.post_norm")
            made = decoder.g.node("Add", [hidden, decoder.mlp(layer, read)], name="made")
            streams = of.told(role, of.corrected(role, foretold, active, made), own)
    return decoder.norm(of.merged(streams), "", FINAL_NORM)


class _Streams:
    """What makes streams of one graph of others."""

    def __init__(self, decoder: Decoder, altup: AltUpSpec) -> None:
        self._d, self._g, self._spec = decoder, decoder.g, decoder.spec
        self._altup, self._leading = altup, decoder.leading
        self._dtype = activation_dtype(decoder.weights)

    def begun(self, embedded: str) -> str:
        """All streams: the embedding, and products of it as large as it is."""
        g, count, hidden = self._g, self._altup.streams, self._spec.hidden_size
        with g.scope("altup"):
            size = self._size(embedded)
            further = ops.reshape(
                g, self._d.linear(START, embedded), (*self._leading, count - 1, hidden), "further"
            )
            whole = self._apart(size, "size.apart")
            sized = self._sized(further, whole)
            return g.node("Concat", [self._apart(embedded, "first"), sized], name="all", axis=-2)

    def merged(self, streams: str) -> str:
        """The mean of the first stream and of products of the others, as large as it is."""
        g, count = self._g, self._altup.streams
        with g.scope("altup"):
            first, *others = (self.stream(streams, at) for at in range(count))
            size, total = self._size(first), first
            for at, other in enumerate(others):
                made = self._sized(self._d.linear(MERGE.format(at), other), size)
                total = g.node("Add", [total, made], name="sum")
            return g.node("Mul", [total, self._number(1 / count)], name="mean")

    def foretold(self, role: str, streams: str) -> str:
        """All streams behind a layer, as they are foretold of those ahead."""
        g, count = self._g, self._altup.streams
        modes = self._modes(role, self.stream(streams, self._altup.active))
        flat = self._d.linear(f"{role}.altup.predict", modes)
        parts = ops.reshape(g, flat, (*self._leading, count, count), "altup.parts")
        change = g.node("MatMul", [parts, streams], name="altup.change")
        return g.node("Add", [change, streams], name="altup.foretold")

    def augmented(self, role: str, active: str, added: str, read: str) -> str:
        """The stream behind attention, with what LAuReL makes of what that read."""
        g, spec = self._g, self._spec
        low = self._d.linear(f"{role}.laurel.left", read)
        product = self._d.linear(f"{role}.laurel.right", low)
        weight = g.weight(self._d.weights.vectors[f"{role}.laurel.norm"])
        normed = ops.rms_norm(g, product, weight, spec.inner_eps, "laurel.norm")
        own = g.node("Mul", [read, self._number(spec.residual_scale or 1.0)], name="laurel.own")
        laurel = g.node("Add", [own, normed], name="laurel")
        attended = g.node("Add", [active, added], name="attended")
        both = g.node("Add", [attended, laurel], name="augmented")
        return g.node("Mul", [both, self._number(math.sqrt(0.5))], name="augmented.mean")

    def corrected(self, role: str, foretold: str, active: str, made: str) -> str:
        """All streams, by what a layer made of one, and what was foretold of it."""
        g = self._g
        flat = self._d.linear(f"{role}.altup.correct", self._modes(role, made))
        parts = g.node("Add", [flat, self._number(1.0)], name="altup.shares")
        column = g.node("Unsqueeze", [parts, ops.last_axis(g)], name="altup.column")
        news = self._apart(g.node("Sub", [made, active], name="altup.news"), "altup.news.apart")
        change = g.node("Mul", [column, news], name="altup.correction")
        return g.node("Add", [foretold, change], name="altup.corrected")

    def told(self, role: str, streams: str, own: str) -> str:
        """All streams but the first with what a layer is told of tokens, as one of them chooses."""
        g, count = self._g, self._altup.streams
        chooser = self.stream(streams, self._altup.active)
        if self._altup.scaled:
            weight = g.weight(self._d.weights.vectors[f"{role}.altup.scale"])
            chooser = g.node("Mul", [chooser, weight], name="altup.scaled")
        added = of_told(self._d, role, chooser, own)
        others = np.array([[0.0], *[[1.0]] * (count - 1)], self._numpy)
        change = self._apart(added, "altup.told.apart")
        change = g.node("Mul", [change, g.constant(others, "others")], name="altup.told")
        return g.node("Add", [streams, change], name="altup.behind")

    def stream(self, streams: str, at: int) -> str:
        """One of them, [..., hidden_size]."""
        g = self._g
        return g.node(
            "Gather", [streams, g.constant(np.array(at, np.int64), "at")], name="one", axis=-2
        )

    def _modes(self, role: str, x: str) -> str:
        """What coefficients are made of: a number for each stream, from -1 to 1."""
        g = self._g
        normed, _ = self._d.norm(x, "", f"{role}.altup.norm")
        product = self._d.linear(f"{role}.altup.router", normed)
        wide = ops.cast(g, product, FLOAT, "altup.router.cast")
        part = g.constant(np.array(1 / self._spec.hidden_size, np.float32), "part")
        bounded = g.node(
            "Tanh", [g.node("Mul", [wide, part], name="altup.mean")], name="altup.tanh"
        )
        return ops.cast(g, bounded, self._dtype, "altup.modes")

    def _size(self, x: str) -> str:
        """The root of the mean square of each row, [..., 1]."""
        g = self._g
        length = g.node(
            "ReduceL2", [ops.cast(g, x, FLOAT, "size.cast"), ops.last_axis(g)], name="length"
        )
        root = g.constant(np.array(self._spec.hidden_size**-0.5, np.float32), "root")
        return ops.cast(g, g.node("Mul", [length, root], name="size.mean"), self._dtype, "size")

    def _sized(self, x: str, size: str) -> str:
        """What has that size in place of its own."""
        g, spec = self._g, self._spec
        ones = g.constant(np.ones(spec.hidden_size, self._numpy), "ones")
        epsilon = EPSILON / spec.hidden_size
        return g.node("Mul", [ops.rms_norm(g, x, ones, epsilon, "alike"), size], name="sized")

    def _apart(self, x: str, name: str) -> str:
        """Beside other streams: [..., 1, columns]."""
        g = self._g
        axis = g.constant(np.array([-2], np.int64), "axis")
        return g.node("Unsqueeze", [x, axis], name=name)

    def _number(self, value: float) -> str:
        """A number, which 16 bits round where the graph is computed, and not where it is stored."""
        whole = self._g.constant(np.array(value, np.float32), "number")
        if self._dtype == FLOAT:
            return whole
        return ops.cast(self._g, whole, self._dtype, "number.cast")

    @property
    def _numpy(self) -> np.dtype[np.generic]:
        return np.dtype(numpy_dtype(self._dtype))
