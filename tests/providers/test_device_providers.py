"""Providers of devices that are not here: why they are missing, and what they would do."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from onnxport.errors import CapacityError, DeviceMemoryError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import element_types
from onnxport.providers import (
    cuda,
    device,
    device_blocks,
    device_lowering,
    directml,
    migraphx,
    placement,
    webgpu,
)
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.nvidia import gpus
from onnxport.providers.ort import CPU, Target
from onnxport.providers.registry import EMULATED, get_provider
from onnxport.providers.self_test import Tried
from tests.exporter.checkpoints import VOCAB
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened, run_rows

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
NAMES = {
    "cuda": cuda.EXECUTION_PROVIDER,
    "migraphx": migraphx.EXECUTION_PROVIDER,
    "directml": directml.EXECUTION_PROVIDER,
}


def emulated(path: Path, provider: str, **options: Any) -> Model:
    chosen = LoadOptions(**{"kv_cache_tokens": 1024, "threads": 1, **options})
    return get_provider(provider, emulate=True).load(Artifact.read(path), chosen)


def have(monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    """Let ONNX Runtime list an execution provider that it cannot start."""
    known = [*ort.get_available_providers(), NAMES[provider]]
    monkeypatch.setattr(ort, "get_available_providers", lambda: known)
    system = "Windows" if provider == "directml" else "Linux"
    for module in (migraphx, directml):
        monkeypatch.setattr(module.platform, "system", lambda: system)


class FakeNvml:
    """As much of pynvml as a probe asks for."""

    class NVMLError(Exception):
        def __init__(self, text: str, value: int = 999) -> None:
            super().__init__(text)
            self.value = value

    def __init__(
        self,
        *,
        broken: str = "",
        gpus: int = 1,
        capability: tuple[int, int] = (9, 0),
        lost: int | None = None,
    ):
        self.broken, self.gpus, self.capability, self.lost = broken, gpus, capability, lost
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken == "init":
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "590.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if self.broken == "memory" or handle == self.lost:
            raise self.NVMLError("GPU is lost")
        if self.broken == "shared":
            raise self.NVMLError("Not Supported", 3)
        return SimpleNamespace(total=80 << 30, free=(70 - handle) << 30)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:{handle + 0x3A:02X}:00.0".encode())

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return self.capability

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"A GPU" if handle == 0 else b"Another GPU"


@pytest.mark.parametrize("provider", ["cuda", "migraphx"])
def test_a_wheel_without_the_provider_is_told_with_the_extra_to_install(provider: str) -> None:
    if NAMES[provider] in ort.get_available_providers():
        pytest.skip("this onnxruntime has it")
    probe = get_provider(provider).probe()
    assert not probe.available
    assert f"pip install 'onnxport[{provider}]'" in probe.reason
    with pytest.raises(ProviderError, match="execution provider"):
        get_provider(provider).load(None, LoadOptions())  # type: ignore[arg-type]


def test_directml_is_for_windows() -> None:
    if sys.platform == "win32":
        pytest.skip("this is Windows")
    assert "Windows only" in get_provider("directml").probe().reason


@pytest.mark.parametrize("provider", NAMES)
def test_devices_are_named_by_number(provider: str) -> None:
    assert get_provider(f"{provider}:1").name == provider
    with pytest.raises(ProviderError, match=f"{provider}:gpu does not name"):
        get_provider(f"{provider}:gpu")


@pytest.mark.parametrize(
    ("nvml", "reason"),
    [
        (None, "nvidia-ml-py is missing"),
        (FakeNvml(broken="init"), "Driver Not Loaded.*nvidia-smi"),
        (FakeNvml(broken="memory"), "GPU is lost"),
        (FakeNvml(gpus=0), "finds no GPU"),
        (FakeNvml(), "CUDAExecutionProvider.*CUDA 13"),  # a driver, but not the libraries
    ],
)
def test_why_cuda_is_missing(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, reason: str
) -> None:
    have(monkeypatch, "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    probe = get_provider("cuda").probe()
    assert not probe.available
    assert re.search(reason, probe.reason), probe.reason
    assert nvml is None or nvml.open == 0


def test_what_the_driver_says_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus=2, capability=(7, 5)))
    monkeypatch.setattr(cuda, "why_not_started", lambda target: "")
    probe = get_provider("cuda:1").probe()
    assert probe.available
    assert probe.versions["driver"] == "590.1"
    assert [(d.name, d.memory_bytes, d.kind) for d in probe.devices] == [
        ("Another GPU", 80 << 30, "gpu"),  # the one that is used comes first
        ("A GPU", 80 << 30, "gpu"),
    ]
    assert probe.features is not None
    assert probe.features.dtypes == ("float16", "float32")  # bfloat16 came with 8.0
    assert probe.features.attention_dtypes == {"native": ("float16",)}
    assert probe.features.has_latents
    assert probe.features.tells_states
    assert "there are 2 GPUs" in get_provider("cuda:2").probe().reason


class FakeCuda:
    """As much of CUDA's runtime as is asked; it sees GPUs at these places of the bus."""

    def __init__(self, *places: int) -> None:
        self.places, self.device = places, -1

    def cudaGetDeviceCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.places)
        return 0 if self.places else 100

    def cudaDeviceGetPCIBusId(self, text: Any, size: Any, number: Any) -> int:  # noqa: N802
        assert size.value == len(text)
        text.value = f"0000:{self.places[number.value] + 0x3A:02X}:00.0".encode()
        return 0

    def cudaSetDevice(self, number: Any) -> int:  # noqa: N802
        self.device = number.value
        return 0

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value, total._obj.value = (20 + self.device) << 30, 90 << 30
        return 0


