"""What layers read of the residual stream, told by models; and heads that take it, on devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from onnxport.errors import ArtifactError, ProviderError
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.manifest import MTP_FOLDER
from onnxport.graphs.passes.gated_silu import DOMAIN
from onnxport.graphs.passes.hidden_states import (
    TELL_HIDDEN_STATES,
    tell_hidden_states,
    tell_when_asked,
)
from onnxport.providers.base import LoadOptions, Model, StepInputs
from onnxport.providers.cpu.library import find_library
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.registry import get_provider
from onnxport.providers.step_memory import StepMemory
from tests.conformance.models import step
from tests.exporter import checkpoints
from tests.exporter.heads import HIDDEN, TARGET, Head
from tests.exporter.mtp_layers import Mtp, make
from tests.tiers import crossed

Floats = NDArray[np.float32]
FAMILIES = (
    *(
        "llama",
        "qwen2",
        "gemma3",
        "gemma4",
        "gemma4-shared",
        "gemma2",
        "granite",
        "olmo2",
        "phi3",
        "gpt-oss",
        "helium",
    ),
    "cohere2",
)
# provider, emulated, options
WAYS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "cpu": ("cpu", False, {"attention": "custom"}),
    "cpu decomposed": ("cpu", False, {"attention": "decomposed"}),
    "cuda": ("cuda", True, {}),
    "webgpu": ("webgpu", True, {}),
    "migraphx": ("migraphx", True, {}),
    "directml": ("directml", True, {}),
}
FLOAT32 = {"matmul_accuracy_level": 1}


@contextmanager
def opened(path: Path, way: str, **options: Any) -> Iterator[Model]:
    provider, emulated, given = WAYS[way]
    if find_library() is None and (emulated or given.get("attention") == "custom"):
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    chosen = LoadOptions(
        **{"threads": 2, "kv_cache_tokens": 512, "block_size": 16, **given, **options}
    )
    model = get_provider(provider, emulate=emulated).load(Artifact.read(path), chosen)
    try:
        yield model
    finally:
        model.close()


def told(model: Model, inputs: StepInputs) -> tuple[Floats, Floats]:
    """Logits and hidden states of a step."""
    states = np.full((len(inputs.input_ids), model.capabilities.features), np.nan, np.float32)
    logits = model.run(replace(inputs, hidden_states=states)).copy()
    return logits, states


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    case = checkpoints.CASES[family]
    torch_model = checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", context_length=case.context_length)
    artifact = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    ids = checkpoints.tokens()
    with torch.no_grad():
        expected = torch_model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    count = Artifact.read(artifact).manifest.model.num_layers
    layers = tuple(reversed(range(count)))
    want = np.concatenate([expected[layer][0].numpy() for layer in layers], axis=-1)
    for way in ("cpu", "cpu decomposed"):
        with opened(artifact, way, hidden_layers=layers) as model:
            assert model.capabilities.features == want.shape[1]
            found = []
            for first, end in ((0, 19), (19, 20), (20, len(ids))):
                rows = [(ids[first:end].tolist(), first, [2, 5])]
                inputs = step(rows, model.capabilities)
                if model.capabilities.windows != (None,):
                    table = inputs.block_table
                    others = tuple(table + 3 * n for n in range(1, len(model.capabilities.windows)))
                    inputs = replace(inputs, more_block_tables=others)
                found.append(told(model, inputs)[1])
        scale = np.abs(want).max()
        np.testing.assert_allclose(np.concatenate(found), want, rtol=1e-3, atol=2e-4 * scale)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_single_layer_tells_of_all_tokens(family: str, tmp_path: Path) -> None:
    case = checkpoints.CASES[family]
    case = replace(case, config={**case.config, "num_hidden_layers": 1})
    torch_model = checkpoints.make(case, tmp_path / "checkpoint")
    artifact = export_model(
        tmp_path / "checkpoint", tmp_path / "artifact", ExportOptions(precision="fp32")
    )
    ids = checkpoints.tokens(count=20)
    with torch.no_grad():
        expected = torch_model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    for way in ("cpu", "cpu decomposed"):
        with opened(artifact, way, hidden_layers=(0,)) as model:
            inputs = step([(ids.tolist(), 0, [2, 5])], model.capabilities)
            inputs = replace(inputs, logits_indices=np.array([3], np.int32))
            _, states = told(model, inputs)
        np.testing.assert_allclose(states, expected[0][0].numpy(), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A model and its head, by precision."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints.make(TARGET, folder / "target")
    Head().make(folder / "head")
    made = {}
    for precision in ("int4", "fp32", "fp16"):
        options = ExportOptions(precision=precision, group_size=32)
        model = export_model(folder / "target", folder / f"model-{precision}", options)
        head = export_head(
            folder / "head", folder / "target", folder / f"head-{precision}", options
        )
        made[precision] = model, head
    return made


def rows_of(count: int) -> list[tuple[list[int], int, list[int]]]:
    ids = checkpoints.tokens(count=count).tolist()
    return [(ids[:11], 0, [3]), (ids[11:12], 0, [5]), (ids[12:], 0, [6, 9])]


@pytest.mark.parametrize(("way", "precision"), crossed(2, list(WAYS), ["int4", "fp16"]))
def test_nothing_else_changes(way: str, precision: str, pair: dict[str, tuple[Path, Path]]) -> None:
    path, _ = pair[precision]
    layers = (5, 0, 7)
    with opened(path, way) as plain, opened(path, way, hidden_layers=layers) as telling:
        inputs = step(rows_of(40), plain.capabilities)
        expected = plain.run(inputs).copy()
        logits, states = told(telling, inputs)
        np.testing.assert_array_equal(logits, expected)
        assert np.isfinite(states).all()
        np.testing.assert_array_equal(telling.run(inputs), expected)  # nobody wants to know
        assert plain.capabilities.features == 0
    with opened(path, "cpu decomposed", **FLOAT32, hidden_layers=layers) as reference:
        _, want = told(reference, inputs)
    with opened(path, way, **FLOAT32, hidden_layers=layers) as exact:
        _, found = told(exact, inputs)
    rough = 0.02 if exact.capabilities.compute_dtype == "float16" else 1e-4
    np.testing.assert_allclose(found, want, rtol=rough, atol=rough * np.abs(want).max())


def test_steps_tell_when_they_are_asked(pair: dict[str, tuple[Path, Path]]) -> None:
    """In any order, of any size; and what nobody asks for is not written."""
    ids = checkpoints.tokens(count=40).tolist()
    with opened(pair["int4"][0], "cpu", hidden_layers=(1, 6)) as model:
        steps = [(ids[:11], 0), (ids[11:12], 11), (ids[12:13], 12), (ids[13:30], 13)]
        inputs = [step([(new, past, [3, 4])], model.capabilities) for new, past in steps]
        model.run(inputs[0])
        wanted = [told(model, one) for one in inputs]
        for number in (1, 0, 2, 1, 3, 1, 2, 0):
            logits, states = told(model, inputs[number])
            np.testing.assert_array_equal(states, wanted[number][1])
            np.testing.assert_array_equal(logits, wanted[number][0])
            states[:] = 7  # which the model may still hold
            for other in ((number + 1) % 4, number):
                np.testing.assert_array_equal(model.run(inputs[other]), wanted[other][0])
            assert (states == 7).all()
        assert isinstance(model, OrtModel)
        assert model._states is not None
        asked = model._states._asked
        assert asked is not None
        for wants in (True, False):
            model.run(replace(inputs[1], hidden_states=states[:1] if wants else None))
            assert asked.tolist() == [wants]


def test_the_operator_says_what_it_cannot_do() -> None:
    library = find_library()
    if library is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    ones = np.ones((2, 3), np.float32)
    for asked, second, words in (
        (np.ones(2, np.int32), ones, "a vector of one number"),
        (np.ones(1, np.int32), np.ones((3, 3), np.float32), "as many tokens in all"),
        (np.ones(1, np.int32), np.ones(2, np.float32), r"\[tokens, numbers\]"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            _tell(library, asked, [ones, second])
    found = _tell(library, np.ones(1, np.int32), [ones, 3 * ones[:, :1], 2 * ones])
    np.testing.assert_array_equal(found, [[0.5, 0.5, 0.5, 1.5, 1, 1, 1]] * 2)


def test_the_operator_writes_nothing_where_it_is_not_asked() -> None:
    library = find_library()
    if library is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    session = _session(library, [(2, 3), (2, 1)])
    binding = session.io_binding()
    told, asked = np.full((2, 4), 7, np.float32), np.zeros(1, np.int32)
    states = [np.ones(shape, np.float32) for shape in ((2, 3), (2, 1))]
    for node, value in zip(session.get_inputs(), (asked, *states), strict=True):
        binding.bind_cpu_input(node.name, value)
    binding.bind_output("told", "cpu", 0, np.float32, told.shape, told.ctypes.data)
    for asks, wanted in ((0, 7), (1, 0.5), (0, 9)):
        told[:] = 9 if wanted == 9 else told
        asked[0] = asks
        session.run_with_iobinding(binding)
        assert (told == wanted).all()


def _tell(library: Path, asked: NDArray[np.int32], states: list[Floats]) -> NDArray[Any]:
    """Run the operator by itself, half of what it is given."""
    session = _session(library, [value.shape for value in states])
    feeds = zip((node.name for node in session.get_inputs()), (asked, *states), strict=True)
    told: NDArray[Any] = session.run(None, dict(feeds))[0]
    return told


def _session(library: Path, shapes: Sequence[tuple[int, ...]]) -> Any:
    info, names = onnx.helper.make_tensor_value_info, [f"states.{n}" for n in range(len(shapes))]
    node = onnx.helper.make_node(
        TELL_HIDDEN_STATES, ["asked", *names], ["told"], domain=DOMAIN, scale=0.5
    )
    kinds = [info("asked", onnx.TensorProto.INT32, [None])]
    kinds += [
        info(name, onnx.TensorProto.FLOAT, [None] * len(shape))
        for name, shape in zip(names, shapes, strict=True)
    ]
    graph = onnx.helper.make_graph([node], "g", kinds, [info("told", onnx.TensorProto.FLOAT, None)])
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@pytest.mark.parametrize("adapters", [0, 2])
def test_slots_for_adapters_change_nothing(
    adapters: int, pair: dict[str, tuple[Path, Path]]
) -> None:
    path, _ = pair["int4"]
    with opened(path, "cpu", hidden_layers=(1, 4), max_adapters=adapters) as model:
        inputs = step(rows_of(40), model.capabilities)
        _, states = told(model, inputs)
    with opened(path, "cpu", hidden_layers=(1, 4)) as model:
        np.testing.assert_array_equal(states, told(model, inputs)[1])


@pytest.mark.parametrize(("way", "precision"), crossed(3, list(WAYS), ["int4", "fp16", "fp32"]))
def test_a_head_computes_the_same_everywhere(
    way: str, precision: str, pair: dict[str, tuple[Path, Path]]
) -> None:
    check_head(pair[precision][1], way)


MTP = ("qwen3.5", "glm4-moe", "deepseek-v3")  # with a gate, with experts, of latents


@pytest.fixture(scope="module")
def mtp_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Layers of multi-token prediction, in int4."""
    found = {}
    for name in MTP:
        folder = tmp_path_factory.mktemp("mtp")
        make(Mtp(name), folder / "checkpoint")
        options = ExportOptions(precision="int4", group_size=32, mtp=True)
        found[name] = export_model(folder / "checkpoint", folder / "model", options) / MTP_FOLDER
    return found


