"""The `webgpu` provider: any GPU with a Vulkan, Metal or Direct3D 12 driver, through WebGPU.

ONNX Runtime has it in two forms: as a plugin library for the plain `onnxruntime` wheel, which also
has a PagedAttention for 16-bit floats, and built into the wheel `onnxruntime-webgpu`, which is
older and runs the decomposed graph. The plugin is used where there is one.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.attention_ops import ROTARY_MULTIPLE
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.passes.native import NativeLimits
from onnxport.providers.base import Device, DeviceKind, LoadOptions, Probe
from onnxport.providers.device import load_on_device
from onnxport.providers.device_lowering import TYPES
from onnxport.providers.features import Features
from onnxport.providers.imports import unless_interrupted, unless_left_behind
from onnxport.providers.ort import Target, quiet_options, start_session
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.recipe import Recipe
from onnxport.providers.self_test import distrust

logger = logging.getLogger(__name__)

EXECUTION_PROVIDER: Final = "WebGpuExecutionProvider"
MEMORY: Final = "webgpu"
PLUGIN: Final = "onnxruntime_ep_webgpu"
INSTALL: Final = "pip install 'onnxport[webgpu]'"
PREFERENCES: Final = ("high-performance", "low-power")  # by which WebGPU takes one of several GPUs
BLOCK_SIZE: Final = 16
BUFFER_BYTES: Final = 128 << 20  # what every WebGPU device binds as one storage buffer
NATIVE: Final = NativeLimits(
    activation_dtypes=frozenset({"float16"}),
    cache_dtypes=frozenset({"float16"}),
    max_head_size=256,
    rotary_multiple=ROTARY_MULTIPLE,
    softcap=False,
    head_sink=False,
    qk_norm=False,
    slot_mapping=False,
    non_causal=False,
)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What was found."""

    target: Target
    device: Device
    versions: dict[str, str]
    has_float16: bool
    distrust: str  # why its PagedAttention is not used, "" if it is
    choice: str  # how one of several GPUs was taken, "" if there are not several


class WebGpuProvider:
    """Loads artifacts on the adapter that the WebGPU implementation chooses.

    Args:
        device: which of several GPUs it is to choose, one of PREFERENCES; "": as it does by itself.
            A process has one: while a model of the other preference is there, it is that model's.
        emulate: let the CPU stand in for it.

    Raises:
        ProviderError: there is no such preference.
    """

    name = "webgpu"

    def __init__(self, device: str = "", *, emulate: bool = False) -> None:
        if device and device not in PREFERENCES:
            raise ProviderError(
                f"webgpu:{device} does not name a preference, and WebGPU takes no numbers of GPUs; "
                f"give webgpu:{' or webgpu:'.join(PREFERENCES)}"
            )
        self._preference = device
        self._emulate = emulate

    def probe(self) -> Probe:
        """See `providers.base.Provider.probe`."""
        try:
            found = self._adapter
        except ProviderError as error:
            return Probe(False, str(error))
        recipe = self._recipe()
        notes = [f"attention is decomposed: {found.distrust}"] if found.distrust else []
        notes += [found.choice] if found.choice else []
        if found.device.kind == "cpu":
            notes.append("no GPU: a software device stands in, for tests rather than for speed")
        features = Features.one_type(
            ("native", "decomposed") if recipe.native else ("decomposed",),
            recipe.dtypes,
            NATIVE.activation_dtypes if recipe.native else None,
        )
        return Probe(True, "", (found.device,), found.versions, tuple(notes), features)

    def load(self, artifact: Artifact, options: LoadOptions) -> OrtModel:
        """See `providers.base.Provider.load`."""
        target = Target("", MEMORY) if self._emulate else self._adapter.target
        if not self._emulate and self._adapter.choice:
            logger.info("%s", self._adapter.choice)
        return load_on_device(artifact, options, self._recipe(), target, emulate=self._emulate)

    def _recipe(self) -> Recipe:
        if self._emulate:
            device, has_float16, reason = "a WebGPU device, emulated on the CPU", True, ""
        else:
            found = self._adapter
            device, has_float16, reason = found.device.name, found.has_float16, found.distrust
        return Recipe(
            provider=self.name,
            device=device,
            dtypes=("float16", "float32") if has_float16 else ("float32",),
            native=None if reason else NATIVE,
            why_not_native=reason,
            native_block_size=lambda head_size: BLOCK_SIZE,
            has_min_max=False,
            joins_products=True,
            int8_products=True,
            buffer_bytes=BUFFER_BYTES,
        )

    @cached_property
    def _adapter(self) -> _Adapter:
        """The device. Raises ProviderError where there is none."""
        try:
            import onnxruntime as ort

            unless_left_behind(ort)
        except ImportError as error:
            unless_interrupted(error)
            raise ProviderError(f"onnxruntime is missing ({error}): {INSTALL}") from error
        versions = {"onnxruntime": ort.__version__}
        # The plugin first: once it is registered, ONNX Runtime lists its name as if built in.
        gpus: list[Any] = []
        if plugin := _plugin_version():
            versions[PLUGIN] = plugin
            gpus = _plugin_devices(ort)
            wanted = {"powerPreference": self._preference} if self._preference else {}
            target = Target(EXECUTION_PROVIDER, MEMORY, options=wanted, ep_device=gpus[0])
        elif self._preference:
            raise ProviderError(
                f"webgpu:{self._preference} needs the plugin, which is told of preferences, and it "
                f"is missing: {INSTALL}"
            )
        elif EXECUTION_PROVIDER in ort.get_available_providers():
            target = Target(EXECUTION_PROVIDER, MEMORY)
        else:
            raise ProviderError(
                f"onnxruntime {ort.__version__} has no WebGPU execution provider, and the plugin "
                f"that brings one is missing: {INSTALL}"
            )
        _run_product(target, "float32")
        try:
            _run_product(target, "float16")
        except ProviderError as error:
            logger.info("WebGPU without 16-bit floats: %s", error)
            has_float16 = False
        else:
            has_float16 = True
        reason = "it has no 16-bit floats"
        if has_float16:
            reason = distrust(target, "float16")
        names = [_hardware(each) for each in gpus]
        choice = _choice(names, self._preference)
        return _Adapter(target, _device(names), versions, has_float16, reason, choice)