@pytest.mark.parametrize(
    ("places", "names"),
    [
        ((1,), ["Another GPU"]),  # CUDA_VISIBLE_DEVICES=1
        ((1, 0), ["Another GPU", "A GPU"]),  # the faster one first
        ((0, 1), ["A GPU", "Another GPU"]),
        ((7,), ["A GPU", "Another GPU"]),  # one that the driver does not list: as it lists them
        ((), ["A GPU", "Another GPU"]),  # CUDA does not say
    ],
)
def test_gpus_are_counted_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    places: tuple[int, ...],
    names: list[str],
) -> None:
    have(monkeypatch, "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus=2))
    monkeypatch.setattr(gpus, "runtime", lambda: FakeCuda(*places))
    monkeypatch.setattr(cuda, "why_not_started", lambda target: "")
    probe = get_provider("cuda").probe()
    assert [device.name for device in probe.devices] == names
    assert ("counted as the driver does" in caplog.text) == (places in ((), (7,)))


def test_a_gpu_that_does_not_answer_is_no_reason_against_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus=2, lost=0))
    monkeypatch.setattr(gpus, "runtime", lambda: FakeCuda(1))
    monkeypatch.setattr(cuda, "why_not_started", lambda target: "")
    probe = get_provider("cuda").probe()
    assert probe.available
    assert [device.name for device in probe.devices] == ["Another GPU"]


def test_a_gpu_without_memory_of_its_own_is_asked_by_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken="shared"))
    monkeypatch.setattr(gpus, "runtime", lambda: FakeCuda(0))
    monkeypatch.setattr(cuda, "why_not_started", lambda target: "")
    probe = get_provider("cuda").probe()
    assert (probe.available, probe.devices[0].memory_bytes) == (True, None)
    assert gpus.free_bytes(3) == 23 << 30
    monkeypatch.setattr(gpus, "runtime", lambda: None)
    assert gpus.free_bytes(3) is None


@pytest.mark.parametrize("provider", ["migraphx", "directml"])
def test_a_device_that_does_not_start_is_missing(
    monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    have(monkeypatch, provider)
    gpus = [
        migraphx._Gpu(device=migraphx.Device(name, 192 << 30, "gpu"), free_bytes=None, bus_id="")
        for name in ("MI250", "MI300X")
    ]
    monkeypatch.setattr(migraphx, "amd_gpus", lambda: gpus)
    probe = get_provider(f"{provider}:1").probe()
    assert not probe.available
    assert NAMES[provider] in probe.reason
    expected = ["MI300X", "MI250"] if provider == "migraphx" else ["Direct3D 12 adapter 1"]
    assert [device.name for device in probe.devices] == expected


class FakeHip:
    """As much of HIP's library as is asked; it sees GPUs at these places of the bus."""

    def __init__(self, *places: int) -> None:
        self.places = places

    def hipGetDeviceCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.places)
        return 0

    def hipDeviceGetPCIBusId(self, text: Any, size: Any, number: Any) -> int:  # noqa: N802
        assert size.value == len(text)
        text.value = f"0000:0{self.places[number.value]}:00.0".encode()
        return 0


