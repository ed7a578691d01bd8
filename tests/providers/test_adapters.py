"""LoRA adapters of loaded models: parity with merged weights, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onnxport.errors import AdapterError, CapacityError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import KINDS, Kind, LoraAdapter, LoraDelta, LoraProduct, projection_shapes
from onnxport.graphs.spec import ArchSpec
from onnxport.providers import adapters as module
from onnxport.providers import cuda
from onnxport.providers.adapter_slots import slots_bytes
from onnxport.providers.adapters import AdapterStacks, stack_bytes
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library
from onnxport.providers.device_arrays import DeviceArrays
from onnxport.providers.openvino.model import OpenVinoModel
from onnxport.providers.ort import CPU, Target
from onnxport.providers.registry import get_provider
from tests.conformance.adapting import make_adapter
from tests.conformance.models import step
from tests.exporter import checkpoints
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened

FAMILIES = (
    "afmoe-dense",
    "arcee",
    "cohere2",
    "cohere2-moe",
    "gemma3",
    "gpt-neox",
    "granite-biases",
    "granite-swa",
    "hunyuan",
    "hyperclovax",
    "jais2",
    "laguna",
    "llama",
    "mimo-v2-flash-windows",
    "mistral-window",
    "nanochat",
    "olmo",
    "phi3-longrope",
    "qwen2",
    "qwen3",
    "vaultgemma",
)
KERNEL = pytest.mark.skipif(find_library() is None, reason="the C++ kernel was not built")


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Returns `make(family)`: an artifact in float32, and one with adapter 2 in its weights."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: str) -> tuple[Path, Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model = checkpoints.make(checkpoints.CASES[family], folder / "base")
            options = ExportOptions(precision="fp32")
            base = export_model(folder / "base", folder / "base-artifact", options)
            spec = Artifact.read(base).manifest.model
            how = merge_by_heads if family == "gpt-neox" else merge
            how(model, make_adapter(spec, 2), spec)
            model.save_pretrained(folder / "merged")
            model.generation_config.save_pretrained(folder / "merged")
            made[family] = base, export_model(folder / "merged", folder / "artifact", options)
        return made[family]

    return make


OF_ATTENTION = (*KINDS["qkv"], "o_proj", "attention_gate")


def merge(model: Any, adapter: LoraAdapter, spec: ArchSpec) -> None:
    """Add an adapter to the weights of a checkpoint, as PEFT's `merge_and_unload` does."""
    weights = dict(model.named_parameters())
    rows = {name: shape[0] for name, shape in projection_shapes(spec, 0).items()}
    for (layer, projection), delta in adapter.deltas.items():
        parent = "self_attn" if projection in OF_ATTENTION else "mlp"
        gate = "g_proj" if spec.family == "laguna" else "gate_proj"
        module, begin = gate if projection == "attention_gate" else projection, 0
        for joined in ("qkv", "gate_up"):
            if spec.family == "phi3" and projection in KINDS[joined]:
                module = f"{joined}_proj"
                begin = sum(rows[one] for one in takewhile(projection.__ne__, KINDS[joined]))
        if spec.family == "nanochat":
            module = {"up_proj": "fc1", "down_proj": "fc2"}.get(module, module)
        weight = weights[f"model.layers.{layer}.{parent}.{module}.weight"]
        added = delta.b @ delta.a
        if projection in ("o_proj", "down_proj"):
            added /= spec.output_scale  # the checkpoint's weights are not scaled
        if projection == "o_proj":
            added /= spec.value_scale or 1.0
        with torch.no_grad():
            weight[begin : begin + len(added)] += torch.from_numpy(added)


# What GPT-NeoX calls its modules; the first has of each head its query, key and value.
NEOX = {
    **dict.fromkeys(KINDS["qkv"], "attention.query_key_value"),
    "o_proj": "attention.dense",
    "up_proj": "mlp.dense_h_to_4h",
    "down_proj": "mlp.dense_4h_to_h",
}


