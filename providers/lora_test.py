"""Whether a device's kernel for LoRA adapters can be trusted: a known answer, before it is used.

As in `providers.self_test`: a kernel that is compiled badly returns wrong numbers, not errors. Few
rows and many are computed, of several adapters and of none, of which some have no part in a
projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.errors import ProviderError
from onnxport.graphs import ops
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.lora import RANKS, TOKEN_SLOTS, WEIGHTS, SlotDtype, in_panels
from onnxport.graphs.passes.compiled_lora import compiled_lora
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.lora import ADD_LORA, SLOT_TYPES
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers.ort import Target, ort_value, quiet_options, start_session
from onnxport.providers.packed_columns import in_floats
from onnxport.providers.recipe import LoraKernel

PRODUCT: Final = "product"
ACTIVATIONS: Final = "activations"
OUT: Final = "out"
RANKS_OF: Final = ((0, 0, 0), (16, 16, 16), (0, 40, 3))  # by slot and projection
MAX_RANK: Final = 48
OFFSET: Final = 64  # numbers ahead of the product in a slot
ROWS: Final = (5, 150)  # of the two runs of a product
TOLERANCE: Final = 0.06  # of outputs that are about 2; bfloat16 rounds such by 0.008


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of three projections."""

    depth: int
    columns: tuple[int, int, int]


# As models have them, in whole vectors; and one of which nothing is a multiple of anything.
PRODUCTS: Final = (_Product(2112, (1104, 80, 64)), _Product(203, (1100, 75, 64)))


def distrust_lora(target: Target, dtype: SlotDtype, image: bytes, kernel: LoraKernel) -> str:
    """Return why a device's kernel is not to be used; "" where it may be.

    Args:
        target: the device.
        dtype: of activations and adapters: float32, float16 or bfloat16.
        image: the compiled kernel.
        kernel: whose library is used.
    """
    offs = []
    try:
        for product in PRODUCTS:
            session = _start(target, dtype, product, image, kernel)
            offs += [_off(session, dtype, product, rows) for rows in ROWS]
    except ProviderError as error:
        return f"its kernel for adapters does not start in {dtype} ({error})"
    except Exception as error:  # ONNX Runtime's own classes derive from Exception alone
        return f"its kernel for adapters fails in {dtype}: {error}"
    off = float(np.max(offs))  # not-a-number where any is
    if off <= TOLERANCE:
        return ""
    return (
        f"its kernel for adapters computes wrongly here: outputs of about 2 are off by {off:.2g} "
        f"in {dtype}, where {TOLERANCE} may be"
    )


def _start(
    target: Target, dtype: SlotDtype, product: _Product, image: bytes, kernel: LoraKernel
) -> Any:
    """A session of one AddLora, between activations in float32."""
    g = GraphBuilder("lora_test")
    width = sum(product.columns)
    kind, int32, rows = SLOT_TYPES[dtype], TensorProto.INT32, "rows"
    given = [
        ops.cast(g, g.input(PRODUCT, TensorProto.FLOAT, [rows, width]), kind),
        ops.cast(g, g.input(ACTIVATIONS, TensorProto.FLOAT, [rows, product.depth]), kind),
        g.input(TOKEN_SLOTS, int32, [rows]),
        g.input(RANKS, int32, [len(RANKS_OF), 1, len(product.columns)]),
        g.input(WEIGHTS, kind, ["slots", "numbers"]),
    ]
    added = g.node(
        ADD_LORA,
        given,
        domain=DOMAIN,
        name="lora",
        offset=OFFSET,
        max_rank=MAX_RANK,
        ranks=0,
        columns0=product.columns[0],
        columns1=product.columns[1],
        columns2=product.columns[2],
    )
    g.output(OUT, TensorProto.FLOAT, [rows, width])
    g.node("Cast", [added], outputs=[OUT], to=TensorProto.FLOAT)
    model = g.build()
    if DOMAIN not in {opset.domain for opset in model.opset_import}:
        model.opset_import.add(domain=DOMAIN, version=OPSET)
    options = quiet_options()
    options.register_custom_ops_library(str(kernel.library))
    return start_session(
        compiled_lora(model, image).model.SerializeToString(), None, options, target
    )


def _off(session: Any, dtype: SlotDtype, product: _Product, rows: int) -> float:
    """How far an output of a run is off, at most."""
    random = np.random.default_rng(rows)
    kind = numpy_dtype(SLOT_TYPES[dtype])

    def numbers(*shape: int) -> NDArray[np.float32]:
        """Normally distributed, as the type has them."""
        return random.standard_normal(shape).astype(kind).astype(np.float32)

    depth, ends = product.depth, np.cumsum(product.columns)
    base, activations = numbers(rows, int(ends[-1])), numbers(rows, depth)
    slots = (np.arange(rows) % len(RANKS_OF)).astype(np.int32)
    expected = base.astype(np.float64)
    stored: list[NDArray[Any]] = []
    for slot, ranks in enumerate(RANKS_OF):
        parts = [np.zeros(OFFSET, kind)]
        for rank, columns, end in zip(ranks, product.columns, ends, strict=True):
            a = (numbers(rank, depth) / np.sqrt(depth)).astype(kind)
            b = (numbers(rank, columns) / np.sqrt(max(rank, 1))).astype(kind)
            parts += [in_floats(a).stored, in_floats(b).stored]
            own = np.ix_(slots == slot, range(end - columns, end))
            low = activations[slots == slot] @ a.astype(np.float64).T
            expected[own] += low @ b.astype(np.float64)
        stored.append(np.concatenate(parts))
    most = MAX_RANK * sum(in_panels(depth) + in_panels(columns) for columns in product.columns)
    weights = np.zeros((len(stored) - 1, OFFSET + most), kind)
    for slot, own_numbers in enumerate(stored[1:]):
        weights[slot, : len(own_numbers)] = own_numbers
    inputs = {
        PRODUCT: base,
        ACTIVATIONS: activations,
        TOKEN_SLOTS: slots,
        RANKS: np.array(RANKS_OF, np.int32)[:, None, :],
        WEIGHTS: weights,
    }
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort_value(array))
    binding.bind_output(OUT, "cpu")
    session.run_with_iobinding(binding)
    found = binding.copy_outputs_to_cpu()[0]
    with np.errstate(all="ignore"):  # what was found may be anything
        return float(np.abs(found - expected).max())
