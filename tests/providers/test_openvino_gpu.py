"""`openvino:gpu` without a GPU: the CPU stands in for one, or Intel's driver without a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from onnxport.errors import CapacityError, DeviceMemoryError, OptionError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.openvino import convert
from onnxport.providers.openvino import provider as provider_module
from onnxport.providers.openvino.caches import read_format
from onnxport.providers.openvino.compiled import cache_format
from onnxport.providers.openvino.cpu import CpuPlugin
from onnxport.providers.openvino.gpu import GpuPlugin
from onnxport.providers.openvino.provider import NEVER_RUN
from onnxport.providers.openvino.self_test import distrust
from onnxport.providers.registry import get_provider, open_model
from tests.exporter.checkpoints import VOCAB
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened, run_rows

ov = pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")

GIB = 1 << 30
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
PROPERTIES: dict[str, Any] = {
    "FULL_DEVICE_NAME": "a made-up GPU",
    "OPTIMIZATION_CAPABILITIES": ["FP32", "BIN", "FP16", "INT8"],
    "GPU_DEVICE_TOTAL_MEM_SIZE": 16 * GIB,
    "GPU_DEVICE_MAX_ALLOC_MEM_SIZE": 4 * GIB,
    "GPU_MEMORY_STATISTICS": {"cl_mem": 1 * GIB, "usm_device": 2 * GIB},
    "DEVICE_TYPE": ov.properties.device.Type.DISCRETE,
    "INFERENCE_PRECISION_HINT": ov.Type.f16,
    "KV_CACHE_PRECISION": ov.Type.dynamic,
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32,
    "COMPILATION_NUM_THREADS": 2,
}
REAL_CORE = ov.Core


class MadeUpCore:
    """OpenVINO with GPUs whose work the CPU does, in host memory that stands for theirs."""

    available_devices: tuple[str, ...] = ("CPU", "GPU.0", "GPU.1", "NPU")
    properties: Mapping[str, Any] = PROPERTIES
    asked: ClassVar[list[tuple[str, Mapping[str, Any]]]]  # device, properties of compiled graphs
    contexts: ClassVar[list[str]]  # the devices whose memory was taken

    def __init__(self) -> None:
        self._core = REAL_CORE()

    def get_property(self, device: str, name: str) -> Any:
        if not device.startswith("GPU"):
            return self._core.get_property("CPU", name)
        return self.properties if name == "SUPPORTED_PROPERTIES" else self.properties[name]

    def compile_model(self, model: Any, device: str, config: Mapping[str, Any]) -> Any:
        if device == "CPU":
            return self._core.compile_model(model, device, config)
        self.asked.append((device, config))
        passed = {name: value for name, value in config.items() if "THREADS" not in name}
        return self._core.compile_model(model, "CPU", passed)

    def get_default_context(self, device: str) -> MadeUpCore:
        self.contexts.append(device)
        return self

    def create_tensor(self, kind: Any, shape: Any, properties: dict[str, Any]) -> Any:
        return ov.Tensor(kind, shape)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpCore]:
    """A machine with such GPUs. The CPU plugin, which does their work, transposes no keys."""

    class Core(MadeUpCore):
        asked: ClassVar[list[tuple[str, Mapping[str, Any]]]] = []
        contexts: ClassVar[list[str]] = []

    monkeypatch.setattr(ov, "Core", Core)
    monkeypatch.setattr(GpuPlugin, "transposed_keys", False)
    return Core


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("name", "used"), [("gpu", "GPU.0"), ("gpu.0", "GPU.0"), ("GPU.1", "GPU.1")]
)
def test_a_gpu_is_found_by_name(name: str, used: str) -> None:
    probe = get_provider(f"openvino:{name}").probe()
    assert (probe.available, probe.reason) == (True, "")
    assert (probe.devices[0].name, probe.devices[0].kind) == (f"{used}: a made-up GPU", "gpu")
    assert probe.devices[0].memory_bytes == 16 * GIB
    assert probe.features is not None
    assert probe.features.dtypes == probe.features.kv_cache_dtypes == ("float16", "float32")
    assert NEVER_RUN in probe.notes
    assert any(note.startswith("NPU is not used: ") for note in probe.notes)


def test_a_gpu_alone_is_its_own_first(made_up: type[MadeUpCore]) -> None:
    made_up.available_devices = ("CPU", "GPU")
    for name in ("openvino:gpu", "openvino:gpu.0"):
        assert get_provider(name).probe().devices[0].name == "GPU: a made-up GPU"
    probe = get_provider("openvino:gpu.1").probe()
    assert "finds no GPU.1 here; it finds CPU, GPU; " in probe.reason
    assert "intel-opencl-icd" in probe.reason


@pytest.mark.usefixtures("made_up")
def test_openvino_alone_is_the_cpu() -> None:
    probe = get_provider("openvino").probe()
    assert probe.devices[0].kind == "cpu"
    assert sum("is used by name, as openvino:gpu." in note for note in probe.notes) == 2


def test_tokens_are_those_of_the_cpu(
    made_up: type[MadeUpCore], tiny_artifact: ArtifactMaker
) -> None:
    """Everything but the device: self-test, compiling, caches of a context, binding, transfers."""
    path = tiny_artifact("qwen3", "int4")
    prompt = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()
    with opened(path, "decomposed", matmul_accuracy_level=1, block_size=32) as cpu:
        run_rows(cpu, [(prompt, 0, [3, 8])])
        expected = run_rows(cpu, [([9], len(prompt), [3, 8])])
        content = cpu.read_blocks([3])
    with opened(path, None, provider="openvino:gpu.1", matmul_accuracy_level=1) as gpu:
        capabilities = gpu.capabilities
        assert capabilities.device == "a made-up GPU"
        assert capabilities.compute_dtype == capabilities.kv_cache_dtype == "float32"
        run_rows(gpu, [(prompt, 0, [5, 1])])
        found = run_rows(gpu, [([9], len(prompt), [5, 1])])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gpu.read_blocks([5]), content, rtol=1e-4, atol=1e-4)
        gpu.copy_blocks([5, 1], [7, 12])
        again = run_rows(gpu, [([9], len(prompt), [7, 12])])
        assert (again == found).all()
    # twice for the self-test, without and with a window, and once for the model
    assert made_up.contexts == ["GPU.1"] * 3
    assert [device for device, _ in made_up.asked] == ["GPU.1"] * 3
    assert made_up.asked[-1][1] == {
        **FLOAT32,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        "COMPILATION_NUM_THREADS": 2,
    }


def test_a_device_that_computes_wrongly_is_refused(
    made_up: type[MadeUpCore], tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = convert._Conversions.paged_attention

    def wrong(self: convert._Conversions, node: Any) -> list[Any]:
        return [self._ops.multiply(right(self, node)[0], self._value(1.1, np.float32)).output(0)]

    monkeypatch.setattr(convert._Conversions, "paged_attention", wrong)
    path = tiny_artifact("llama", "fp32")
    with pytest.raises(ProviderError, match=r"GPU\.0 is not to be trusted: .* computes wrongly"):
        open_model(path, "openvino:gpu", LoadOptions(dtype="float32"))
    assert len(made_up.asked) == 1
    with opened(path, None, provider="openvino") as model:  # the CPU's is not tested on each load
        assert model.capabilities.num_blocks > 0


def test_the_self_test_passes_on_the_cpu_plugin() -> None:
    assert distrust(REAL_CORE(), CpuPlugin(), {"INFERENCE_PRECISION_HINT": "f32"}) == ""


def test_what_fails_on_the_device_is_said(
    made_up: type[MadeUpCore], tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("[GPU] Exceeded max size of memory object allocation: requested 9 bytes")

    path, options = tiny_artifact("llama", "fp32"), LoadOptions(dtype="float32")
    monkeypatch.setattr(GpuPlugin, "proven", True)
    monkeypatch.setattr(made_up, "create_tensor", full)
    with pytest.raises(DeviceMemoryError, match="a made-up GPU had no memory left while making a"):
        open_model(path, "openvino:gpu", options)
    monkeypatch.setattr(made_up, "compile_model", full)
    with pytest.raises(DeviceMemoryError, match=r"OpenVINO's GPU\.0 .* while compiling the graph"):
        open_model(path, "openvino:gpu", options)


@pytest.mark.usefixtures("made_up")
def test_a_cache_is_no_larger_than_the_devices_buffers(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuPlugin, "proven", True)
    path = tiny_artifact("llama", "fp32")
    # keys and values of 2 layers, of 4 GiB each; but 3 of the made-up GPU's 16 GiB are taken
    with pytest.raises(CapacityError, match=r"left, for 13,312\.0 MiB are free"):
        open_model(path, "openvino:gpu", LoadOptions(dtype="float32", kv_memory=14 * GIB))
    small = {**PROPERTIES, "GPU_DEVICE_MAX_ALLOC_MEM_SIZE": 1 << 20}
    monkeypatch.setattr(MadeUpCore, "properties", small)
    with pytest.raises(CapacityError, match=r"the device's buffers hold up to 1\.0 MiB"):
        open_model(path, "openvino:gpu", LoadOptions(dtype="float32", kv_memory=1 << 23))


@pytest.mark.parametrize(
    ("changes", "host_bytes", "free_bytes"),
    [
        ({}, 1 * GIB, 13 * GIB),
        ({"DEVICE_TYPE": ov.properties.device.Type.INTEGRATED}, 1 * GIB, 1 * GIB),
        ({"DEVICE_TYPE": ov.properties.device.Type.INTEGRATED}, 64 * GIB, 13 * GIB),
        ({"GPU_MEMORY_STATISTICS": {"cl_mem": 20 * GIB}}, 1 * GIB, 0),
    ],
)
def test_free_memory_is_what_this_process_did_not_take(
    made_up: type[MadeUpCore],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    host_bytes: int,
    free_bytes: int,
) -> None:
    monkeypatch.setattr("onnxport.providers.memory.available_bytes", lambda: host_bytes)
    made_up.properties = {**PROPERTIES, **changes}
    room = GpuPlugin("GPU.0").room(made_up(), 5, 1, 1 << 40)
    assert (room.free_bytes, room.weight_bytes, room.buffer_bytes) == (free_bytes, 5, 4 * GIB)


def test_a_device_that_tells_no_memory_is_taken_as_it_is(made_up: type[MadeUpCore]) -> None:
    made_up.properties = {"FULL_DEVICE_NAME": "terse"}
    room = GpuPlugin("GPU.0").room(made_up(), 5, 1, 1 << 40)
    assert (room.free_bytes, room.buffer_bytes) == (None, None)


@pytest.mark.parametrize(
    ("options", "level", "precision", "quantization"),
    [
        ({}, 4, "f16", None),
        ({}, 0, "f16", None),
        ({}, 1, "f32", 0),
        ({}, 2, "f16", 0),
        ({}, 3, "f16", 0),  # an artifact's own wish for bfloat16, which is not there
        ({"dtype": "float32"}, 4, "f32", None),
        ({"kv_cache_dtype": "float32"}, 4, "f32", None),
        ({"dtype": "float16", "kv_cache_dtype": "float16"}, 4, "f16", None),
    ],
)
def test_activations_and_cache_have_one_type(
    made_up: type[MadeUpCore],
    options: dict[str, Any],
    level: int,
    precision: str,
    quantization: int | None,
) -> None:
    plugin, chosen = GpuPlugin("GPU.0"), LoadOptions(**options)
    plugin.check(chosen)
    (build,) = plugin.builds(made_up(), chosen, level)
    expected: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    if quantization is not None:
        expected["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = quantization
    assert (build.most_tokens, build.config) == (None, expected)


def test_what_a_gpu_can(made_up: type[MadeUpCore]) -> None:
    able = GpuPlugin("GPU.0").features(made_up())
    assert able.dtypes == ("float16", "float32")
    assert [able.has_states, able.has_latents, able.tells_states] == [False] * 3


def test_a_gpu_without_float16_computes_in_float32(made_up: type[MadeUpCore]) -> None:
    made_up.properties = {**PROPERTIES, "OPTIMIZATION_CAPABILITIES": ["FP32"]}
    (build,) = GpuPlugin("GPU.0").builds(made_up(), LoadOptions(), 4)
    assert build.config == FLOAT32


def test_a_property_that_is_not_there_is_an_error(made_up: type[MadeUpCore]) -> None:
    made_up.properties = {**PROPERTIES}
    del made_up.properties["KV_CACHE_PRECISION"]
    with pytest.raises(ProviderError, match=r"does not take KV_CACHE_PRECISION for GPU\.0"):
        GpuPlugin("GPU.0").builds(made_up(), LoadOptions(), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "decomposed"}, "ask for native"),
        ({"dtype": "bfloat16"}, "computes in float16, float32 on a GPU"),
        ({"kv_cache_dtype": "int8"}, "used in float16, float32 only"),
        ({"matmul_accuracy_level": 3}, "ask for 1, 2 or 4"),
        (
            {"dtype": "float16", "matmul_accuracy_level": 1},
            "'float16' and matmul_accuracy_level is 1",
        ),
        ({"dtype": "float16", "kv_cache_dtype": "float32"}, "such as agree"),
        ({"kv_cache_dtype": "float16", "matmul_accuracy_level": 1}, "such as agree"),
        ({"capture_graphs": True}, "capture_graphs was given"),
        ({"allowed_on_host": ("Gather",)}, "allowed_on_host was given"),
    ],
)
@pytest.mark.usefixtures("made_up")
def test_options_that_do_not_fit_are_refused(
    tiny_artifact: ArtifactMaker, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProviderError, match=message) as caught:
        open_model(tiny_artifact("llama", "fp32"), "openvino:gpu", LoadOptions(**options))
    if {"dtype", "kv_cache_dtype"} & options.keys():  # what `verify` may pass over
        assert isinstance(caught.value, OptionError)


def test_other_blocks_than_the_plugins_are_refused(
    made_up: type[MadeUpCore], tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuPlugin, "proven", True)
    options = LoadOptions(dtype="float32", block_size=16)
    with pytest.raises(ProviderError, match=r"blocks of 32 tokens on a GPU\.0"):
        open_model(tiny_artifact("llama", "fp32"), "openvino:gpu", options)
    assert len(made_up.asked) == 1


def test_transposed_keys_are_understood() -> None:
    form = read_format((2, 64), "float16", (2, 64, 16), (2, 16, 64), transposed_keys=True)
    assert (form.block_size, form.key_shape, form.value_shape) == (16, (2, 64, 16), (2, 16, 64))
    assert (form.transposed_keys, form.layer_bytes) == (True, 2 * 2 * 2 * 16 * 64)
    for transposed, key in ((False, (2, 64, 16)), (True, (2, 16, 64)), (True, (2, 64, 20))):
        with pytest.raises(ProviderError, match="stores float16 KV blocks as keys"):
            read_format((2, 64), "float16", key, (2, 16, 64), transposed_keys=transposed)


def gpu_plugin() -> GpuPlugin:
    """A GPU that OpenVINO finds here; or the test is skipped."""
    if "GPU" not in REAL_CORE().available_devices:
        pytest.skip("OpenVINO finds no Intel GPU here; without one, run scripts/intel_driver.sh")
    return GpuPlugin("GPU")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("case", "precision"),
    [("llama", "fp32"), ("qwen3", "int4"), ("mistral-window", "int8"), ("qwen2-ragged", "fp16")],
)
def test_the_gpu_plugin_takes_our_graphs(
    tiny_artifact: ArtifactMaker, case: str, precision: str, dtype: str
) -> None:
    plugin, core = gpu_plugin(), REAL_CORE()
    artifact = Artifact.read(tiny_artifact(case, precision))
    lowered = list(convert.lower(artifact))
    attached = {name: value for step in lowered for name, value in step.attached.items()}
    model = lowered[-1].model
    converted = convert.convert(model, convert.collect_weights(artifact, model, attached))
    (build,) = plugin.builds(core, LoadOptions(dtype=dtype), 4)
    graph = provider_module._compile(core, plugin, converted.model, build)
    spec = artifact.manifest.model
    form = cache_format(graph.compiled, (spec.num_kv_heads, spec.head_size), transposed_keys=True)
    assert (form.dtype, form.block_size) == (dtype, 16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_gpus_memory_is_written_and_read(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(GpuPlugin, "proven", True)
    gpu_plugin()
    with opened(
        tiny_artifact("qwen3", "int4"), None, provider="openvino:gpu", dtype=dtype
    ) as model:
        form, size = model.capabilities.kv_format, model.capabilities.block_size
        shape = (3, form.num_layers, 2, form.num_kv_heads, size, form.head_size)
        content = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        model.write_blocks([5, 6, 1], content)
        found = model.read_blocks([1, 2, 5, 6])
        np.testing.assert_array_equal(found[[2, 3, 0]], content)
        assert not found[1].any()
        run_rows(model, [([5, 6, 7], 0, [3])])  # what comes of it is `verify`'s to judge


@pytest.mark.slow
def test_a_gpu_that_computes_nothing_is_refused(tiny_artifact: ArtifactMaker) -> None:
    """Only Intel's driver without a device is such a GPU."""
    plugin, core = gpu_plugin(), REAL_CORE()
    (build,) = plugin.builds(core, LoadOptions(), 4)
    if not distrust(core, plugin, build.config):
        pytest.skip("this GPU computes")
    with pytest.raises(ProviderError, match="GPU is not to be trusted"):
        open_model(tiny_artifact("llama", "fp32"), "openvino:gpu")
