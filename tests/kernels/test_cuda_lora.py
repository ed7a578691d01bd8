"""The kernel for adapters on CUDA devices, on the host: a driver of ours stands in for NVIDIA's.

What is tested is all but the device: the operator in ONNX Runtime, arguments and size of launches,
and the kernel's own source, thread by thread. NVIDIA's compiler has its say below.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxport.errors import ProviderError
from onnxport.graphs.lora import PANEL, SlotDtype
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.lora import SLOT_TYPES
from onnxport.providers import lora_test
from onnxport.providers.cuda import MOST_RANK
from onnxport.providers.lora_test import distrust_lora
from onnxport.providers.nvidia import compiler
from onnxport.providers.ort import CPU, ort_value, quiet_options, start_session
from onnxport.providers.packed_columns import in_floats
from onnxport.providers.recipe import LoraKernel
from tests.kernels.stand_in import VARIABLE, image, missing, stand_in

DTYPES: tuple[SlotDtype, ...] = ("float32", "float16", "bfloat16")
NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Rounding of the sum, relative, and of the factors and the sums in float32.
TOLERANCES = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
OFFSET, LAYER, STRIDE = 64, 3, 7  # the product in a slot, its first rank and all ranks of a slot
FEW = np.array([1, 1, 2, 0, 0, 3, 1, 2, 3, 3, 3], np.int32)
MANY = np.resize(np.array([1, 1, 1, 1, 0, 2, 2, 3], np.int32), 75)
RANKS = ((0, 0, 0), (1, 16, 20), (0, 33, 16), (5, 5, 5))  # by slot and projection


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraKernel]:
    if reason := missing():
        pytest.skip(reason)
    with stand_in(tmp_path_factory.mktemp("cuda")) as found:
        yield found


@pytest.fixture(scope="module")
def library(kernel: LoraKernel) -> Path:
    """With the operator, while our driver stands in for NVIDIA's."""
    assert kernel.library is not None
    return kernel.library