def merge_by_heads(model: Any, adapter: LoraAdapter, spec: ArchSpec) -> None:
    """Likewise of GPT-NeoX."""
    weights = dict(model.named_parameters())
    for (layer, projection), delta in adapter.deltas.items():
        weight = weights[f"gpt_neox.layers.{layer}.{NEOX[projection]}.weight"]
        added = torch.from_numpy(delta.b @ delta.a)
        with torch.no_grad():
            if projection in KINDS["qkv"]:
                heads = weight.view(spec.num_heads, 3, spec.head_size, -1)
                place = KINDS["qkv"].index(projection)
                heads[:, place] += added.view(spec.num_heads, spec.head_size, -1)
            else:
                weight += added


def logits(model: Model, slot: int) -> NDArray[np.float32]:
    """Of every position of a prompt."""
    tokens = checkpoints.tokens(3, 24).tolist()
    blocks = list(range(-(-len(tokens) // model.capabilities.block_size)))
    slots = np.array([slot], np.int32) if slot else None
    return model.run(step([(tokens, 0, blocks)], model.capabilities, adapter_slots=slots)).copy()


@pytest.mark.parametrize("attention", [pytest.param("custom", marks=KERNEL), "decomposed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_does_what_merging_it_would(
    merged: Callable[[str], tuple[Path, Path]], family: str, attention: Any
) -> None:
    base, whole = merged(family)
    with opened(whole, attention) as model:
        expected = logits(model, 0)
    with opened(base, attention, max_adapters=1) as model:
        model.set_adapter(1, make_adapter(Artifact.read(base).manifest.model, 2))
        np.testing.assert_allclose(logits(model, 1), expected, rtol=0, atol=1e-4)
        assert np.abs(logits(model, 0) - expected).max() > 1


@KERNEL
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("family", ["arcee", "gemma3", "qwen2", "qwen3"])
def test_slots_alone_change_no_bit(
    tiny_artifact: ArtifactMaker, family: str, precision: str
) -> None:
    """Norms and feed-forward layers are computed by the same operators with slots and without."""
    path = tiny_artifact(family, precision)
    with opened(path, "custom") as model:
        expected = logits(model, 0)
    with opened(path, "custom", max_adapters=2) as model:
        model.set_adapter(2, make_adapter(Artifact.read(path).manifest.model, 2))
        assert logits(model, 0).tobytes() == expected.tobytes()


def remade(
    adapter: LoraAdapter, of_a: Callable[[Any], Any], of_b: Callable[[Any], Any]
) -> LoraAdapter:
    """An adapter with other rows of A, and of the transposed B."""
    return LoraAdapter(
        {
            key: LoraDelta(of_a(delta.a).astype(np.float32), of_b(delta.b.T).T.astype(np.float32))
            for key, delta in adapter.deltas.items()
        }
    )


def to_int8(largest: int, off: float) -> Callable[[NDArray[np.float32]], NDArray[np.float64]]:
    """Makes rows whole steps, `off` of one aside; the largest number is in every block."""

    def of(rows: NDArray[np.float32]) -> NDArray[np.float64]:
        step = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64) / largest
        numbers = np.clip(np.round(rows / step), 1 - largest, largest - 1) + off
        numbers[:, ::16] = largest
        return np.asarray(numbers * step, np.float64)

    return of


@KERNEL
@pytest.mark.parametrize(
    ("precision", "level", "asked", "kept"),
    [
        ("int4", None, "auto", "int8"),
        ("int8", 4, "auto", "int8"),
        ("int4", 1, "auto", "float32"),
        ("int4", 2, "auto", "float16"),
        ("fp16", None, "auto", "float16"),
        ("fp32", None, "auto", "float32"),
        ("int4", None, "fp32", "float32"),
        ("int4", None, "fp16", "float16"),
        ("fp32", None, "fp16", "float16"),
        ("fp16", None, "fp32", "float32"),
        ("int4", 4, "int8", "int8"),
    ],
)
def test_what_adapters_are_kept_in(
    tiny_artifact: ArtifactMaker, precision: str, level: int | None, asked: str, kept: str
) -> None:
    """An adapter that was rounded to that type before does the same, to coarser ones it does not.

    In int8 what is a fifth of a step aside does the same as what is not, but for the scales' last
    bits.
    """
    path = tiny_artifact("qwen3", precision)
    adapter = make_adapter(Artifact.read(path).manifest.model, 2)
    options = {"matmul_accuracy_level": level, "adapter_dtype": asked}
    with opened(path, "custom", max_adapters=1, **options) as model:

        def of(one: LoraAdapter) -> NDArray[np.float32]:
            model.set_adapter(1, one)
            return logits(model, 1)

        whole = of(adapter)
        half = of(remade(adapter, *[lambda rows: rows.astype(np.float16)] * 2))
        most = 119 if precision == "int4" else 127  # of A
        byte, aside = (
            of(remade(adapter, to_int8(most, off), to_int8(127, off))) for off in (0, 0.2)
        )
    assert np.array_equal(whole, half) == (kept == "float16")
    assert (np.abs(byte - aside).max() < 1e-3) == (kept == "int8")


@KERNEL
@pytest.mark.parametrize(
    ("precision", "level", "asked"),
    [("int4", 1, "int4"), ("fp16", None, "int8"), ("fp32", None, "int4")],
)
def test_integers_where_products_are_of_floats(
    tiny_artifact: ArtifactMaker, precision: str, level: int | None, asked: str
) -> None:
    path = tiny_artifact("qwen3", precision)
    options = {"matmul_accuracy_level": level, "adapter_dtype": asked}
    with (
        pytest.raises(ProviderError, match=f"adapter_dtype is '{asked}'; adapters are kept in flo"),
        opened(path, "custom", max_adapters=1, **options),
    ):
        pass


def test_standard_operators_read_adapters_in_the_type_of_activations(
    tiny_artifact: ArtifactMaker,
) -> None:
    path = tiny_artifact("qwen3", "int4")
    with (
        pytest.raises(ProviderError, match="here adapters have the type of the activations, "),
        opened(path, "decomposed", max_adapters=1, adapter_dtype="int4"),
    ):
        pass
    with opened(path, "decomposed", max_adapters=1, adapter_dtype="fp32") as model:
        model.set_adapter(1, make_adapter(Artifact.read(path).manifest.model, 2))
        assert not np.array_equal(logits(model, 1), logits(model, 0))


@KERNEL
def test_int4_is_coarser_than_int8_and_stays_the_adapter(tiny_artifact: ArtifactMaker) -> None:
    """A is off by a tenth of itself, and B by less; both are random."""
    path = tiny_artifact("qwen3", "int4")
    adapter = make_adapter(Artifact.read(path).manifest.model, 2)
    found = {}
    for dtype in ("float32", "int8", "int4"):
        with opened(path, "custom", max_adapters=1, adapter_dtype=dtype) as model:
            model.set_adapter(1, adapter)
            found[dtype] = logits(model, 1)
            without = logits(model, 0)
    added = np.linalg.norm(found["float32"] - without)
    off = {name: np.linalg.norm(own - found["float32"]) / added for name, own in found.items()}
    assert 2 * off["int8"] < off["int4"] < 0.3, off


@KERNEL
def test_adapters_are_floats_where_no_product_is_ours(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors without int8 products of our own: AddLora stands beside ONNX Runtime's."""
    path = tiny_artifact("qwen3", "int4")
    adapter = make_adapter(Artifact.read(path).manifest.model, 2)
    with opened(path, "custom", max_adapters=1) as model:
        model.set_adapter(1, adapter)
        kept_in_int8 = logits(model, 1)
    monkeypatch.setattr("onnxport.providers.cpu.library.matmul_isa", lambda: None)
    with opened(path, "custom", max_adapters=1) as model:
        model.set_adapter(1, adapter)
        found = logits(model, 1)
        model.set_adapter(1, remade(adapter, *[lambda rows: rows.astype(np.float16)] * 2))
        np.testing.assert_array_equal(logits(model, 1), found)
    assert 1e-4 < np.abs(found - kept_in_int8).max() < 0.1 * np.abs(found).max()


@KERNEL
def test_int8_changes_little_where_products_are_int8(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and activations are off by half a step of 1/119 at most: hundredths of what is added."""
    path = tiny_artifact("qwen3", "int4")
    adapter = make_adapter(Artifact.read(path).manifest.model, 2)
    found = []
    for int8 in (True, False):
        if not int8:
            monkeypatch.setattr("onnxport.providers.host_lora.takes_int8", lambda *_: False)
        with opened(path, "custom", max_adapters=1) as model:
            model.set_adapter(1, adapter)
            found.append(logits(model, 1))
            without = logits(model, 0)
    added = np.linalg.norm(found[1] - without)
    off = np.linalg.norm(found[0] - found[1]) / added
    assert 1e-4 < off < 0.05, off


@pytest.fixture
def model(tiny_artifact: ArtifactMaker) -> Any:
    with opened(tiny_artifact("llama", "fp32"), None, max_adapters=2, max_adapter_rank=4) as model:
        yield model


@pytest.fixture
def spec(tiny_artifact: ArtifactMaker) -> ArchSpec:
    return Artifact.read(tiny_artifact("llama", "fp32")).manifest.model


@pytest.mark.parametrize("slot", [0, 3, -1])
def test_a_slot_that_is_not_there(model: Model, slot: int) -> None:
    with pytest.raises(ProviderError, match=r"slots 1 to 2, load it with a higher max_adapters"):
        model.set_adapter(slot, None)


def test_a_rank_that_is_too_large(model: Model, spec: ArchSpec) -> None:
    with pytest.raises(CapacityError, match=r"has rank 8; .* ranks up to 4, .*max_adapter_rank 8"):
        model.set_adapter(1, make_adapter(spec, 1))


def one_delta(projection: str, a: tuple[int, int], b: tuple[int, int], layer: int = 1) -> Any:
    delta = LoraDelta(np.ones(a, np.float32), np.ones(b, np.float32))
    return LoraAdapter({(layer, projection): delta})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (one_delta("q_proj", (4, 65), (64, 4)), r"A \(4, 65\) and B \(64, 4\) for q_proj of layer"),
        (one_delta("k_proj", (4, 64), (64, 4)), r"takes A \(4, 64\) and B \(32, 4\), so it was"),
        (one_delta("down_proj", (4, 96), (64, 3)), r"B \(64, 3\) for down_proj"),
        (one_delta("o_proj", (4, 64), (64, 4), layer=2), r"layer 2; the model has layers 0 to 1"),
        (one_delta("head", (4, 64), (64, 4)), r"changes head of layer 1; .* with q_proj, k_proj"),
    ],
)
def test_an_adapter_of_another_model(model: Model, adapter: LoraAdapter, said: str) -> None:
    with pytest.raises(ProviderError, match=said):
        model.set_adapter(1, adapter)
    assert np.isfinite(logits(model, 0)).all()


def test_what_is_refused_leaves_the_slot_as_it_was(model: Model, spec: ArchSpec) -> None:
    model.set_adapter(1, make_adapter(spec, 2))
    before = logits(model, 1)
    with pytest.raises(CapacityError):
        model.set_adapter(1, make_adapter(spec, 1))
    np.testing.assert_array_equal(logits(model, 1), before)


@KERNEL
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_what_int8_cannot_hold_leaves_the_slot_as_it_was(
    tiny_artifact: ArtifactMaker, number: float
) -> None:
    path = tiny_artifact("qwen3", "int4")
    spec = Artifact.read(path).manifest.model
    with opened(path, "custom", max_adapters=1) as model:
        model.set_adapter(1, make_adapter(spec, 2))
        before = logits(model, 1)
        outputs, inputs = projection_shapes(spec, 0)["q_proj"]
        refused = one_delta("q_proj", (4, inputs), (outputs, 4))
        delta = next(iter(refused.deltas.values()))
        delta.a[:] = delta.b[:] = number
        with pytest.raises(AdapterError, match="the LoRA adapter does not fit"):
            model.set_adapter(1, refused)
        np.testing.assert_array_equal(logits(model, 1), before)


def test_a_row_with_an_empty_slot(model: Model) -> None:
    with pytest.raises(ProviderError, match=r"slots 2, and there is none; filled are none"):
        logits(model, 2)


def test_a_model_without_slots(tiny_artifact: ArtifactMaker) -> None:
    for provider in ("cpu", "openvino"):
        with opened(tiny_artifact("llama", "fp32"), None, provider=provider) as model:
            assert model.capabilities.max_adapters == model.capabilities.max_adapter_rank == 0
            with pytest.raises(ProviderError, match="load it with max_adapters"):
                model.set_adapter(1, None)
            with pytest.raises(ProviderError, match="load it with max_adapters"):
                logits(model, 1)


@pytest.mark.parametrize("provider", ["cpu", "openvino"])
def test_a_closed_model(tiny_artifact: ArtifactMaker, provider: str) -> None:
    with opened(tiny_artifact("llama", "fp32"), None, provider=provider, max_adapters=1) as model:
        model.close()
        with pytest.raises(ProviderError, match="closed"):
            model.set_adapter(1, None)


@pytest.mark.parametrize("numbers", [{"max_adapters": -1}, {"max_adapter_rank": 0}])
def test_options_that_mean_nothing(numbers: dict[str, int]) -> None:
    with pytest.raises(ProviderError, match="must be at least 0 and 1"):
        LoadOptions(**numbers)


def test_numbers_that_float16_cannot_hold(tiny_artifact: ArtifactMaker) -> None:
    artifact = Artifact.read(tiny_artifact("llama", "fp16"))
    options = LoadOptions(kv_cache_tokens=1024, max_adapters=1)
    model = get_provider("cuda", emulate=True).load(artifact, options)
    adapter = one_delta("q_proj", (1, 64), (64, 1))
    next(iter(adapter.deltas.values())).b[3] = 1e5
    said = r"'B of q_proj' holds 100000, .* too large for float1"
    with pytest.raises(AdapterError, match=said):
        model.set_adapter(1, adapter)
    with pytest.raises(ProviderError, match="slots 1, and there is none"):
        logits(model, 1)
    model.set_adapter(1, make_adapter(artifact.manifest.model, 2))
    before = logits(model, 1)
    with pytest.raises(AdapterError, match=said):
        model.set_adapter(1, adapter)
    np.testing.assert_array_equal(logits(model, 1), before)
    model.close()


def test_replayed_steps_read_the_adapters_of_today(tiny_artifact: ArtifactMaker) -> None:
    """Other adapters come to where the last ones were; more rows than ever are recorded anew."""
    artifact = Artifact.read(tiny_artifact("llama", "fp16"))
    options = LoadOptions(max_adapters=3, kv_cache_tokens=1024, block_size=16)
    plain, replayed = (
        cuda.CudaProvider(emulate=True).load(artifact, replace(options, capture_graphs=each))
        for each in (False, True)
    )
    recordings = []

    def decode(*slots: int | None) -> None:
        rows = [([5 + row], 0, [row]) for row in range(len(slots))]
        given = None if None in slots else np.array(slots, np.int32)
        wanted, found = (
            model.run(step(rows, adapter_slots=given)).copy() for model in (plain, replayed)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
        recordings.append(replayed._replay._num_recorded)  # type: ignore[union-attr]

    def put(slot: int, seed: int | None) -> None:
        adapter = None if seed is None else make_adapter(artifact.manifest.model, seed)
        for model in (plain, replayed):
            model.set_adapter(slot, adapter)

    decode(None, None)
    put(1, 3)
    decode(1, 0)  # few rows, of which there is room for some in any stack
    put(1, 2)
    decode(1, 0)  # more than there is room for
    decode(0, 1)
    put(1, 3)
    decode(0, 1)  # less again
    put(2, 2)
    decode(2, 1)
    put(1, None)
    decode(0, 2)
    decode(None, None)
    put(3, 1)
    decode(3, 2)  # more again
    assert recordings == [1, 1, 2, 2, 2, 3, 3, 3, 4]
    for model in (plain, replayed):
        model.close()


def test_memory_for_adapters_is_set_aside(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what is free goes to the pool after the adapters, not before."""
    monkeypatch.setattr("onnxport.providers.memory.available_bytes", lambda: 50 << 20)
    blocks = []
    for most in (0, 8):
        with opened(
            tiny_artifact("llama", "fp32"), None, kv_memory=0.5, max_adapters=most
        ) as model:
            found = model.capabilities
            blocks.append(found.num_blocks * found.kv_block_bytes)
    spec = Artifact.read(tiny_artifact("llama", "fp32")).manifest.model
    products = [LoraProduct(n, k) for n in (0, 1) for k in ("qkv", "o", "gate_up", "down")]  # type: ignore[arg-type]
    asked = LoadOptions(max_adapters=8)
    taken = (
        slots_bytes(products, spec, asked, "float32")
        if find_library()
        else stack_bytes(products, spec, asked, 4)
    )
    assert blocks[0] - blocks[1] == pytest.approx(taken / 2, abs=8192)


def full_adapter(spec: ArchSpec, rank: int) -> LoraAdapter:
    """One of a rank that changes everything."""
    deltas = {
        (layer, projection): LoraDelta(
            np.zeros((rank, columns), np.float32), np.zeros((rows, rank), np.float32)
        )
        for layer in range(spec.num_layers)
        for projection, (rows, columns) in projection_shapes(spec, layer).items()
    }
    return LoraAdapter(deltas)


@pytest.mark.parametrize("options", [{}, {"few_shapes": True}, {"steady": True}])
def test_what_is_set_aside_holds_two_stacks_and_a_copy(
    spec: ArchSpec, options: dict[str, bool]
) -> None:
    """Of all adapters at their largest rank, and of as many rows as shapes have."""
    place, rank = Placed(), 9
    kinds: tuple[Kind, ...] = ("qkv", "o", "gate_up", "down")
    products = [LoraProduct(layer, kind) for layer in range(spec.num_layers) for kind in kinds]
    found = AdapterStacks(products, spec, np.dtype(np.float32), place, **options)
    for slot in (1, 2, 3):
        found.put(slot, full_adapter(spec, rank))
    found.values({1, 2, 3})
    largest = sum(
        array.nbytes for name, array in place.stacks[-1].items() if not name.endswith("owners")
    )
    asked = LoadOptions(max_adapters=3, max_adapter_rank=rank)
    found_bytes = stack_bytes(products, spec, asked, 4, few_shapes=bool(options))
    assert found_bytes == 3 * largest


class Placed:
    """Counts the stacks that are made."""

    def __init__(self) -> None:
        self.stacks: list[dict[str, NDArray[Any]]] = []

    def __call__(self, arrays: Any) -> Any:
        self.stacks.append(dict(arrays))
        return arrays


def stacks(spec: ArchSpec, place: Placed, **options: Any) -> AdapterStacks:
    products = [LoraProduct(layer, "qkv") for layer in range(spec.num_layers)]
    found = AdapterStacks(products, spec, np.dtype(np.float32), place, **options)
    for slot, seed in ((1, 1), (2, 2), (3, 3)):
        found.put(slot, make_adapter(spec, seed))
    return found


def owners(values: Any) -> list[int]:
    found: list[int] = values["lora.qkv.owners"].tolist()
    return found


def test_a_stack_is_built_only_where_an_adapter_is_missing(spec: ArchSpec) -> None:
    place = Placed()
    found = stacks(spec, place)
    empty = found.values(())
    assert owners(empty) == [0]
    first = found.values({1})
    assert owners(first) == [1] * 16  # ranks of q_proj and v_proj
    both = found.values({2})
    assert owners(both) == [1] * 16 + [2] * 12
    used: list[Collection[int]] = [{1}, {1, 2}, {2}]
    assert all(found.values(slots) is both for slots in used)
    assert found.values(()) is empty
    assert len(place.stacks) == 3
    found.remove(1)
    assert owners(found.values({2})) == [2] * 12
    assert owners(found.values({3})) == [2] * 12 + [3]


def test_an_adapter_that_no_step_uses_leaves_the_stack(
    spec: ArchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_STEPS", 3)
    found = stacks(spec, Placed())
    found.values({1, 3})
    assert [len(owners(found.values({3}))) for _ in range(3)] == [17, 17, 1]
    assert owners(found.values({1})) == [1] * 16 + [3]


def test_few_shapes_are_powers_of_two(spec: ArchSpec) -> None:
    found = stacks(spec, Placed(), few_shapes=True)
    heights = [len(owners(found.values(slots))) for slots in ((), {3}, {1}, {2})]
    assert heights == [8, 8, 32, 32]
    values = found.values({1})
    assert values["lora.layers.0.qkv.a"].shape == (32, spec.hidden_size)
    assert not values["lora.layers.0.qkv.a"][29:].any()


def test_a_steady_stack_keeps_its_rows(spec: ArchSpec) -> None:
    """Whoever reads it where it was finds the last one, and only one that is larger elsewhere."""
    place = Placed()
    found = stacks(spec, place, steady=True)
    heights = [len(owners(found.values(slots))) for slots in ((), {3}, {1}, {3}, ())]
    assert heights == [8, 8, 32, 32, 32]
    found.remove(1)
    assert len(owners(found.values(()))) == 32
    number = len(place.stacks)
    assert sorted(set(owners(found.values({2})))) == [0, 2]
    found.values(())
    found.values({2})
    assert len(place.stacks) == number + 1


def test_a_steady_stack_that_could_not_be_placed_is_built_anew(spec: ArchSpec) -> None:
    place = Placed()
    found = stacks(spec, place, steady=True)
    found.values({1})
    own = found._place
    found._place = lambda arrays: (_ for _ in ()).throw(MemoryError("short"))
    with pytest.raises(MemoryError):
        found.values({2})
    found._place = own
    assert set(owners(found.values({1}))) == {0, 1}  # not what was there before


def test_rows_of_a_projection_are_zero_beside_it(spec: ArchSpec) -> None:
    values = stacks(spec, Placed()).values({1})
    b = values["lora.layers.0.qkv.b"]
    assert b[:8, : spec.q_size].any()
    assert not b[:8, spec.q_size :].any()
    assert not b[8:, : -spec.kv_size].any()


class Elsewhere(Target):
    """A device that is the CPU after all, but does not say so."""

    @property
    def is_host(self) -> bool:
        return False


def test_arrays_reach_a_device_by_name() -> None:
    place = DeviceArrays(Elsewhere(CPU.execution_provider))
    for size in (3, 5):
        arrays = {
            "b": np.arange(size, dtype=np.int32),
            "a": np.full((size, 2), size, np.float16),
        }
        found = place(arrays)
        assert list(found) == ["b", "a"]
        for name, value in found.items():
            np.testing.assert_array_equal(value.numpy(), arrays[name])


@pytest.mark.parametrize("target", [CPU, Elsewhere(CPU.execution_provider)])
def test_steady_arrays_are_put_where_the_last_were(target: Target) -> None:
    place = DeviceArrays(target, steady=True)
    first = place({"a": np.array([1, 2], np.float16)})
    address = first["a"].data_ptr()
    second = place({"a": np.array([3, 4], np.float16)})
    assert second is first
    assert second["a"].data_ptr() == address
    assert second["a"].numpy().tolist() == [3, 4]
    larger = place({"a": np.array([5, 6, 7], np.float16)})
    assert larger is not first
    assert larger["a"].numpy().tolist() == [5, 6, 7]


@pytest.mark.parametrize("free_bytes", [1 << 40, 1 << 20])
def test_openvino_has_a_graph_without_adapters_where_memory_allows(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr("onnxport.providers.memory.available_bytes", lambda: free_bytes)
    path = tiny_artifact("llama", "fp32")
    options: dict[str, Any] = {"provider": "openvino", "max_adapters": 1, "kv_cache_tokens": 128}
    with opened(path, None, **options) as model:
        assert isinstance(model, OpenVinoModel)
        adapter = make_adapter(Artifact.read(path).manifest.model, 2)
        model.set_adapter(1, adapter)
        adapted = [graph.adapted for graph, _ in model._requests]
        assert adapted == ([False, True] if free_bytes > 1 << 30 else [True])
        without, of_it = logits(model, 0), logits(model, 1)
        assert list(model._bound) == ([1] if free_bytes > 1 << 30 else [0])
        assert np.abs(of_it - without).max() > 0.1
    with opened(path, None, provider="openvino", kv_cache_tokens=128) as model:
        np.testing.assert_allclose(logits(model, 0), without, rtol=1e-4, atol=1e-4)


def test_openvino_keeps_what_it_reads() -> None:
    pytest.importorskip("openvino")
    from onnxport.providers.openvino.model import tensors_of

    array = np.ones(1 << 20, np.float32)
    alive = weakref.ref(array)
    tensors = tensors_of({"a": array})
    del array
    gc.collect()
    assert alive() is not None
    del tensors
    gc.collect()
    assert alive() is None
