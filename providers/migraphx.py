"""The `migraphx` provider: AMD GPUs, through MIGraphX, which compiles a graph for each shape.

It has no paged attention, so the graph is decomposed, with bounds that are shapes; a step is
padded to one of few sizes, each of which is compiled once.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import Device, LoadOptions, Probe
from onnxport.providers.bus import as_counted, bus_id, places
from onnxport.providers.device import load_on_device, no_native_blocks, why_not_started
from onnxport.providers.features import Features
from onnxport.providers.imports import unless_interrupted, unless_left_behind
from onnxport.providers.ort import Target
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.recipe import Recipe

EXECUTION_PROVIDER: Final = "MIGraphXExecutionProvider"
INSTALL: Final = "pip install 'onnxport[migraphx]'"
DTYPES: Final = ("float16", "float32")
DRM: Final = Path("/sys/class/drm")  # where Linux lists GPUs
AMD: Final = "0x1002"
# Its run-time library, of which ONNX Runtime loads one.
HIP: Final = ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")
EXPECTED_ON_HOST: Final = frozenset({"GatherBlockQuantized"})  # MIGraphX parses no such operator


@dataclass(frozen=True, slots=True)
class _Gpu:
    device: Device
    free_bytes: int | None
    bus_id: str  # where it is plugged in, as `bus.bus_id` spells it; "" where that is not known


class MIGraphXProvider:
    """Loads artifacts on one AMD GPU.

    Args:
        device: its number, as HIP counts.
        emulate: let the CPU stand in for it.
    """

    name = "migraphx"

    def __init__(self, device: str = "0", *, emulate: bool = False) -> None:
        if not device.isdecimal():
            raise ProviderError(
                f"migraphx:{device} does not name a GPU; give its number, as in migraphx:0 "
                "(`rocm-smi` lists them)"
            )
        self._device_id = int(device)
        self._emulate = emulate

    def probe(self) -> Probe:
        """See `providers.base.Provider.probe`."""
        if platform.system() != "Linux":
            return Probe(False, f"MIGraphX runs on Linux only, and this is {platform.system()}")
        try:
            import onnxruntime as ort

            unless_left_behind(ort)
        except ImportError as error:
            unless_interrupted(error)
            return Probe(False, f"onnxruntime is missing ({error}): {INSTALL}")
        versions = {"onnxruntime": ort.__version__}
        if EXECUTION_PROVIDER not in ort.get_available_providers():
            reason = f"onnxruntime {ort.__version__} has no MIGraphX execution provider: {INSTALL}"
            return Probe(False, reason, (), versions)
        gpus = amd_gpus()
        devices = tuple(gpu.device for gpu in gpus)
        if self._device_id >= len(gpus):
            count = f"{len(gpus)} AMD GPUs" if gpus else "no AMD GPU"
            reason = f"{DRM} lists {count}, and migraphx:{self._device_id} is to be used"
            return Probe(False, reason, devices, versions)
        failure = why_not_started(self._target())
        devices = tuple(gpu.device for gpu in as_hip_counts(gpus))
        if self._device_id >= len(devices):
            reason = (
                f"HIP shows {len(devices)} of {len(gpus)} AMD GPUs, and migraphx:{self._device_id} "
                "is to be used; HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES hide some from it"
            )
            return Probe(False, reason, devices, versions)
        used = devices[self._device_id]
        devices = (used, *(device for device in devices if device is not used))
        if reason := failure:
            advice = "ONNX Runtime needs ROCm with MIGraphX (apt install migraphx, from AMD)"
            return Probe(False, f"{reason}. {advice}", devices, versions)
        return Probe(True, "", devices, versions, (), Features.one_type(("decomposed",), DTYPES))

    def load(self, artifact: Artifact, options: LoadOptions) -> OrtModel:
        """See `providers.base.Provider.load`."""
        if not self._emulate and (reason := self.probe().reason):
            raise ProviderError(reason)
        device, free_bytes = "an AMD GPU, emulated on the CPU", None
        if not self._emulate:
            gpu = as_hip_counts(amd_gpus())[self._device_id]
            device, free_bytes = gpu.device.name, gpu.free_bytes
        recipe = Recipe(
            provider=self.name,
            device=device,
            dtypes=DTYPES,
            native=None,
            native_block_size=no_native_blocks,
            bucketed=True,
            shares_caches=False,
            expected_on_host=EXPECTED_ON_HOST,
            free_bytes=free_bytes,
        )
        return load_on_device(artifact, options, recipe, self._target(), emulate=self._emulate)

    def _target(self) -> Target:
        options = {"device_id": str(self._device_id)}
        return Target(EXECUTION_PROVIDER, "gpu", self._device_id, options)


def amd_gpus(root: Path = DRM) -> list[_Gpu]:
    """The AMD GPUs that the kernel lists, with what their driver says of their memory."""
    gpus = []
    cards = (path for path in root.glob("card[0-9]*") if "-" not in path.name)  # card0-HDMI-A-1
    for card in sorted(cards, key=lambda path: (len(path.name), path.name)):  # card9, card10
        folder = card / "device"
        if _read(folder / "vendor") != AMD:
            continue
        total, used = (_number(folder / f"mem_info_vram_{name}") for name in ("total", "used"))
        name = _read(folder / "product_name") or f"AMD GPU {_read(folder / 'device')}"
        free = None if total is None or used is None else total - used
        place = folder.resolve().name  # such as 0000:c1:00.0
        gpus.append(_Gpu(Device(name, total, "gpu"), free, bus_id(place) if ":" in place else ""))
    return gpus


def as_hip_counts(gpus: Sequence[_Gpu]) -> list[_Gpu]:
    """Return the GPUs that HIP sees, in its order; as they are where it cannot be asked.

    HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES hide some from it. ONNX Runtime has to have loaded
    its library.
    """
    return as_counted(gpus, places(_hip(), "hip"), "HIP")


def _hip() -> Any:
    """HIP's library, if this process has loaded one."""
    loaded = getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW
    for name in HIP:
        try:
            return ctypes.CDLL(name, mode=loaded)
        except OSError:
            continue
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdecimal() else None