@dataclass(frozen=True)
class Case:
    """One product of some tokens, with an adapter in each slot."""

    depth: int
    columns: tuple[int, ...]
    slots: NDArray[np.int32]
    dtype: SlotDtype
    ranks: tuple[tuple[int, ...], ...] = RANKS
    max_rank: int = 40

    def stored(self, slot: int, part: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """A [rank, depth] and B [rank, columns]: its own for each projection."""
        random = np.random.default_rng([slot, part])
        rank = self.ranks[slot][part]
        sizes = (self.depth, self.columns[part])
        return tuple(self._numbers(random, rank, n, 0.5) for n in sizes)  # type: ignore[return-value]

    def _numbers(
        self, random: np.random.Generator, rows: int, columns: int, size: float = 1
    ) -> NDArray[Any]:
        return (size * random.standard_normal((rows, columns))).astype(NUMPY[self.dtype])

    def inputs(self) -> dict[str, NDArray[Any]]:
        """What the node reads. Where nothing is to be read there is NaN."""
        count, parts = len(self.ranks), len(self.columns)
        ranks = np.zeros((count, 1, STRIDE), np.int32)
        ranks[:, 0, LAYER : LAYER + parts] = [own[:parts] for own in self.ranks]
        slots = []
        for slot in range(1, count):
            rows = [x for part in range(parts) for x in self.stored(slot, part)]
            slots.append(np.concatenate([in_floats(x).stored for x in rows]))
        most = self.max_rank * sum(whole(self.depth) + whole(n) for n in self.columns)
        weights = np.full((count - 1, OFFSET + most), np.nan, NUMPY[self.dtype])
        for slot, numbers in enumerate(slots):
            weights[slot, OFFSET : OFFSET + len(numbers)] = numbers
        # a row of its own for each token, whatever the others are
        rows_of = [np.random.default_rng(token) for token in range(len(self.slots))]
        width = sum(self.columns)
        return {
            "product": np.concatenate([self._numbers(r, 1, width) for r in rows_of]),
            "activations": np.concatenate([self._numbers(r, 1, self.depth) for r in rows_of]),
            "slots": self.slots,
            "ranks": ranks,
            "weights": weights,
        }

    def expected(self, given: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
        sums = given["product"].astype(np.float64)
        read = given["activations"].astype(np.float64)
        for token, slot in enumerate(self.slots):
            first = 0
            for part, columns in enumerate(self.columns):
                a, b = (numbers.astype(np.float64) for numbers in self.stored(slot, part))
                sums[token, first : first + columns] += (a @ read[token]) @ b
                first += columns
        return sums


def whole(features: int) -> int:
    return -(-features // PANEL) * PANEL


def run(
    library: Path,
    given: dict[str, NDArray[Any]],
    case: Case,
    given_image: bytes | None = None,
    **changed: int,
) -> NDArray[np.float32]:
    """Run the node, on a copy of the product."""
    kind = SLOT_TYPES[case.dtype]
    kinds = {"slots": TensorProto.INT32, "ranks": TensorProto.INT32}
    inputs = [
        helper.make_tensor_value_info(
            name, kinds.get(name, kind), [f"{name}{axis}" for axis in range(value.ndim)]
        )
        for name, value in given.items()
    ]
    settings = {"offset": OFFSET, "max_rank": case.max_rank, "ranks": LAYER}
    settings |= {f"columns{i}": c for i, c in enumerate((*case.columns, 0, 0)[:3])}
    to_float = {"to": TensorProto.FLOAT}
    nodes = [
        helper.make_node("Cast", ["product"], ["wide"], **to_float),
        helper.make_node("Neg", ["wide"], ["opposite"]),
        helper.make_node("Neg", ["opposite"], ["copy"]),
        helper.make_node("Cast", ["copy"], ["own"], to=kind),  # which the operator changes
        helper.make_node(
            "AddLora",
            ["own", *list(given)[1:], "image"],
            ["sum"],
            domain=DOMAIN,
            **(settings | changed),
        ),
        helper.make_node("Cast", ["sum"], ["result"], **to_float),
    ]
    compiled = image(case.dtype) if given_image is None else given_image
    constant = numpy_helper.from_array(np.frombuffer(compiled, np.uint8), "image")
    result = helper.make_tensor_value_info("result", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "lora", inputs, [result], [constant])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    options = quiet_options()
    options.register_custom_ops_library(str(library))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = start_session(model.SerializeToString(), None, options, CPU)
    binding = session.io_binding()
    kept = {name: np.ascontiguousarray(array) for name, array in given.items()}
    for name, array in kept.items():
        binding.bind_ortvalue_input(name, ort_value(array))
    binding.bind_output("result", "cpu")
    session.run_with_iobinding(binding)
    found: NDArray[np.float32] = binding.copy_outputs_to_cpu()[0]
    return found


def check(case: Case, found: NDArray[np.float32], given: dict[str, NDArray[Any]]) -> None:
    off = TOLERANCES[case.dtype]
    np.testing.assert_allclose(found, case.expected(given), rtol=off, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    ("depth", "columns"),
    [
        (64, (96, 32, 32)),
        (67, (53, 17, 18)),  # nothing lies at a multiple of 16 bytes
        (5, (3,)),
        (1104, (72,)),  # more panels than warps
        (72, (1096, 1096)),  # more than a tile
    ],
    ids=str,
)
def test_every_token_gets_its_own_adapter(
    library: Path, depth: int, columns: tuple[int, ...], slots: NDArray[np.int32], dtype: SlotDtype
) -> None:
    case = Case(depth, columns, slots, dtype)
    given = case.inputs()
    check(case, run(library, given, case), given)


def test_the_sum_is_where_the_product_was(library: Path) -> None:
    driver = ctypes.CDLL(os.environ[VARIABLE])
    counts = [ctypes.c_int.in_dll(driver, name) for name in ("num_launches", "num_in_place")]
    before = [count.value for count in counts]
    case = Case(64, (96, 32, 32), FEW, "float16")
    run(library, case.inputs(), case)
    assert [count.value for count in counts] == [number + 1 for number in before]


@pytest.mark.parametrize("ranks", [range(1, 36), range(MOST_RANK - 1, MOST_RANK + 1)], ids=str)
@pytest.mark.parametrize("times", [1, 50], ids=["few", "many"])
def test_every_rank(library: Path, ranks: range, times: int) -> None:
    all_ranks = ((0,), *((rank,) for rank in ranks))
    slots = np.repeat(np.arange(1, len(all_ranks), dtype=np.int32), max(1, times // len(ranks)))
    slots = np.resize(slots, max(len(slots), 66)) if times > 1 else slots
    case = Case(40, (133,), slots, "float32", all_ranks, max(ranks))
    given = case.inputs()
    check(case, run(library, given, case), given)


def test_few_tokens_have_the_same_bits_in_any_company(library: Path) -> None:
    case = Case(200, (53, 17, 258), FEW, "float16")
    given = case.inputs()
    together = run(library, given, case)
    for token in range(len(FEW)):
        one = slice(token, token + 1)
        alone = given | {name: given[name][one] for name in ("product", "activations", "slots")}
        own = run(library, alone, Case(200, (53, 17, 258), FEW[one], "float16"))
        assert own[0].tobytes() == together[token].tobytes(), token


@pytest.mark.parametrize("slots", [FEW, MANY], ids=["few", "many"])
def test_an_adapter_that_is_infinite_spoils_its_own_tokens_alone(
    library: Path, slots: NDArray[np.int32]
) -> None:
    case = Case(64, (96, 32, 32), slots, "float16")
    given = case.inputs()
    given["weights"][1] = np.inf  # of slot 2
    found = run(library, given, case)
    others = slots != 2
    np.testing.assert_allclose(
        found[others], case.expected(case.inputs())[others], rtol=1e-3, atol=2e-4
    )
    assert not np.isfinite(found[~others][:, 96:]).any()


@pytest.mark.parametrize("slots", [np.full(3, 4, np.int32), np.full(3, -1, np.int32)], ids=str)
def test_a_slot_that_is_not_there_is_none(library: Path, slots: NDArray[np.int32]) -> None:
    """A kernel cannot refuse one; `Adapters` does."""
    case = Case(64, (96, 32, 32), np.zeros(3, np.int32), "float16")
    given = case.inputs()
    found = run(library, given | {"slots": slots}, case)
    np.testing.assert_array_equal(found, given["product"].astype(np.float32))


def test_no_rows(library: Path) -> None:
    case = Case(64, (96, 32, 32), np.zeros(1, np.int32), "float16")
    given = case.inputs()
    none = given | {name: given[name][:0] for name in ("product", "activations", "slots")}
    assert run(library, none, case).shape == (0, 160)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"product": np.zeros((11, 161), np.float16)}, r"the product must have 160 columns"),
        ({"activations": np.zeros((10, 64), np.float16)}, r"activations of 10 rows"),
        ({"slots": np.zeros(10, np.int32)}, r"10 slots of rows"),
        ({"slots": np.zeros((11, 1), np.int32)}, r"slots must have 1 dimensions, found 2"),
        ({"ranks": np.zeros((3, 1, 7), np.int32)}, r"ranks of 3 and weights of 3 slots"),
        ({"ranks": np.zeros((4, 1, 5), np.int32)}, r"ranks end before those of the product"),
        ({"weights": np.zeros((3, 17983), np.float16)}, r"must have 17984 numbers at least"),
        ({"weights": np.zeros((3, 17990), np.float16)}, r"must lie at multiples of 16 bytes"),
    ],
)
def test_what_would_read_elsewhere_is_refused(
    library: Path, change: dict[str, NDArray[Any]], said: str
) -> None:
    case = Case(64, (96, 32, 32), FEW, "float16")
    with pytest.raises(Exception, match=said):
        run(library, case.inputs() | change, case)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_rank": 513}, "max_rank 513; .* max_rank is 1 to 512"),
        ({"max_rank": 0}, "max_rank 0;"),
        ({"offset": -1}, "offset -1"),
        ({"columns1": -1}, "columns1 is -1"),
        ({"columns0": 0, "columns1": 0, "columns2": 0}, "no columns"),
    ],
)
def test_attributes_that_make_no_sense_are_refused(
    library: Path, change: dict[str, int], said: str
) -> None:
    case = Case(64, (96, 32, 32), FEW, "float16")
    with pytest.raises(ProviderError, match=said):
        run(library, case.inputs(), case, **change)


