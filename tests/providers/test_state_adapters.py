"""LoRA adapters of models that keep a state: parity with merged weights, on every provider."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import ArtifactError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import KINDS, LoraAdapter, LoraDelta, projection_shapes, projections_in
from onnxport.graphs.passes.lora import lora_products
from onnxport.graphs.passes.split_matmul import split_matmul
from onnxport.graphs.spec import ArchSpec
from onnxport.providers import cuda
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library
from onnxport.providers.registry import get_provider
from tests.exporter import checkpoints
from tests.exporter.checkpoints import HYBRID, SHORT_CONV, SPACES, UNGATED_EXPERTS
from tests.providers import state_adapters
from tests.providers.linear import Stateful
from tests.providers.models import opened
from tests.serving.adapting import Tensors

KERNEL = pytest.mark.skipif(find_library() is None, reason="the C++ kernel was not built")
OPENVINO = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="openvino is not installed"
)
CASES = {**HYBRID, **SPACES, **SHORT_CONV, **UNGATED_EXPERTS}
FAMILIES = (
    *("qwen3.5", "qwen3.5-images", "qwen3.5-moe", "qwen3-next", "qwen3-next-dense-layers"),
    *("granite-4", "granite-4-dense", "bamba-biases", "falcon-h1"),
    *("nemotron-h", "nemotron-h-biases", "nemotron-3", "lfm2-biases", "lfm2-moe", "lfm3"),
    "olmo-hybrid",
)
EXACT: Mapping[str, Any] = {"matmul_accuracy_level": 1}
# One is longer than what devices compute of a state at once.
PROMPTS = [checkpoints.tokens(seed, 20 + 26 * seed).tolist() for seed in range(3)]


@dataclass(frozen=True, slots=True)
class Made:
    """A model, and adapters that were trained for it, by seed."""

    path: Path
    spec: ArchSpec
    peer: Any  # transformers' model
    adapters: Mapping[int, LoraAdapter]
    tensors: Mapping[int, Tensors]

    def wanted(self, seed: int, tokens: list[int]) -> NDArray[np.float32]:
        """The logits of a prompt where an adapter is merged into the model."""
        model = self.peer
        if seed:
            model = state_adapters.merged(model, self.tensors[seed])
        return state_adapters.expected(model, tokens)


Maker = Callable[..., Made]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Returns `make(case, precision="fp32")`."""
    found: dict[tuple[str, str], Made] = {}

    def make(case: str, precision: str = "fp32") -> Made:
        if (case, precision) not in found:
            folder = tmp_path_factory.mktemp(f"{case}-{precision}")
            peer = checkpoints.make(CASES[case], folder / "checkpoint")
            options = ExportOptions(precision=precision, threads=1, group_size=32)
            path = export_model(folder / "checkpoint", folder / "artifact", options)
            spec = Artifact.read(path).manifest.model
            tensors = {seed: state_adapters.trained(peer, spec, seed) for seed in (1, 12)}
            adapters = {
                seed: state_adapters.saved(folder / f"{seed}", peer, spec, one).adapter
                for seed, one in tensors.items()
            }
            found[case, precision] = Made(path, spec, peer, adapters, tensors)
        return found[case, precision]

    return make


def fill(model: Model, one: Made) -> None:
    """Put the adapters into slots 1 and 2."""
    for slot, adapter in enumerate(one.adapters.values(), 1):
        model.set_adapter(slot, adapter)


@pytest.mark.parametrize("attention", [pytest.param("custom", marks=KERNEL), "decomposed"])
@pytest.mark.parametrize("case", FAMILIES)
def test_an_adapter_does_what_merging_it_would(made: Maker, case: str, attention: Any) -> None:
    """Of every product of every layer, for rows with different ones beside one another."""
    one = made(case)
    wanted = [one.wanted(seed, PROMPTS[0]) for seed in (0, 1, 12)]
    assert min(np.abs(wanted[0] - other).max() for other in wanted[1:]) > 1
    named = {(layer, name) for layer, name in one.adapters[1].deltas}
    layers = range(one.spec.num_layers)
    assert named == {(at, name) for at in layers for name in projection_shapes(one.spec, at)}
    rank = max(4, *(adapter.rank for adapter in one.adapters.values()))  # of several modules
    options = {"max_adapters": 2, "max_adapter_rank": rank, "state_slots": 8}
    with opened(one.path, attention, hybrid_kv_cache=False, **options) as model:
        fill(model, one)
        run = Stateful(model, 3)
        run.adapters = [0, 1, 2]
        for row, found in run.run(dict.fromkeys(range(3), PROMPTS[0])).items():
            np.testing.assert_allclose(found, wanted[row], rtol=0, atol=2e-4)