@pytest.mark.parametrize(("way", "name"), crossed(3, list(WAYS), MTP))
def test_so_do_layers_of_multi_token_prediction(
    way: str, name: str, mtp_layers: dict[str, Path]
) -> None:
    check_head(mtp_layers[name], way)


def check_head(path: Path, way: str) -> None:
    """Its golden logits, and states, come out of steps one after the other."""
    golden = np.load(path / "golden.npz")
    ids = golden["token_ids"].tolist()
    with opened(path, way, **FLOAT32) as model:
        logits, last = [], []
        for first, end in ((0, 9), (9, 10), (10, len(ids))):
            rows = [(ids[first:end], first, [4, 2])]
            states = np.full((end - first, HIDDEN), np.nan, np.float32)
            inputs = replace(
                step(rows, model.capabilities),
                logits_indices=np.arange(end - first, dtype=np.int32),
                target_hidden_states=golden["target_hidden_states"][first:end].copy(),
                draft_hidden_states=golden["draft_hidden_states"][first:end].copy(),
                last_hidden_states=states,
            )
            logits.append(model.run(inputs).copy())
            last.append(states)
        rough = 0.03 if model.capabilities.compute_dtype == "float16" else 2e-3
    at = golden["logits_indices"]
    for found, want in ((logits, golden["logits"]), (last, golden["last_hidden_states"])):
        joined = np.concatenate(found)[at]
        np.testing.assert_allclose(joined, want, rtol=rough, atol=rough * np.abs(want).max())


