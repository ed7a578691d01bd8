"""The machine that a report is of."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import psutil

from onnxport.providers import memory
from onnxport.providers.cpu.provider import processor_name


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures depend on, besides the provider's own device."""

    system: str  # Linux, Darwin, Windows
    architecture: str  # x86_64, aarch64, …
    processor: str
    cores: int  # physical, that this process may use
    memory_bytes: int
    python: str  # version


def this_machine() -> Machine:
    """Look at the machine."""
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        processor=processor_name(),
        cores=memory.physical_cores(),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
    )
