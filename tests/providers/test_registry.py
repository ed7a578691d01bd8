"""Choosing a provider."""

from __future__ import annotations

import pytest

from onnxport.errors import ArtifactError, CapacityError, ProviderError
from onnxport.providers import registry
from onnxport.providers.base import LoadOptions, Probe
from tests.providers.conftest import ArtifactMaker


@pytest.mark.parametrize("name", ["cuda", "directml"])
def test_a_planned_provider_is_refused_by_name(name: str) -> None:
    with pytest.raises(ProviderError, match=f"'{name}' is planned but not part of this version"):
        registry.get_provider(name)


@pytest.mark.parametrize("name", ["cpu:0", "cuda:1", "openvino:"])
def test_a_device_is_refused_where_there_is_no_choice(name: str) -> None:
    with pytest.raises(ProviderError, match="a device can be chosen for openvino only"):
        registry.get_provider(name)


def test_an_unknown_provider_lists_the_known_ones() -> None:
    with pytest.raises(ProviderError, match="available are cpu"):
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
    assert [name for name, _ in registry.probe_all()] == [
        "cpu",
        "openvino",
        "cuda",
        "webgpu",
        "migraphx",
        "directml",
    ]
    assert all(probe.available or probe.reason for _, probe in registry.probe_all())


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