@pytest.mark.parametrize(
    ("places", "names"),
    [
        ((1,), ["MI300X"]),  # HIP_VISIBLE_DEVICES=1
        ((1, 0), ["MI300X", "MI250"]),
        ((0, 1), ["MI250", "MI300X"]),
        ((7,), ["MI250", "MI300X"]),  # one that the kernel does not list: as it lists them
        (None, ["MI250", "MI300X"]),  # HIP is not loaded
    ],
)
def test_gpus_are_counted_as_hip_does(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    places: tuple[int, ...] | None,
    names: list[str],
) -> None:
    have(monkeypatch, "migraphx")
    gpus = [
        migraphx._Gpu(migraphx.Device(name, 192 << 30, "gpu"), None, f"00000000:0{place}:00.0")
        for place, name in enumerate(("MI250", "MI300X"))
    ]
    monkeypatch.setattr(migraphx, "amd_gpus", lambda: gpus)
    monkeypatch.setattr(migraphx, "_hip", lambda: None if places is None else FakeHip(*places))
    monkeypatch.setattr(migraphx, "why_not_started", lambda target: "")
    probe = get_provider("migraphx").probe()
    assert [device.name for device in probe.devices] == names
    assert ("counted as the driver does" in caplog.text) == (places in (None, (7,)))
    hidden = get_provider("migraphx:1").probe()
    assert hidden.available == (len(names) == 2)
    assert ("HIP shows 1 of 2 AMD GPUs" in hidden.reason) == (len(names) == 1)


def test_amd_gpus_are_those_that_the_kernel_lists(tmp_path: Path) -> None:
    def card(name: str, **files: str) -> None:
        folder = tmp_path / name / "device"
        if name == "card2":
            folder.parent.mkdir()
            folder.symlink_to(tmp_path / "pci" / "0000:C1:00.0")
        folder.resolve().mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text + "\n")

    card("card0", vendor="0x8086", device="0x1234")
    card("card1", vendor="0x1002", device="0x74a1", mem_info_vram_total="1000")
    card("card1-DP-1", vendor="0x1002")
    card(
        "card2",
        vendor="0x1002",
        product_name="MI300X",
        mem_info_vram_total="2000",
        mem_info_vram_used="500",
    )
    found = [
        (g.device.name, g.device.memory_bytes, g.free_bytes) for g in migraphx.amd_gpus(tmp_path)
    ]
    assert found == [("AMD GPU 0x74a1", 1000, None), ("MI300X", 2000, 1500)]
    assert [g.bus_id for g in migraphx.amd_gpus(tmp_path)] == ["", "00000000:c1:00.0"]


@pytest.mark.parametrize(("head_size", "expected"), [(32, 256), (64, 256), (128, 128), (256, 64)])
def test_cuda_blocks_are_what_flash_attention_wants(head_size: int, expected: int) -> None:
    assert cuda.block_size(head_size) == expected


@pytest.mark.parametrize("provider", EMULATED)
def test_what_an_emulated_provider_says_of_itself(
    tiny_artifact: ArtifactMaker, provider: str
) -> None:
    path = tiny_artifact("llama", "int4")
    model = emulated(path, provider)
    limits = model.capabilities
    native = provider in ("cuda", "webgpu")
    assert limits.emulated
    assert limits.provider == provider
    assert "emulated on the CPU" in limits.device
    assert limits.attention == ("native" if native else "decomposed")
    assert (limits.compute_dtype, limits.kv_cache_dtype) == ("float16", "float16")
    assert limits.block_size == (256 if provider == "cuda" else 16)
    assert set(limits.placement) == {"CPUExecutionProvider"}
    assert (limits.max_batch_tokens is not None) == (provider in ("migraphx", "directml"))
    model.close()
    with pytest.raises(ProviderError, match="closed"):
        run_rows(model, [([5], 0, [0])])