@pytest.mark.parametrize("wants", [[10, 11, 39], [39]])  # of the second, the first part has none
def test_parts_of_a_step_tell_what_the_whole_does(
    wants: list[int], pair: dict[str, tuple[Path, Path]]
) -> None:
    model_path, head_path = pair["fp32"]
    dice = np.random.default_rng(3)
    with opened(model_path, "cpu decomposed", hidden_layers=(2, 6)) as model:
        inputs = step(rows_of(40), model.capabilities)
        inputs = replace(inputs, logits_indices=np.array(wants, np.int32))
        whole = told(model, inputs)
        _in_parts(model)
        parts = told(model, inputs)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    with opened(head_path, "cpu decomposed") as head:
        given = dice.standard_normal((40, 3 * HIDDEN), np.float32)
        given[11:] = 0
        own = dice.standard_normal((40, HIDDEN), np.float32)
        own[:11] = 0
        found = []
        for number in range(2):
            last = np.full((len(wants), HIDDEN), np.nan, np.float32)
            full = replace(
                inputs,
                target_hidden_states=given,
                draft_hidden_states=own,
                last_hidden_states=last,
            )
            found.append((head.run(full).copy(), last))
            if not number:
                _in_parts(head)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def _in_parts(model: Model) -> None:
    """Let a model compute each row by itself."""
    assert isinstance(model, OrtModel)
    assert isinstance(model._step_memory, StepMemory)
    model._step_memory = replace(model._step_memory, most_bytes=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden_layers": (1, 1)}, "distinct layers"),
        ({"hidden_layers": (-1,)}, "distinct layers"),
        ({"hidden_layers": (1.0,)}, "distinct layers"),
        ({"hidden_layers": (3, 8)}, "has 8 layers, numbered from 0"),
    ],
)
def test_layers_that_are_not_there_are_refused(
    options: dict[str, Any], words: str, pair: dict[str, tuple[Path, Path]]
) -> None:
    with pytest.raises(ProviderError, match=words), opened(pair["int4"][0], "cpu", **options):
        pass