def test_what_the_driver_refuses_is_told(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(64, (96, 32, 32), FEW, "float16")
    said = r"driver: loading a compiled kernel: device kernel image is invalid \(200\)"
    with pytest.raises(ProviderError, match=said):
        run(library, case.inputs(), case, image("nothing"))
    monkeypatch.setenv("ONNXPORT_CUDA_NO_CONTEXT", "1")
    with pytest.raises(ProviderError, match="no CUDA context"):
        run(library, case.inputs(), case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_passes_its_own_test(kernel: LoraKernel, dtype: SlotDtype) -> None:
    assert distrust_lora(CPU, dtype, image(dtype), kernel) == ""


def test_its_own_test_finds_a_kernel_that_is_wrong(kernel: LoraKernel) -> None:
    """Of another type of the same width: it reads and writes nonsense, within the arrays."""
    reason = distrust_lora(CPU, "float16", image("bfloat16"), kernel)
    assert "computes wrongly here: outputs of about 2 are off by" in reason


@pytest.mark.parametrize("run_of", range(4))
def test_its_own_test_finds_a_number_that_is_none(
    kernel: LoraKernel, monkeypatch: pytest.MonkeyPatch, run_of: int
) -> None:
    """In any of its runs."""
    found = iter([np.nan if number == run_of else 0.0 for number in range(4)])
    monkeypatch.setattr(lora_test, "_off", lambda *_: next(found))
    assert "off by nan" in distrust_lora(CPU, "float16", image("float16"), kernel)


def test_its_own_test_tells_why_a_kernel_does_not_start(kernel: LoraKernel) -> None:
    assert "image is invalid" in distrust_lora(CPU, "float16", image("nothing"), kernel)


Compile = Callable[[str], bytes]


@pytest.fixture(params=[(7, 5), (8, 0), (9, 0), (12, 0)], ids=str)
def compile_for(request: pytest.FixtureRequest) -> Compile:
    try:
        compiler._compiler()
    except ProviderError as error:
        pytest.skip(str(error))
    return partial(compiler.compile_add_lora, request.param)


def test_nvidias_compiler_takes_the_kernel(
    compile_for: Compile, request: pytest.FixtureRequest
) -> None:
    """For every generation of GPUs; bfloat16 begins with the second."""
    capability = request.node.callspec.params["compile_for"]
    for dtype in DTYPES if capability >= (8, 0) else DTYPES[:2]:
        image = compile_for(dtype)
        assert image[:4] == b"\x7fELF"
        assert b"add_lora" in image


def test_what_the_compiler_refuses_is_told(
    compile_for: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "NUMBER_TYPES", {"float16": 7})
    with pytest.raises(ProviderError, match=r"failed: compiling \(.*NUMBER_TYPE is 1, 10 or 16"):
        compile_for("float16")


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "COMPILER", "libnone.so")
    with pytest.raises(ProviderError, match=r"libnone.so, is missing: pip install 'onnxport\[cuda"):
        compiler._compiler.__wrapped__()
