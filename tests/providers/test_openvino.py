"""What is particular to the openvino provider; tests/conformance has what it shares with others."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import ArtifactError, CapacityError, DeviceLostError, ProviderError
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.openvino import convert
from onnxport.providers.openvino.core import new_core
from onnxport.providers.openvino.cpu import FEW_TOKENS, CpuPlugin, builds
from onnxport.providers.openvino.model import Graph, OpenVinoModel
from onnxport.providers.openvino.provider import OpenVinoProvider, _accuracy_level
from onnxport.providers.pool import converted_bytes
from onnxport.providers.registry import get_provider, open_model
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from tests.exporter.checkpoints import VOCAB
from tests.providers import models
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import run_rows
from tests.tiers import every

ov = pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")

EXACT = {"kv_cache_dtype": "float32", "matmul_accuracy_level": 1}
DYNAMIC_QUANTIZATION = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
BLOCK_SIZE = 32
LENGTHS = (1, 5, 32, 33, 40, 17, 2)
NEW_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def opened(path: Path, **options: Any) -> AbstractContextManager[Model]:
    return models.opened(path, None, provider="openvino", **options)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, VOCAB, length).tolist() for length in LENGTHS]


def logits(model: Model) -> NDArray[np.float32]:
    """A ragged prefill and two decoding steps, float32 [3, 4, vocab]."""
    size = model.capabilities.block_size
    cases = [(5, prompts()[4]), (9, prompts()[0]), (12, prompts()[3]), (14, prompts()[5])]
    rows = []
    for first, tokens in cases:
        count = -(-(len(tokens) + 2) // size)
        # blocks in falling order, so that a mistake of order shows
        rows.append((tokens, [2 * first + at for at in reversed(range(count))]))
    steps = [run_rows(model, [(tokens, 0, blocks) for tokens, blocks in rows])]
    for at, token in enumerate((7, 90)):
        steps.append(run_rows(model, [([token], len(t) + at, blocks) for t, blocks in rows]))
    return np.stack(steps)


@pytest.mark.parametrize(
    "case",
    every(
        2,
        [
            *("qwen2-ragged", "llama-yarn", "qwen3-window", "phi3-longrope", "ernie", "gemma3"),
            *("gemma3-linear", "granite", "olmo2-biases", "olmo3", "smollm3-window"),
            *("granitemoe", "mixtral", "olmoe", "qwen3-moe", "hunyuan", "cohere2"),
        ],
    ),
)
def test_odd_shapes_are_exact_too(tiny_artifact: ArtifactMaker, case: str) -> None:
    path = tiny_artifact(case, "int4")
    with models.opened(path, "decomposed", matmul_accuracy_level=1) as cpu:
        expected = logits(cpu)
    with opened(path, **EXACT) as model:
        np.testing.assert_allclose(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_scores_that_are_capped_are_refused(tiny_artifact: ArtifactMaker) -> None:
    with (
        pytest.raises(ArtifactError, match=r"softcap.*use another provider"),
        opened(tiny_artifact("gemma2", "int4")),
    ):
        pass


@pytest.mark.parametrize("options", [EXACT, {}])
def test_evicted_blocks_come_back_from_host_memory(
    tiny_artifact: ArtifactMaker, options: dict[str, Any]
) -> None:
    here, there = ((prompts()[at] * 3)[: 3 * BLOCK_SIZE] for at in (4, 3))
    config = EngineConfig(8, 512, kv_host_memory=64 << 20, preemption="swap")
    with opened(tiny_artifact("qwen3", "int4"), **options, kv_cache_tokens=4 * BLOCK_SIZE) as model:
        engine = Engine(model, config=config)
        turns = []
        for name, prompt in (("cold", here), ("other", there), ("again", here)):
            engine.submit(engine.prepare(name, prompt, GREEDY))
            tokens: list[int] = []
            while engine.has_work:
                tokens.extend(token for delta in engine.step() for token in delta.token_ids)
            turns.append(tokens)
        assert engine.stats().num_blocks_loaded == 2
        assert [len(tokens) for tokens in turns] == [NEW_TOKENS] * 3
        if options:
            assert turns[2] == turns[0]


@pytest.mark.parametrize(("options", "leaves"), [(EXACT, False), ({}, True)])
def test_tokens_that_are_overwritten_leave_a_trace_where_keys_are_rounded_anew(
    tiny_artifact: ArtifactMaker, options: dict[str, Any], leaves: bool
) -> None:
    """As wrong guesses do. There are as many each time, for in steps of a size all is the same."""
    prompt = prompts()[4][:9]
    with opened(tiny_artifact("qwen3", "int4"), **options) as model:
        found = []
        for block, guesses in ((3, prompts()[2][:6]), (5, prompts()[3][:6])):
            run_rows(model, [(prompt, 0, [block])])
            run_rows(model, [([7, *guesses], len(prompt), [block])])
            found.append(run_rows(model, [([90], len(prompt) + 1, [block])]))
        assert model.capabilities.rounds_anew == leaves
        assert np.array_equal(*found) != leaves


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_are_copied_exactly_and_come_back(tiny_artifact: ArtifactMaker, dtype: str) -> None:
    prompt = (prompts()[4] * 2)[: 2 * BLOCK_SIZE]
    try:
        context = opened(tiny_artifact("llama", "fp32"), kv_cache_dtype=dtype)
        model = context.__enter__()
    except ProviderError as error:
        pytest.skip(f"this processor has no {dtype} cache: {error}")
    try:
        run_rows(model, [(prompt, 0, [3, 8])])
        content = model.read_blocks([3, 8])
        form = model.capabilities.kv_format
        assert form.dtype == ("float32" if dtype == "int8" else dtype)
        assert content.shape == (
            2,
            form.num_layers,
            2,
            form.num_kv_heads,
            BLOCK_SIZE,
            form.head_size,
        )
        model.copy_blocks([3, 8], [5, 1])
        assert (model.read_blocks([5, 1]) == content).all()
        model.write_blocks([6, 2], content)
        tolerance = 1e-5 if dtype == "int8" else 0.0
        again = model.read_blocks([6, 2])
        np.testing.assert_allclose(
            again.astype(np.float32), content.astype(np.float32), atol=tolerance
        )
        here, copied, rewritten = (
            run_rows(model, [([9], len(prompt), [*blocks, last])])
            for blocks, last in (([3, 8], 10), ([5, 1], 11), ([6, 2], 12))
        )
        assert (copied == here).all()
        np.testing.assert_allclose(rewritten, here, atol=1e-3)
    finally:
        context.__exit__(None, None, None)


def test_an_int8_cache_holds_what_the_exact_one_does(tiny_artifact: ArtifactMaker) -> None:
    path, prompt = tiny_artifact("qwen3", "fp32"), (prompts()[4] * 2)[: 2 * BLOCK_SIZE]
    with (
        opened(path, **EXACT) as exact,
        opened(path, kv_cache_dtype="int8", matmul_accuracy_level=1) as coarse,
    ):
        for model in (exact, coarse):
            run_rows(model, [(prompt, 0, [3, 8])])
        expected, found = exact.read_blocks([3, 8]), coarse.read_blocks([3, 8])
        spread = np.ptp(expected[:, 0])
        assert 0 < np.abs(found[:, 0] - expected[:, 0]).max() < spread / 255
        capabilities = coarse.capabilities
        assert capabilities.kv_cache_dtype == "int8"
        assert isinstance(coarse, OpenVinoModel)
        size = sum(t.get_byte_size() for pair in coarse._kept[0] for t in pair)
        assert size == capabilities.num_blocks * capabilities.kv_block_bytes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": "decomposed"}, ProviderError, "ask for native"),
        ({"kv_cache_dtype": "int4"}, ProviderError, "int8, float16, bfloat16, float32 or auto"),
        ({"block_size": 16}, ProviderError, "blocks of 32 tokens"),
        (
            {"kv_cache_dtype": "float32", "matmul_accuracy_level": 3},
            ProviderError,
            "is 3, which computes in bfloat16; .* stores int8, bfloat16: ask for one of them",
        ),
        ({"max_model_len": 129}, ProviderError, "context of 128"),
        ({"kv_cache_tokens": 31}, CapacityError, "is 31, .* smallest cache"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tiny_artifact: ArtifactMaker, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_model(tiny_artifact("llama", "fp32"), "openvino", LoadOptions(**options))


def test_what_was_loaded_is_reported(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "int4")) as model:
        capabilities = model.capabilities
    assert (capabilities.provider, capabilities.attention) == ("openvino", "native")
    assert capabilities.device
    assert capabilities.num_blocks * capabilities.block_size == 1024
    assert set(capabilities.placement) == {"CPU"}
    assert capabilities.placement["CPU"] > 20


def test_int4_weights_stay_int4(tiny_artifact: ArtifactMaker) -> None:
    artifact = Artifact.read(tiny_artifact("llama", "int4"))
    steps = list(convert.lower(artifact))
    attached = {name: value for step in steps for name, value in step.attached.items()}
    weights = convert.collect_weights(artifact, steps[-1].model, attached)
    converted = convert.convert(steps[-1].model, weights)
    compiled = new_core().compile_model(converted.model, "CPU")
    kinds = [
        str(node.get_rt_info()["runtimePrecision"].astype(str))
        for node in compiled.get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) == "FullyConnected"
    ]
    layers = artifact.manifest.model.num_layers
    assert kinds.count("u4") == 5 * layers, kinds  # qkv, o, gate, up, down


@pytest.mark.parametrize(
    ("options", "level", "natural", "expected"),
    [
        ({}, 4, "bf16", [(FEW_TOKENS, "f32", None), (None, None, None)]),
        ({}, 4, "f32", [(None, None, None)]),
        ({}, 0, "bf16", [(None, None, None)]),
        ({}, 1, "bf16", [(None, "f32", 0)]),
        ({}, 3, "f32", [(None, "bf16", 0)]),
        ({}, 2, "bf16", [(None, "f32", 0)]),
        ({"kv_cache_dtype": "bfloat16"}, 4, "bf16", [(None, "bf16", None)]),
        ({"kv_cache_dtype": "bfloat16"}, 4, "f32", [(None, "bf16", None)]),
        ({"kv_cache_dtype": "float32"}, 4, "bf16", [(None, "f32", None)]),
        (
            {"kv_cache_dtype": "int8"},
            4,
            "bf16",
            [(FEW_TOKENS, "f32", None), (None, None, None)],
        ),
    ],
)
def test_how_many_graphs_and_in_which_precision(
    options: dict[str, Any], level: int, natural: str, expected: list[tuple[int | None, ...]]
) -> None:
    found = builds(LoadOptions(threads=3, **options), level, natural)
    assert all(build.config["INFERENCE_NUM_THREADS"] == 3 for build in found)
    assert [
        (
            build.most_tokens,
            build.config.get("INFERENCE_PRECISION_HINT"),
            build.config.get(DYNAMIC_QUANTIZATION),
        )
        for build in found
    ] == expected


def test_a_cache_that_the_artifact_s_own_level_excludes_is_refused() -> None:
    options = LoadOptions(kv_cache_dtype="bfloat16")
    with pytest.raises(ProviderError, match="the accuracy level is 1, which computes in float32"):
        CpuPlugin().builds(new_core(), options, 1)
    assert CpuPlugin().builds(new_core(), options, 3)


@pytest.mark.parametrize(
    ("precision", "asked", "level"),
    [("int4", None, 4), ("int4", 0, 0), ("int4", 1, 1), ("fp16", None, 0), ("fp16", 4, 0),
     ("fp16", 1, 1), ("fp32", 3, 3)],
)  # fmt: skip
def test_the_artifact_says_how_precise_products_are(
    tiny_artifact: ArtifactMaker, precision: str, asked: int | None, level: int
) -> None:
    model = Artifact.read(tiny_artifact("llama", precision)).load_graph("paged")
    assert _accuracy_level(model, asked) == level


def test_a_batch_runs_on_the_first_graph_that_it_fits(tiny_artifact: ArtifactMaker) -> None:
    prompt = prompts()[4]
    with opened(tiny_artifact("llama", "int4")) as model:
        assert isinstance(model, OpenVinoModel)
        if len(model._requests) == 1:
            pytest.skip("on this processor OpenVINO computes in float32: one graph does for all")
        used: list[int] = []
        model._requests = [
            (graph, Counting(request, at, used))
            for at, (graph, request) in enumerate(model._requests)
        ]
        whole = run_rows(model, [(prompt, 0, [3, 8])])
        run_rows(model, [(prompt[:FEW_TOKENS], 0, [5, 6])])
        few = run_rows(model, [(prompt[FEW_TOKENS:], FEW_TOKENS, [5, 6])])
        assert used == [1, 0, 0]
        assert np.abs(few - whole).max() < 0.15 * np.abs(whole).max()  # one cache for both


class Counting:
    """A request that notes its own number when it runs."""

    def __init__(self, request: Any, number: int, used: list[int]) -> None:
        self.set_tensor = request.set_tensor
        self.infer = lambda: (used.append(number), request.infer())


def test_a_closed_model_says_so(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "fp32")) as model:
        content = model.read_blocks([0])
        model.close()
        for use in (
            lambda: run_rows(model, [([5], 0, [0])]),
            lambda: model.read_blocks([0]),
            lambda: model.write_blocks([0], content),
            lambda: model.copy_blocks([0], [1]),
        ):
            with pytest.raises(ProviderError, match="closed"):
                use()


def test_a_failing_run_is_our_error(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def set_tensor(self, name: str, tensor: object) -> None: ...

        def infer(self) -> None:
            raise RuntimeError("device lost")

    with opened(tiny_artifact("llama", "fp32")) as model:
        monkeypatch.setattr(model, "_requests", [(Graph(None, None), Failing())])
        with pytest.raises(DeviceLostError, match="a batch of 3 tokens with OpenVINO: device lost"):
            run_rows(model, [([5, 6, 7], 0, [0])])


def test_the_probe_names_devices_and_versions() -> None:
    probe = OpenVinoProvider().probe()
    assert probe.available
    assert probe.devices[0].name.startswith("CPU: ")
    assert probe.versions["openvino"].startswith(convert.RELEASE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("openvino:gpu.7", "finds no GPU.7 here; it finds CPU"),
        ("openvino:npu.1", "NPU.1 is not used: its plugin compiles static shapes"),
        ("openvino:abacus", "finds no ABACUS here; it finds CPU"),
    ],
)
def test_a_device_is_asked_for_by_name(
    tiny_artifact: ArtifactMaker, name: str, reason: str
) -> None:
    assert reason in get_provider(name).probe().reason
    with pytest.raises(ProviderError, match="is not available: "):
        open_model(tiny_artifact("llama", "fp32"), name)
    with pytest.raises(ProviderError, match=reason):
        get_provider(name).load(Artifact.read(tiny_artifact("llama", "fp32")), LoadOptions())
    assert get_provider("openvino:cpu").probe().available


def test_devices_that_are_not_used_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        available_devices = ("CPU", "GPU.0", "NPU")

        def get_property(self, device: str, name: str) -> object:
            sizes = {"GPU_DEVICE_TOTAL_MEM_SIZE": 16 << 30}
            if name == "SUPPORTED_PROPERTIES":
                return sizes if device == "GPU.0" else {}
            return sizes.get(name, f"a {device}")

    monkeypatch.setattr(ov, "Core", Core)
    probe = OpenVinoProvider().probe()
    assert [device.name for device in probe.devices] == [
        "CPU: a CPU",
        "GPU.0: a GPU.0",
        "NPU: a NPU",
    ]
    assert [device.memory_bytes for device in probe.devices][1:] == [16 << 30, None]
    assert len(probe.notes) == 2


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ov, "__version__", "2026.5.0-23000-abcdef")
    probe = OpenVinoProvider().probe()
    assert not probe.available
    assert "openvino 2026.5.0 is installed" in probe.reason
    assert "onnxport[openvino]" in probe.reason


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    probe = OpenVinoProvider().probe()
    assert not probe.available
    assert "onnxport[openvino]" in probe.reason


def test_a_graph_that_cannot_be_converted_is_our_error(tiny_artifact: ArtifactMaker) -> None:
    model = Artifact.read(tiny_artifact("llama", "fp32")).load_graph("paged")
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ProviderError, match="could not convert"):
        convert.convert(model, {})


def test_inputs_of_paged_attention_share_no_constants(tiny_artifact: ArtifactMaker) -> None:
    """The GPU plugin refuses shared ones in float16; the CPU's takes anything."""
    artifact = Artifact.read(tiny_artifact("llama", "fp32"))
    lowered = list(convert.lower(artifact))[-1].model
    converted = convert.convert(lowered, convert.collect_weights(artifact, lowered, {}))
    attentions = [
        node
        for node in converted.model.get_ops()
        if node.get_type_name() == "PagedAttentionExtension"
    ]
    assert len(attentions) == artifact.manifest.model.num_layers
    for node in attentions:
        sources = [value.get_node() for value in node.input_values()]
        constants = [source for source in sources if source.get_type_name() == "Constant"]
        assert len(constants) == 18
        assert all(len(source.output(0).get_target_inputs()) == 1 for source in constants)


