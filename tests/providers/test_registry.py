"""Choosing a provider."""

from __future__ import annotations

import pytest

from onnxport.errors import ArtifactError, CapacityError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers import registry
from onnxport.providers.base import Device, DeviceKind, LoadOptions, Model, Probe
from tests.providers.conftest import ArtifactMaker


class FakeGpu:
    """A provider of a GPU whose model is an error that says so."""

    name = "fake"
    kind: DeviceKind = "gpu"

    def probe(self) -> Probe:
        return Probe(True, "", (Device("a GPU", None, self.kind),))

    def load(self, artifact: Artifact, options: LoadOptions) -> Model:
        raise KeyError("the fake GPU was chosen")


class FakeGpuInSoftware(FakeGpu):
    kind = "cpu"


@pytest.mark.parametrize("name", ["cpu:0", "tpu:1", "openvino:"])
def test_a_device_is_refused_where_there_is_no_choice(name: str) -> None:
    with pytest.raises(ProviderError, match=r"a device can be chosen for .*openvino.* only"):
        registry.get_provider(name)


def test_an_unknown_provider_lists_the_known_ones() -> None:
    with pytest.raises(ProviderError, match=r"available are .*cpu, openvino"):
        registry.get_provider("tpu")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", -3),
        ("max_model_len", 0),
        ("kv_cache_tokens", 0),
        ("block_size", -16),
        ("matmul_accuracy_level", 9),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ProviderError, match=f"^{name} is {value}; it must be"):
        LoadOptions(**{name: value})  # type: ignore[arg-type]


def test_every_name_of_the_design_is_probed() -> None:
    assert sorted(name for name, _ in registry.probe_all()) == [
        "cpu",
        "cuda",
        "directml",
        "migraphx",
        "openvino",
        "webgpu",
    ]
    assert all(probe.available or probe.reason for _, probe in registry.probe_all())


@pytest.mark.parametrize("first", [True, False])
def test_a_gpu_comes_before_the_cpu_and_one_in_software_after_it(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    def register(kind: type[FakeGpu]) -> None:
        fake = {"fake": f"{__name__}:{kind.__name__}"}
        cpu = {"cpu": registry.PROVIDERS["cpu"]}
        monkeypatch.setattr(registry, "PROVIDERS", {**fake, **cpu} if first else {**cpu, **fake})

    path, options = tiny_artifact("llama", "fp32"), LoadOptions(kv_cache_tokens=256)
    register(FakeGpuInSoftware)
    model = registry.open_model(path, options=options)
    assert model.capabilities.provider == "cpu"
    model.close()
    register(FakeGpu)
    with pytest.raises(KeyError, match="the fake GPU was chosen"):
        registry.open_model(path, options=options)


def test_auto_takes_the_cpu(tiny_artifact: ArtifactMaker) -> None:
    model = registry.open_model(
        tiny_artifact("llama", "fp32"), options=LoadOptions(kv_cache_tokens=256)
    )
    assert model.capabilities.provider == "cpu"
    model.close()


def test_auto_reports_why_nothing_could_run(tiny_artifact: ArtifactMaker) -> None:
    with pytest.raises(CapacityError, match="KV cache"):
        registry.open_model(
            tiny_artifact("llama", "fp32"), options=LoadOptions(kv_cache_tokens=10**12)
        )


def test_a_missing_library_is_an_error_that_names_the_extra(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxport.providers.cpu.provider import CpuProvider

    missing = Probe(False, "onnxruntime is missing: pip install 'onnxport[cpu]'")
    monkeypatch.setattr(CpuProvider, "probe", lambda self: missing)
    with pytest.raises(ProviderError, match=r"onnxport\[cpu\]"):
        registry.open_model(tiny_artifact("llama", "fp32"), "cpu")


def test_a_folder_that_is_no_artifact_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        registry.open_model(tmp_path)