def _plugin_version() -> str | None:
    """The installed plugin's version; None without it, also where its folder was left behind."""
    try:
        return version(PLUGIN)
    except PackageNotFoundError:
        return None


def _plugin_devices(ort: Any) -> list[Any]:
    """Register the plugin's library, once a process, and return the GPUs that it may take.

    A session is started with one of them, whichever: the plugin asks WebGPU for an adapter without
    telling it of that (`webgpu/ep/factory.cc` of ONNX Runtime).
    """
    try:
        import onnxruntime_ep_webgpu as plugin

        found = _devices(ort, plugin)
        if not found:
            _register(ort, plugin)
            found = _devices(ort, plugin)
    except Exception as error:  # what it imports is the plugin's, and so is what it raises
        unless_interrupted(error)
        raise ProviderError(f"the WebGPU plugin could not be loaded: {error}; {INSTALL}") from error
    if not found:
        raise ProviderError(
            "the WebGPU plugin finds no GPU here. On Linux it needs one that the kernel lists in "
            "/sys/class/drm, and a Vulkan loader (Debian: apt install libvulkan1)"
        )
    return found


def _devices(ort: Any, plugin: Any) -> list[Any]:
    return [each for each in ort.get_ep_devices() if each.ep_name == plugin.get_ep_name()]


def _register(ort: Any, plugin: Any) -> None:
    try:
        ort.register_execution_provider_library(PLUGIN, plugin.get_library_path())
    except Exception as error:
        if "already registered" not in str(error):
            raise


def _hardware(ep_device: Any) -> str:
    """What ONNX Runtime tells of a GPU."""
    hardware = ep_device.device
    vendor = hardware.vendor or f"vendor {hardware.vendor_id:#06x}"
    return f"{vendor}, device {hardware.device_id:#06x}"


def _choice(names: Sequence[str], preference: str) -> str:
    """Say how one of several GPUs is taken; "" where there are not several."""
    if len(names) < 2:
        return ""
    how = f"prefers {preference}" if preference else "chooses by itself"
    return (
        f"{len(names)} GPUs are there ({'; '.join(names)}), and WebGPU {how}, and does not say "
        f"which it took. webgpu:{' and webgpu:'.join(PREFERENCES)} tell it what to prefer; on "
        "Linux VK_DRIVER_FILES hides the GPUs of other drivers"
    )


def _device(names: Sequence[str]) -> Device:
    """What is known of the adapter; WebGPU tells neither its memory nor, here, its name.

    Args:
        names: of the GPUs of which it is one, as the plugin lists them; empty without the plugin.
    """
    kind: DeviceKind = "gpu"
    has_one = any(map(Path.exists, map(Path, _LINUX_GPUS)))
    if sys.platform == "linux" and (not has_one or _is_in_software()):
        kind = "cpu"
    if kind == "cpu":
        return Device("WebGPU software adapter", None, kind)
    name = "WebGPU adapter"
    if names:
        name += f" ({names[0] if len(names) == 1 else f'one of {len(names)} GPUs'})"
    return Device(name, None, kind)


_LINUX_GPUS: Final = ("/dev/dri", "/dev/dxg", "/dev/nvidia0")
_SOFTWARE: Final = ("swiftshader", "lvp_")  # what files of Vulkan drivers without a GPU are called


def _is_in_software() -> bool:
    """Whether the Vulkan loader was told of drivers that compute without a GPU, and of no other."""
    given = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES") or ""
    names = [Path(each).name for each in given.split(os.pathsep) if each]
    return bool(names) and all(any(one in name for one in _SOFTWARE) for name in names)


def _run_product(target: Target, dtype: str) -> None:
    """Multiply two small matrices, which shows whether the device starts and has a type."""
    kind = TYPES[dtype]
    g = GraphBuilder("product")
    a, b = g.input("a", kind, [4, 4]), g.input("b", kind, [4, 4])
    g.output("c", kind, [4, 4])
    g.node("MatMul", [a, b], outputs=["c"])
    assert kind in (TensorProto.FLOAT, TensorProto.FLOAT16)
    ones = np.ones((4, 4), np.float32 if dtype == "float32" else np.float16)
    session = start_session(g.build().SerializeToString(), None, quiet_options(), target)
    try:
        (found,) = session.run(["c"], {"a": ones, "b": ones})
    except Exception as error:
        raise ProviderError(f"the WebGPU device has no {dtype} products: {error}") from error
    if not (found == 4).all():
        raise ProviderError(f"the WebGPU device multiplies {dtype} matrices wrongly")