def test_the_paged_attention_has_the_inputs_that_are_known() -> None:
    """28 of them; a release that adds one would shift what the others mean."""
    inputs = [ov.opset15.constant(np.zeros(1, np.float32)).output(0)] * 27
    with pytest.raises(RuntimeError, match="28"):
        ov.op._PagedAttentionExtension(inputs)


def test_free_memory_is_what_there_was_before_weights_were_converted(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxport.providers.openvino import provider

    free = [1 << 34]
    plain = provider.lower

    def lower(*arguments: Any, **options: Any) -> Any:
        free[0] = 1  # as if all had been taken for them
        return plain(*arguments, **options)

    monkeypatch.setattr(provider, "lower", lower)
    monkeypatch.setattr(provider.memory, "available_bytes", lambda: free[0])
    artifact = Artifact.read(tiny_artifact("llama", "fp16"))
    model = OpenVinoProvider().load(artifact, LoadOptions(kv_cache_tokens=64))
    assert model.capabilities.num_blocks * model.capabilities.block_size >= 64
    model.close()


def test_weights_that_do_not_fit_are_refused_before_they_are_compiled(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxport.providers.openvino import provider

    def compiled(*_: object) -> None:
        raise AssertionError("it was compiled")

    monkeypatch.setattr(provider, "_compile", compiled)
    monkeypatch.setattr(provider.memory, "available_bytes", lambda: 1000)
    with pytest.raises(CapacityError, match=r"weights do not fit: they take .* 1000 bytes"):
        OpenVinoProvider().load(Artifact.read(tiny_artifact("llama", "int4")), LoadOptions())


def test_16_bit_weights_that_do_not_fit_are_refused_before_they_are_converted(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxport.providers.openvino import provider

    def lower(*_: object, **__: object) -> None:
        raise AssertionError("they were converted")

    artifact = Artifact.read(tiny_artifact("llama", "fp16"))
    made = converted_bytes(artifact)
    assert made > artifact.manifest.files[WEIGHTS_FILE].size
    assert converted_bytes(Artifact.read(tiny_artifact("llama", "int4"))) == 0
    monkeypatch.setattr(provider, "lower", lower)
    monkeypatch.setattr(provider.memory, "available_bytes", lambda: made)
    with pytest.raises(CapacityError, match="weights do not fit"):
        OpenVinoProvider().load(artifact, LoadOptions())