@KERNEL
@pytest.mark.parametrize(
    ("case", "precision"),
    [("qwen3.5", "int4"), ("granite-4-dense", "int4"), ("nemotron-h", "int8"), ("lfm2", "int4")],
)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch_whole_and_in_chunks(
    made: Maker, case: str, precision: str
) -> None:
    """As without adapters; and who has none has the bits of a model without slots."""
    one = made(case, precision)
    with opened(one.path, "custom", state_slots=8) as model:
        plain = Stateful(model, 3).run({0: PROMPTS[0]})[0]
    with opened(one.path, "custom", state_slots=8, max_adapters=2, max_adapter_rank=4) as model:
        fill(model, one)

        def sequences() -> Stateful:
            run = Stateful(model, 3)
            run.adapters = [0, 1, 2]
            return run

        alone = [sequences().run({row: PROMPTS[row]})[row] for row in range(3)]
        together = sequences().run(dict(enumerate(PROMPTS)))
        mixed, parts = sequences(), [[], [], []]  # type: ignore[var-annotated]
        for cut in ({0: (0, 5)}, {0: (5, 6), 1: (0, 17)}, {2: (0, 72), 0: (6, 20), 1: (17, 46)}):
            new = {row: PROMPTS[row][first:last] for row, (first, last) in cut.items()}
            for row, logits in mixed.run(new).items():
                parts[row].append(logits)
    assert alone[0].tobytes() == plain.tobytes()
    for row in range(3):
        assert together[row].tobytes() == alone[row].tobytes()
        assert np.concatenate(parts[row]).tobytes() == alone[row].tobytes()


