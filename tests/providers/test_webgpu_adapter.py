"""Whether a WebGPU adapter is a GPU, and which one of several."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from onnxport.errors import ProviderError
from onnxport.providers import webgpu
from onnxport.providers.ort import Target
from onnxport.providers.registry import get_provider


@pytest.mark.parametrize("variable", ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"])
@pytest.mark.parametrize(
    ("drivers", "kind"),
    [
        ("", "gpu"),
        ("/a/vk_swiftshader_icd.json", "cpu"),
        ("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json", "cpu"),
        ("/a/vk_swiftshader_icd.json:/a/lvp_icd.json", "cpu"),
        ("/a/vk_swiftshader_icd.json:/swiftshader/radeon_icd.json", "gpu"),
    ],
)
def test_a_driver_in_software_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, drivers: str, kind: str
) -> None:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, drivers)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(webgpu, "_LINUX_GPUS", (str(tmp_path),))
    assert webgpu._device(()).kind == kind
    monkeypatch.setattr(webgpu, "_LINUX_GPUS", (str(tmp_path / "none"),))
    assert webgpu._device(()).kind == "cpu"


def gpu(vendor: str, number: int) -> Any:
    """A GPU as ONNX Runtime lists it for the plugin."""
    hardware = SimpleNamespace(vendor=vendor, vendor_id=0x10DE, device_id=number)
    return SimpleNamespace(ep_name=webgpu.EXECUTION_PROVIDER, device=hardware)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Target]]:
    """A function that lets the plugin find GPUs; the targets of sessions are told to a list."""
    targets: list[Target] = []

    class Session:
        def run(self, names: Any, feeds: Any) -> Any:
            return [feeds["a"] @ feeds["b"]]

    def start(model: bytes, folder: Any, options: Any, target: Target) -> Session:
        targets.append(target)
        return Session()

    def find(*gpus: Any) -> list[Target]:
        monkeypatch.setattr(ort, "get_ep_devices", lambda: [CPU_DEVICE, *gpus])
        return targets

    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    names = SimpleNamespace(get_ep_name=lambda: webgpu.EXECUTION_PROVIDER)
    monkeypatch.setitem(sys.modules, webgpu.PLUGIN, names)
    monkeypatch.setattr(webgpu, "version", lambda name: "0.4.0")
    monkeypatch.setattr(webgpu, "start_session", start)
    monkeypatch.setattr(webgpu, "distrust", lambda target, dtype: "")
    monkeypatch.setattr(webgpu, "_LINUX_GPUS", (str(tmp_path),))
    return find


CPU_DEVICE = SimpleNamespace(ep_name="CPUExecutionProvider")


def test_one_gpu_is_told_by_its_name(plugin: Any) -> None:
    targets = plugin(gpu("NVIDIA", 0x2330))
    probe = get_provider("webgpu").probe()
    assert probe.devices[0].name == "WebGPU adapter (NVIDIA, device 0x2330)"
    assert probe.notes == ()
    assert {(one.ep_device.device.device_id, *one.options) for one in targets} == {(0x2330,)}
    plugin(gpu("", 0x2330))
    [device] = get_provider("webgpu").probe().devices
    assert device.name == "WebGPU adapter (vendor 0x10de, device 0x2330)"


@pytest.mark.parametrize("preference", ["", *webgpu.PREFERENCES])
def test_of_several_gpus_webgpu_takes_one_as_it_is_told(plugin: Any, preference: str) -> None:
    targets = plugin(gpu("Intel", 0x46A6), gpu("NVIDIA", 0x2330))
    probe = get_provider(f"webgpu:{preference}" if preference else "webgpu").probe()
    assert probe.devices[0].name == "WebGPU adapter (one of 2 GPUs)"
    [note] = probe.notes
    assert "2 GPUs are there (Intel, device 0x46a6; NVIDIA, device 0x2330)" in note
    assert f"prefers {preference}" in note if preference else "chooses by itself" in note
    options = {"powerPreference": preference} if preference else {}
    assert targets
    assert all(dict(one.options) == options for one in targets)


def test_what_is_no_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProviderError, match="give webgpu:high-performance or webgpu:low-power"):
        get_provider("webgpu:1")
    monkeypatch.setattr(webgpu, "_plugin_version", lambda: None)
    probe = get_provider("webgpu:low-power").probe()
    assert not probe.available
    assert "webgpu:low-power needs the plugin" in probe.reason
