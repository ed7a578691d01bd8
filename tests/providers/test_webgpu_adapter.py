"""Whether a WebGPU adapter is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxport.providers import webgpu
from onnxport.providers.ort import Target


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
    target = Target("WebGpuExecutionProvider")
    assert webgpu._device(target).kind == kind
    monkeypatch.setattr(webgpu, "_LINUX_GPUS", (str(tmp_path / "none"),))
    assert webgpu._device(target).kind == "cpu"
