"""What ONNX Runtime says about this machine, and which of its wheels are installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Final

from onnxport.providers.imports import unless_interrupted

PACKAGE: Final = "onnxruntime"  # every wheel of it, for whatever device, installs this


@dataclass(frozen=True, slots=True)
class ExecutionDevice:
    """A device that an execution provider of ONNX Runtime can use."""

    execution_provider: str
    vendor: str  # of the execution provider
    metadata: Mapping[str, str]  # of the execution provider, such as its version
    hardware: str  # cpu, gpu, npu
    hardware_vendor: str
    vendor_id: int  # of the PCI bus, as device_id
    device_id: int
    hardware_metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class OnnxRuntime:
    """The ONNX Runtime that is installed."""

    version: str | None = None  # None: it cannot be imported
    wheels: Mapping[str, str] = field(default_factory=dict)  # distribution -> version
    execution_providers: tuple[str, ...] = ()
    devices: tuple[ExecutionDevice, ...] = ()
    problems: tuple[str, ...] = ()  # what is wrong, and what to do about it


def find_onnxruntime() -> OnnxRuntime:
    """Look at the installed ONNX Runtime; never raises for one that is missing or broken."""
    wheels = installed_wheels()
    problems = [] if len(wheels) < 2 else [_mixed(wheels)]
    try:
        import onnxruntime as ort

        version = str(ort.__version__)
    except (ImportError, AttributeError) as error:  # a folder without its library is a namespace
        unless_interrupted(error)
        if wheels:
            problems.append(
                f"{_listed(wheels)} is installed, but cannot be imported ({error}); install it anew"
            )
        return OnnxRuntime(None, wheels, problems=tuple(problems))
    devices: tuple[ExecutionDevice, ...] = ()
    if not hasattr(ort, "get_ep_devices"):
        problems.append(f"onnxruntime {version} is too old to list its devices")
    else:
        try:
            devices = tuple(_device(found) for found in ort.get_ep_devices())
        except Exception as error:  # ONNX Runtime's own classes derive from Exception alone
            problems.append(f"onnxruntime {version} could not list its devices: {error}")
    return OnnxRuntime(
        version, wheels, tuple(ort.get_available_providers()), devices, tuple(problems)
    )


def installed_wheels() -> dict[str, str]:
    """The distributions that own the package `onnxruntime`, with their versions."""
    names = metadata.packages_distributions().get(PACKAGE, [])
    return {name: metadata.version(name) for name in sorted(set(names))}


def _mixed(wheels: Mapping[str, str]) -> str:
    return (
        f"{_listed(wheels)} are installed; they overwrite each other's files, so that what is "
        f"imported is a mixture. Remove all of them (pip uninstall -y {' '.join(wheels)}), then "
        "install the one of your device, such as pip install 'onnxport[cuda]'"
    )


def _listed(wheels: Mapping[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in wheels.items())


def _device(found: Any) -> ExecutionDevice:
    """An onnxruntime.OrtEpDevice in plain types."""
    hardware = found.device
    return ExecutionDevice(
        execution_provider=found.ep_name,
        vendor=found.ep_vendor,
        metadata=dict(found.ep_metadata),
        hardware=hardware.type.name.lower(),
        hardware_vendor=hardware.vendor,
        vendor_id=hardware.vendor_id,
        device_id=hardware.device_id,
        hardware_metadata=dict(hardware.metadata),
    )