@pytest.mark.parametrize(
    ("provider", "options", "message"),
    [
        ("cuda", {"dtype": "int8"}, "computes in float16, float32"),
        ("migraphx", {"dtype": "bfloat16"}, "computes in float16, float32"),
        ("cuda", {"kv_cache_dtype": "int8"}, "the type of its activations, which is float16"),
        ("cuda", {"attention": "custom"}, "no 'custom' attention"),
        ("directml", {"attention": "native"}, "has no PagedAttention"),
        ("cuda", {"attention": "native", "dtype": "float32"}, "activations of float32"),
        ("cuda", {"block_size": 48}, "powers of two of at least 16"),
        ("cuda", {"capture_graphs": True, "dtype": "float32"}, "decomposed here: .*float32"),
        ("cuda", {"capture_graphs": True, "attention": "decomposed"}, "here: that was asked for"),
        ("webgpu", {"block_size": 8}, "powers of two of at least 16"),
    ],
)
def test_options_that_do_not_fit(
    tiny_artifact: ArtifactMaker, provider: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProviderError, match=message):
        emulated(tiny_artifact("llama", "int4"), provider, **options)


def test_the_type_of_the_artifact_is_kept_where_the_device_has_it(
    tiny_artifact: ArtifactMaker,
) -> None:
    for precision, expected in (("fp32", "float32"), ("fp16", "float16")):
        model = emulated(tiny_artifact("llama", precision), "cuda")
        assert model.capabilities.compute_dtype == expected
    wide = emulated(tiny_artifact("llama", "fp16"), "cuda", dtype="float32", block_size=5)
    assert (wide.capabilities.attention, wide.capabilities.block_size) == ("decomposed", 5)


@pytest.mark.parametrize("provider", EMULATED)
def test_emulated_products_round_to_int8_as_the_processor_s_do(
    tiny_artifact: ArtifactMaker, provider: str
) -> None:
    for precision, options, rounds in (
        ("int4", {}, True),
        ("int4", {"matmul_accuracy_level": 1}, False),
        ("fp16", {}, False),
    ):
        model = emulated(tiny_artifact("llama", precision), provider, **options)
        assert model.capabilities.int8_products == rounds, (precision, options)
        model.close()


def test_products_of_devices_round_to_int8_on_webgpu_alone(tiny_artifact: ArtifactMaker) -> None:
    """The CPU under the name of a device: the others read no accuracy level."""
    artifact = Artifact.read(tiny_artifact("llama", "int4"))
    recipes = {
        "webgpu": webgpu.WebGpuProvider(emulate=True)._recipe(),
        "cuda": cuda.CudaProvider()._recipe("a GPU", (9, 0)),
    }
    found = {}
    for name, recipe in recipes.items():
        for level in (None, 1, 4):
            options = LoadOptions(
                kv_cache_tokens=64, attention="decomposed", matmul_accuracy_level=level
            )
            model = device.load_on_device(artifact, options, recipe, CPU, emulate=False)
            found[name, level] = model.capabilities.int8_products
            model.close()
    assert {key for key, rounds in found.items() if rounds} == {("webgpu", None), ("webgpu", 4)}