@KERNEL
@pytest.mark.parametrize("dtype", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("case", ["qwen3.5", "nemotron-h"])
def test_what_adapters_are_kept_in(made: Maker, case: str, dtype: str) -> None:
    """Decays are of sums over all tokens: rounding adapters leaves them what they are."""
    one = made(case, "int4")
    found = {}
    for kept in ("fp32", dtype):
        options = {"max_adapters": 2, "max_adapter_rank": 4, "adapter_dtype": kept}
        with opened(one.path, "custom", state_slots=4, **options) as model:
            fill(model, one)
            run = Stateful(model, 2)
            run.adapters = [1, 0]
            own = run.run({0: PROMPTS[1], 1: PROMPTS[1]})
            found[kept], base = own[0], own[1]
    off = np.linalg.norm(found[dtype] - found["fp32"]) / np.linalg.norm(found["fp32"] - base)
    assert off <= {"fp32": 0, "int8": 0.08, "int4": 0.35}[dtype]


def beside_one_another(model: Model, one: Made, cuts: list[int]) -> None:
    """Rows with each adapter and none, cut at the same places, are what merging would make."""
    fill(model, one)
    run, found = Stateful(model, 3), [[], [], []]  # type: ignore[var-annotated]
    run.adapters = [0, 2, 1]
    for first, last in zip(cuts, [*cuts[1:], None], strict=True):
        new = {row: ids[first:last] for row, ids in enumerate(PROMPTS) if ids[first:last]}
        for row, logits in run.run(new).items():
            found[row].append(logits)
    for row, seed in enumerate((0, 12, 1)):
        wanted = one.wanted(seed, PROMPTS[row])
        np.testing.assert_allclose(
            np.concatenate(found[row]), wanted, rtol=0, atol=2e-4 * wanted.std()
        )
    plain = Stateful(model, 1)
    wanted = one.wanted(0, PROMPTS[0])
    np.testing.assert_allclose(
        plain.run({0: PROMPTS[0]})[0], wanted, rtol=0, atol=2e-4 * wanted.std()
    )


@pytest.mark.parametrize(
    ("case", "provider"),
    [("qwen3.5", "cuda"), ("qwen3.5", "directml"), ("granite-4-dense", "webgpu"), ("lfm2", "cuda")],
)
def test_devices(made: Maker, case: str, provider: str) -> None:
    """Their steps are cut where rows are long, and each part has its rows' adapters."""
    one = made(case)
    options = LoadOptions(
        **{"kv_cache_tokens": 1024, "threads": 1, "state_slots": 8, "dtype": "float32"},
        **{"max_adapters": 2, "max_adapter_rank": 4, **EXACT},
    )
    model = get_provider(provider, emulate=True).load(Artifact.read(one.path), options)
    try:
        beside_one_another(model, one, [0, 3])
    finally:
        model.close()


@KERNEL
@pytest.mark.parametrize("case", ["qwen3.5", "nemotron-h"])
def test_a_kernel_of_ours_on_a_device(
    made: Maker, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16 it does what standard operators do, in the products that stay exact, too."""
    one = made(case, "fp16")
    options = LoadOptions(
        **{"kv_cache_tokens": 1024, "threads": 1, "state_slots": 8, "dtype": "float16"},
        **{"max_adapters": 2, "max_adapter_rank": 4},
    )
    found = []
    for value in ("0", "1"):
        monkeypatch.setenv(cuda.LORA_VARIABLE, value)
        model = cuda.CudaProvider(emulate=True).load(Artifact.read(one.path), options)
        fill(model, one)
        run = Stateful(model, 3)
        run.adapters = [0, 1, 2]
        found.append(run.run(dict.fromkeys(range(3), PROMPTS[0])))
        model.close()
    for row, logits in found[0].items():
        np.testing.assert_allclose(found[1][row], logits, rtol=0, atol=0.05 * logits.std())
        assert row == 0 or np.abs(logits - found[0][0]).max() > 1


@OPENVINO
@pytest.mark.parametrize("case", ["qwen3.5", "granite-4-dense"])
def test_openvino(made: Maker, case: str) -> None:
    """Steps without adapters run on a graph of their own, whose states are the same."""
    one = made(case)
    options = {**EXACT, "kv_cache_dtype": "float32", "max_adapters": 2, "max_adapter_rank": 4}
    with opened(one.path, None, provider="openvino", state_slots=8, **options) as model:
        beside_one_another(model, one, [0, 3])


@OPENVINO
@pytest.mark.parametrize("case", ["lfm2", "qwen3.5"])
def test_openvino_in_int4(made: Maker, case: str) -> None:
    """Its graph has joined products of quantized weights in parts."""
    one = made(case, "int4")
    options = {**EXACT, "max_adapters": 2, "max_adapter_rank": 4, "state_slots": 4}
    found = []
    for provider in ("openvino", "cpu"):
        with opened(one.path, None, provider=provider, **options) as model:
            fill(model, one)
            run = Stateful(model, 2)
            run.adapters = [1, 2]
            found.append(run.run({0: PROMPTS[1], 1: PROMPTS[0]}))
    for row, logits in found[0].items():
        np.testing.assert_allclose(logits, found[1][row], rtol=0, atol=0.02 * logits.std())


def test_products_that_are_cut_in_parts(made: Maker) -> None:
    """Parts that are equal are products of their own, and others stay joined."""
    one = made("lfm2", "int4")
    artifact = Artifact.read(one.path)
    cut = split_matmul(artifact.load_graph("paged")).model
    found = [p.kind for p in lora_products(cut, one.spec) if p.layer == 0]
    parts = ["linear.in.before", "linear.in.behind", "linear.in.values"]
    assert found == [*parts, "o", "gate", "up", "down"]
    whole = [p.kind for p in lora_products(artifact.load_graph("paged"), one.spec) if p.layer == 2]
    assert whole == ["qkv", "o", "gate_up", "down"]
    one = made("qwen3.5", "int4")
    cut = split_matmul(Artifact.read(one.path).load_graph("paged")).model
    found = [p.kind for p in lora_products(cut, one.spec) if p.layer == 0]
    assert found == ["linear.qkv", "linear.ba", "linear.z", "o", "gate", "up", "down"]


def test_a_product_that_is_not_found_is_told(made: Maker) -> None:
    one = made("qwen3.5")
    model = Artifact.read(one.path).load_graph("paged")
    tensor = next(t for t in model.graph.initializer if t.name == "layers.1.linear.ba.weight")
    tensor.dims[1] += 1
    with pytest.raises(ArtifactError, match=r"2 of .* are not found .* linear_a of layer 1"):
        lora_products(model, one.spec)


def test_a_projection_that_a_layer_has_not(made: Maker) -> None:
    one = made("qwen3.5")
    assert one.spec.is_linear(0)
    with opened(one.path, "decomposed", max_adapters=1, state_slots=4) as model:
        for layer, name, what in (
            (0, "q_proj", "of layer 0, which has none; linear_qkv, linear_z, linear_b, linear_a"),
            (3, "linear_z", "of layer 3, which has none; q_proj, k_proj, v_proj, o_proj, atten"),
            (0, "linear_dt", "the model has layers 0 to 3 with q_proj, .*, linear_qkv, linear_z"),
        ):
            delta = LoraDelta(np.ones((1, 64), np.float32), np.ones((64, 1), np.float32))
            with pytest.raises(ProviderError, match=f"changes {name} .*{what}"):
                model.set_adapter(1, LoraAdapter({(layer, name): delta}))  # type: ignore[dict-item]


@pytest.mark.parametrize("case", FAMILIES)
def test_slots_have_ranks_for_what_layers_have(made: Maker, case: str) -> None:
    """Those of a product lie one behind the other, for the operator reads them so."""
    spec = made(case).spec
    every = projections_in(spec)
    assert len(set(every)) == len(every)
    for names in KINDS.values():
        if names[0] in every:
            first = every.index(names[0])
            assert every[first : first + len(names)] == names
