"""GPUs as a vendor's runtime counts them, which tells where on the PCI bus each one is."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

logger = logging.getLogger(__name__)

_BUS_ID_BYTES: Final = 32


class OnBus(Protocol):
    """Something with a place on the PCI bus."""

    @property
    def bus_id(self) -> str:
        """Its place, as the function `bus_id` spells it; "" where that is not known."""


Gpu = TypeVar("Gpu", bound=OnBus)


def as_counted(gpus: Sequence[Gpu], places: Sequence[str], runtime: str) -> list[Gpu]:
    """Return the GPUs that a runtime sees, in its order.

    Where it does not tell, or names others, they are as they were, and a warning says so.

    Args:
        gpus: as the driver lists them.
        places: where those of the runtime are, in its order; none where it does not tell.
        runtime: its name.
    """
    by_place = {gpu.bus_id: gpu for gpu in gpus if gpu.bus_id}
    if places and all(place in by_place for place in places):
        return [by_place[place] for place in places]
    if len(gpus) > 1:
        logger.warning(
            "%s does not tell which of %d GPUs are its own (it names %s, the driver %s): they are "
            "taken to be counted as the driver does",
            *(runtime, len(gpus), list(places) or "none", list(by_place)),
        )
    return list(gpus)


def places(library: Any, prefix: str) -> list[str]:
    """Where a runtime's devices are on the PCI bus, in its order; none where it does not say.

    Args:
        library: the runtime; None where there is none.
        prefix: of its functions: `cuda`, or `hip`, which has the same ones.
    """
    count = ctypes.c_int()
    if library is None or getattr(library, f"{prefix}GetDeviceCount")(ctypes.byref(count)):
        return []
    place = getattr(library, f"{prefix}DeviceGetPCIBusId")
    found = []
    for number in range(count.value):
        text = ctypes.create_string_buffer(_BUS_ID_BYTES)
        if place(text, ctypes.c_int(len(text)), ctypes.c_int(number)):
            return []
        found.append(bus_id(text.value.decode()))
    return found


def bus_id(text: str) -> str:
    """A PCI bus id with a domain of eight digits, as NVML has it; others have four."""
    domain, _, rest = text.strip("\0 ").lower().partition(":")
    return f"{int(domain, 16):08x}:{rest}"