def test_what_a_device_leaves_to_the_host_is_refused_unless_it_is_allowed(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU under the name of a device: every node of it is on the host."""
    artifact = Artifact.read(tiny_artifact("llama", "int4"))
    recipe = webgpu.WebGpuProvider(emulate=True)._recipe()
    target = Target("CPUExecutionProvider", "cpu")
    monkeypatch.setattr(Target, "is_host", property(lambda self: False))
    options = LoadOptions(kv_cache_tokens=64, attention="decomposed")
    with pytest.raises(ProviderError, match=r"ONNX Runtime left .* ScatterND.* to the CPU"):
        device.load_on_device(artifact, options, recipe, target, emulate=False)
    graph = artifact.load_graph("paged").graph
    every = {node.op_type for node in graph.node}
    allowed = LoadOptions(
        kv_cache_tokens=64,
        attention="decomposed",
        allowed_on_host=tuple(
            every
            | {"ScatterND", "Softmax", "MatMul", "Reshape", "Transpose", "Concat", "Gather", "Sub"}
            | {"Mul", "Add", "Where", "FusedMatMul", "Cast", "Split", "QuickGelu"}
            | {"Div", "Exp", "ReduceMax", "ReduceSum"}
        ),
    )
    model = device.load_on_device(artifact, allowed, recipe, target, emulate=False)
    assert model.capabilities.on_host["MatMulNBits"] > 4
    assert placement.CPU_EXECUTION_PROVIDER in model.capabilities.placement


def test_steps_of_which_the_host_runs_a_part_are_not_replayed(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is to be recorded does not start then, before anybody says what is left."""
    have(monkeypatch, "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(cuda, "why_not_started", lambda target: "")
    monkeypatch.setattr(device_lowering, "distrust", lambda *_: "")
    started: list[Target] = []
    start = device.start_session

    def refuse(model: bytes, folder: Path | None, options: Any, target: Target) -> Any:
        if folder is None:
            return start(model, folder, options, CPU)
        started.append(target)
        raise ProviderError("it does not start.")

    monkeypatch.setattr(device, "start_session", refuse)
    artifact = Artifact.read(tiny_artifact("llama", "fp16"))
    rotates = Artifact.read(tiny_artifact("hunyuan-biases", "fp16"))  # by positions of the host's
    options: dict[str, Any]
    for one, options, records in (
        (artifact, {}, True),
        (artifact, {"allowed_on_host": ("Gather",)}, False),
        (artifact, {"capture_graphs": False}, False),
        (rotates, {}, False),
        (rotates, {"capture_graphs": True}, True),
    ):
        with pytest.raises(ProviderError, match="does not start") as caught:
            get_provider("cuda").load(one, LoadOptions(kv_cache_tokens=512, **options))
        assert ("--no-capture-graphs" in str(caught.value)) == records
        assert ("enable_cuda_graph" in started.pop().options) == records
    with pytest.raises(ProviderError, match="leave one of them out"):
        get_provider("cuda").load(
            artifact, LoadOptions(capture_graphs=True, allowed_on_host=("Gather",))
        )


@pytest.mark.parametrize("provider", ["cuda", "directml"])
@pytest.mark.parametrize(("model_name", "count"), [("gemma3", 3), ("gpt-neox", 2)])
def test_where_there_is_no_gelu_it_is_written_out(
    tiny_artifact: ArtifactMaker,
    model_name: str,
    count: int,
    provider: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By tanh, and exact."""
    path = tiny_artifact(model_name, "fp32")
    prompt = [([5, 9, 17, 4, 99, 30, 7, 8, 2], 0, [0])]
    with opened(path, "decomposed") as cpu:
        expected = run_rows(cpu, prompt)
    caplog.set_level("INFO", logger=device.logger.name)
    model = emulated(path, provider, dtype="float32")
    try:
        np.testing.assert_allclose(run_rows(model, prompt), expected, atol=1e-4)
    finally:
        model.close()
    written = f"{count} GELUs written out" in caplog.text
    assert written == (provider == "directml")


@pytest.mark.parametrize("provider", EMULATED)
def test_a_cache_that_cannot_be_made_is_an_error_of_ours(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    """Else `auto` and fallbacks, which know those alone, would try no other provider."""

    def fail(*_: object) -> None:
        raise RuntimeError("Failed to allocate memory for requested buffer of size 5")

    monkeypatch.setattr(device_blocks, "device_caches", fail)
    artifact = Artifact.read(tiny_artifact("llama", "int4"))
    with pytest.raises(DeviceMemoryError, match="had no memory left while making a KV cache"):
        get_provider(provider, emulate=True).load(artifact, LoadOptions(kv_cache_tokens=512))


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("qwen3-moe", "int4"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                *(("ernie-moe", "int8"), ("mixtral", "fp16")),
                *(("glm4-moe", "fp16"), ("gpt-oss", "int4")),
            )
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_experts_on_webgpu_are_of_operators_that_it_has(
    tiny_artifact: ArtifactMaker,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    precision: str,
    dtype: str,
) -> None:
    """Its Split binds all its outputs at once, and it has neither Min nor Max of floats."""
    path = tiny_artifact(case, precision)
    prompt = [([5, 9, 17, 4, 99, 30, 7, 8, 2], 0, [0]), ([11, 3], 0, [1])]
    options = {"dtype": dtype, "attention": "decomposed", "matmul_accuracy_level": 1}
    started: list[onnx.ModelProto] = []
    start = device.start_session

    def note(model: bytes, *rest: Any) -> Any:
        started.append(onnx.ModelProto.FromString(model))
        return start(model, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(device, "start_session", note)
        model = emulated(path, "webgpu", **options)
    other = emulated(path, "cuda", **options)
    try:
        found, expected = (run_rows(one, prompt) for one in (model, other))
    finally:
        model.close()
        other.close()
    np.testing.assert_allclose(found, expected, atol=1e-4 if dtype == "float32" else 0.05)
    types = element_types(started[0])
    nodes = started[0].graph.node
    assert max(len(node.output) for node in nodes if node.op_type == "Split") <= 3
    assert not [n for n in nodes if n.op_type in ("Min", "Max") and types[n.output[0]] in FLOATS]


@pytest.mark.parametrize(
    ("case", "precision", "dtype", "what"),
    [
        ("llama", "fp16", "float32", "stored in another type, as float32,"),
        ("llama", "fp32", "float16", "stored in another type, as float16,"),
        ("qwen3-moe", "int8", "auto", "those of experts, side by side,"),
    ],
)
def test_what_is_made_of_weights_has_to_fit_on_the_host(
    tiny_artifact: ArtifactMaker,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    precision: str,
    dtype: str,
    what: str,
) -> None:
    """It is asked before anything is read, so that nobody is killed half way."""
    path = tiny_artifact(case, precision)
    monkeypatch.setattr("onnxport.providers.memory.total_bytes", lambda: 1000)
    read: list[str] = []
    right = Artifact.read_tensor

    def note(self: Artifact, tensor: onnx.TensorProto) -> Any:
        read.append(tensor.name)
        return right(self, tensor)

    monkeypatch.setattr(Artifact, "read_tensor", note)
    with pytest.raises(CapacityError, match=f"{what} take .* host's memory, which is 1000 bytes"):
        emulated(path, "webgpu", dtype=dtype)
    assert not read


def test_a_buffer_limit_makes_the_pool_smaller(tiny_artifact: ArtifactMaker) -> None:
    """Keys and values of a layer are a buffer each; WebGPU's are bounded."""
    limits = emulated(tiny_artifact("llama", "int4"), "webgpu", kv_cache_tokens=None).capabilities
    spec = limits.kv_format
    row = 2 * spec.num_kv_heads * spec.head_size  # bytes of a token in float16
    assert limits.num_blocks * limits.block_size * row <= webgpu.BUFFER_BYTES
    tokens = webgpu.BUFFER_BYTES // row + 16
    with pytest.raises(CapacityError, match=r"buffers hold up to 128\.0 MiB"):
        emulated(tiny_artifact("llama", "int4"), "webgpu", kv_cache_tokens=tokens)


def test_replayed_decode_steps_give_the_same_logits(tiny_artifact: ArtifactMaker) -> None:
    """Rows come and go, tables grow; on the CPU nothing is recorded, but all buffers stay."""
    path = tiny_artifact("qwen3", "int4")
    models = [emulated(path, "cuda", block_size=16, capture_graphs=each) for each in (False, True)]
    random = np.random.default_rng(1)
    prompts = [random.integers(3, VOCAB, length).tolist() for length in (15, 3, 31, 20, 1)]
    tables = [[10 * row + at for at in (5, 2, 7, 9)] for row in range(len(prompts))]
    batches = [[(tokens, 0, table) for tokens, table in zip(prompts, tables, strict=True)]]
    lengths = [len(tokens) for tokens in prompts]
    for step, rows in enumerate([(0, 1, 2, 3, 4), (0, 2, 4), (0, 2, 4), (1,), (3, 2, 1, 0), (4,)]):
        width = 1 + (max(lengths[row] for row in rows) + 1) // 16
        batch = [([7 + step], lengths[row], tables[row][:width]) for row in rows]
        batches.append(batch)
        for row in rows:
            lengths[row] += 1
    for batch in batches:
        plain, replayed = (run_rows(model, batch) for model in models)
        np.testing.assert_allclose(replayed, plain, rtol=1e-3, atol=1e-3)
    replay = models[1]._replay  # type: ignore[attr-defined]
    assert len(replay._recordings) == 3  # 8, 4 and 1 rows: a shape is recorded once


def test_memory_for_recorded_logits_is_set_aside(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxport.providers.memory.available_bytes", lambda: 50 << 20)
    path, found = tiny_artifact("llama", "fp16"), []
    for replays in (False, True):
        options = {"kv_cache_tokens": None, "kv_memory": 0.5, "capture_graphs": replays}
        limits = emulated(path, "cuda", block_size=16, **options).capabilities
        found.append(limits.num_blocks * limits.kv_block_bytes)
    logits = device.BUCKET_ROWS * limits.vocab_size * 4
    assert found[0] - found[1] == pytest.approx(logits / 2, abs=8192)


@pytest.mark.parametrize("provider", ["migraphx", "webgpu"])
def test_what_cannot_be_replayed_is_refused(tiny_artifact: ArtifactMaker, provider: str) -> None:
    with pytest.raises(ProviderError, match="nothing to replay"):
        emulated(tiny_artifact("llama", "int4"), provider, capture_graphs=True)
    with pytest.raises(ProviderError, match="it is for cuda"):
        get_provider("cpu").load(
            Artifact.read(tiny_artifact("llama", "int4")), LoadOptions(capture_graphs=True)
        )


def test_a_gpu_whose_attention_computes_wrongly_gets_the_decomposed_graph(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU under the name of CUDA, which has no PagedAttention: the self-test sees that."""
    have(monkeypatch, "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(cuda, "why_not_started", lambda target: "")
    monkeypatch.setattr(cuda.CudaProvider, "_target", lambda self, graphs=False: CPU)
    model = get_provider("cuda").load(
        Artifact.read(tiny_artifact("llama", "fp16")), LoadOptions(kv_cache_tokens=64)
    )
    assert model.capabilities.attention == "decomposed"
    assert model.capabilities.device == "A GPU"
    assert not model.capabilities.emulated
    with pytest.raises(ProviderError, match="native attention was asked for on A GPU: it has no"):
        get_provider("cuda").load(
            Artifact.read(tiny_artifact("llama", "fp16")), LoadOptions(attention="native")
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_tried_is_in_the_types_heads_and_blocks_of_the_load(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    have(monkeypatch, "cuda")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(cuda, "why_not_started", lambda target: "")
    monkeypatch.setattr(cuda.CudaProvider, "_target", lambda self: CPU)
    asked: list[tuple[str, int, int]] = []

    def tried(target: Target, kind: str, layers: tuple[Tried, ...]) -> str:
        asked.extend((kind, one.head_size, one.block_size) for one in layers)
        return "it computes wrongly"

    monkeypatch.setattr(device_lowering, "distrust", tried)
    artifact = Artifact.read(tiny_artifact("llama", "fp16"))
    head_size = artifact.manifest.model.head_size
    for options, size in (({}, 256), ({"block_size": 64}, 64)):
        with pytest.raises(ProviderError, match="was asked for on A GPU: it computes wrongly"):
            get_provider("cuda").load(
                artifact, LoadOptions(attention="native", dtype=dtype, **options)
            )
        assert asked.pop() == (dtype, head_size, size)
    assert not asked
    for options in ({"dtype": "float32"}, {"attention": "decomposed"}):
        get_provider("cuda").load(artifact, LoadOptions(kv_cache_tokens=64, **options)).close()
    assert not asked, "what is not used is not tried"


class FakePlugin(SimpleNamespace):
    """As much of onnxruntime_ep_webgpu as a probe asks for."""

    def __init__(self, *, broken: bool) -> None:
        def name() -> str:
            if broken:
                raise OSError("libdawn.so is missing")
            return webgpu.EXECUTION_PROVIDER

        super().__init__(get_ep_name=name, get_library_path=lambda: "/no/such/library.so")


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (None, "could not be loaded: import of onnxruntime_ep_webgpu halted"),
        (FakePlugin(broken=True), "could not be loaded: libdawn.so is missing"),
        (FakePlugin(broken=False), r"could not be loaded: .*/no/such/library\.so"),
    ],
)
def test_a_webgpu_plugin_that_is_broken_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, plugin: object, reason: str
) -> None:
    monkeypatch.setattr(webgpu, "version", lambda name: "0.4.0")
    monkeypatch.setitem(sys.modules, webgpu.PLUGIN, plugin)
    probe = get_provider("webgpu").probe()
    assert not probe.available
    assert re.search(reason, probe.reason)
    assert webgpu.INSTALL in probe.reason


def test_a_folder_that_a_webgpu_plugin_left_behind_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / webgpu.PLUGIN / "__pycache__").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    if webgpu._plugin_version():
        pytest.skip("the plugin is installed")
    probe = get_provider("webgpu").probe()
    assert not probe.available
    assert "the plugin that brings one is missing" in probe.reason