def test_what_is_replayed_tells_nothing(pair: dict[str, tuple[Path, Path]]) -> None:
    for path, layers in ((pair["fp16"][0], (1,)), (pair["fp16"][1], ())):
        with (
            pytest.raises(ProviderError, match="not in steps that are replayed"),
            opened(path, "cuda", hidden_layers=layers, capture_graphs=True),
        ):
            pass


def test_openvino_refuses_both(pair: dict[str, tuple[Path, Path]]) -> None:
    pytest.importorskip("openvino")
    model, head = pair["int4"]
    for path, layers, words in ((model, (1,), "tell hidden states"), (head, (), "run draft heads")):
        with pytest.raises(ProviderError, match=words):
            get_provider("openvino").load(Artifact.read(path), LoadOptions(hidden_layers=layers))


def test_graphs_that_are_not_the_exporters_are_refused(pair: dict[str, tuple[Path, Path]]) -> None:
    graph = Artifact.read(pair["int4"][0]).load_graph("paged")
    spec = Artifact.read(pair["int4"][0]).manifest.model
    assert tell_hidden_states(graph, (), spec).model is graph
    assert tell_when_asked(graph).model == graph
    asking = tell_when_asked(tell_hidden_states(graph, (2, 3), spec).model)
    assert contract.TELLS_STATES in {one.name for one in asking.model.graph.input}
    assert tell_when_asked(asking.model).model == asking.model
    scaled = replace(spec, residual_scale=0.5)  # as one of an older exporter's
    with pytest.raises(ArtifactError, match="export it again"):
        tell_hidden_states(graph, (2, 3), scaled)
    for node in graph.graph.node:
        node.name = node.name.replace("layers.3.", "layer.3.")
    with pytest.raises(ArtifactError, match="layer 3 is not in the graph"):
        tell_hidden_states(graph, (2, 3), spec)
