"""What an artifact means: the exporter's NumPy forward pass over the weights as they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter import mxfp4
from onnxport.exporter.plan import EMBEDDING
from onnxport.exporter.reference import forward
from onnxport.exporter.reference_parts import Array
from onnxport.graphs.artifact import Artifact


class ArtifactWeights:
    """A `WeightSource` that reads an artifact, by the names its weights have in the graph."""

    def __init__(self, artifact: Artifact) -> None:
        initializers = artifact.load_graph("paged").graph.initializer
        self._values = {one.name: artifact.read_tensor(one) for one in initializers}
        self._group_size = artifact.manifest.group_size
        self._token_size = artifact.manifest.model.token_size

    def embed(self, token_ids: NDArray[np.int64], role: str = EMBEDDING) -> Array:
        """See `WeightSource`."""
        return self._table(role)[token_ids]

    def vector(self, role: str) -> Array:
        """See `WeightSource`."""
        kind = (
            "kernel" if role.endswith(".conv") else "weight"
        )  # of a convolution, [channels, 1, taps]
        return self._values[f"{role}.{kind}"].astype(np.float32)

    def linear(self, role: str, x: Array) -> Array:
        """See `WeightSource`."""
        weight = self._values[f"{role}.weight"]
        bias = self._values.get(f"{role}.bias")
        if role.endswith(".experts.gate_up"):  # gate's rows and up's take turns
            experts = self._experts(role)
            apart = experts.reshape(len(experts), -1, 2, x.shape[-1]).swapaxes(1, 2)
            product = x @ apart.reshape(-1, x.shape[-1]).T
            if bias is None:
                return product
            return product + bias.reshape(len(bias), -1, 2).swapaxes(1, 2).ravel()
        if role.endswith(".k_up"):  # of each head, as queries are multiplied with it: [heads, K, N]
            product = x @ weight.swapaxes(0, 1).reshape(x.shape[-1], -1).astype(np.float32)
        elif role.endswith(".v_up"):  # [heads, N, K]
            product = x @ weight.reshape(-1, x.shape[-1]).astype(np.float32).T
        elif weight.ndim == 2:  # [K, N]
            product = x @ weight.astype(np.float32)
        else:  # quantized: [N, blocks, bytes]
            scales, zeros = (self._values.get(f"{role}.{one}") for one in ("scales", "zero_points"))
            assert scales is not None
            product = x @ self._dequantize(weight, scales, zeros)[:, : x.shape[-1]].T
            if (offsets := self._values.get(f"{role}.offsets")) is not None:
                sums = x.reshape(len(x), offsets.shape[1], -1).sum(-1)
                product = product + sums @ offsets.astype(np.float32).T
        return product if bias is None else product + bias.astype(np.float32)

    def sum_of_experts(self, role: str, x: Array, parts: Array) -> Array:
        """See `WeightSource`."""
        total = np.einsum("tek,enk->tn", x, self._experts(role))
        bias = self._values.get(f"{role}.bias")
        return total if bias is None else total + parts @ bias.astype(np.float32)

    def head(self, x: Array) -> Array:
        """See `WeightSource`."""
        tied = "head.weight" not in self._values
        return x @ self._table(EMBEDDING).T if tied else self.linear("head", x)

    def _experts(self, role: str) -> Array:
        """The weights of each expert, [experts, N, K]."""
        weight = self._values[f"{role}.weight"]
        scales = self._values.get(f"{role}.scales")
        if scales is None:
            return weight.astype(np.float32)
        if scales.dtype.name == "float8_e8m0fnu":
            blocks = weight.reshape(-1, scales.shape[-1], mxfp4.BLOCK_BYTES)
            exponents = scales.view(np.uint8).reshape(-1, scales.shape[-1])
            return mxfp4.decode(blocks, exponents).reshape(*weight.shape[:2], -1)
        rows = self._dequantize(
            weight.reshape(-1, scales.shape[-1], weight.shape[-1] // scales.shape[-1]),
            scales.reshape(-1, scales.shape[-1]),
        )
        return rows.reshape(*weight.shape[:2], -1)

    def _table(self, role: str) -> Array:
        """A table, [vocab, columns]; its quantized rows are stored one after the other."""
        rows = self._values.get(f"{role}.rows")
        if rows is None:
            return self._values[f"{role}.weight"].astype(np.float32)
        scales = self._values[f"{role}.scales"]
        values = self._dequantize(rows.reshape(*scales.shape, -1), scales)
        return values[:, : self._token_size] if role == EMBEDDING else values

    def _dequantize(
        self,
        quants: NDArray[np.uint8],
        scales: NDArray[np.generic],
        zero_points: NDArray[np.uint8] | None = None,
    ) -> Array:
        """`(q - zero point) * scale`, as MatMulNBits defines it; [N, blocks, bytes] to [N, K]."""
        assert self._group_size is not None
        bits = 8 * quants.shape[-1] // self._group_size
        assert bits in (4, 8), quants.shape
        zeros = np.full(scales.shape, 1 << (bits - 1)) if zero_points is None else zero_points
        if bits == 4:  # the low half of a byte comes first
            quants = np.stack([quants & 15, quants >> 4], axis=-1).reshape(*quants.shape[:2], -1)
            if zero_points is not None:
                zeros = np.stack([zeros & 15, zeros >> 4], axis=-1).reshape(len(zeros), -1)
                zeros = zeros[:, : scales.shape[1]]
        centred = quants.astype(np.float32) - zeros.astype(np.float32)[..., None]
        return (centred * scales.astype(np.float32)[..., None]).reshape(len(quants), -1)


class Reference:
    """Logits of any sequence."""

    def __init__(self, path: Path) -> None:
        artifact = Artifact.read(path)
        self.spec = artifact.manifest.model
        self._weights = ArtifactWeights(artifact)
        self._cached = cache(self._compute)

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits after each token, float32 [len(token_ids), vocab]."""
        return self._cached(tuple(token_ids))

    def _compute(self, token_ids: tuple[int, ...]) -> NDArray[np.float32]:
        rows = np.arange(len(token_ids), dtype=np.int32)
        return forward(self.spec, self._weights, np.array(token_ids, np.int64), rows)
