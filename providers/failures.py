"""What went wrong on a device, as one of our errors.

Runtimes tell their failures in prose alone; what is known of it is collected here.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from onnxport.errors import DeviceLostError, DeviceMemoryError, OnnxportError, ProviderError

# A device that went away, or a context after which every later call fails as well: WebGPU's lost
# devices, Direct3D 12's removed, hung and reset ones (DXGI_ERROR_DEVICE_*), OpenCL's that are not
# available, and those of CUDA's and HIP's errors that their manuals call unrecoverable, by number
# and by name.
_LOST: Final = re.compile(
    r"device (was |is )?lost|lost (the )?device|device[ _]removed|device[ _]hung|device[ _]reset"
    r"|887a000[567]|vk_error_device_lost"
    r"|cuda (failure|error) (code )?:?(46|70[0-9]|71[0-9]|72[01]|999)\b"
    r"|(cuda|hip)error(illegaladdress|launchfailure|launchtimeout|hardwarestackerror"
    r"|illegalinstruction|misalignedaddress|invalidaddressspace|invalidpc|assert"
    r"|devicesunavailable|eccuncorrectable|contextisdestroyed|deinitialized)"
    r"|an illegal memory access was encountered|unspecified launch failure"
    r"|fell off the bus|cl_device_not_available",
    re.IGNORECASE,
)
_FULL: Final = re.compile(
    r"out of (device |host |gpu )?memory|failed to allocate memory|std::bad_alloc|bad allocation"
    r"|smaller than requested bytes|cuda (failure|error) (code )?:?2\b|(cuda|hip)erroroutofmemory"
    r"|alloc_failed|e_outofmemory|8007000e|vk_error_out_of_(host|device)_memory"
    r"|exceeds the max buffer size|cl_out_of_|cl_mem_object_allocation_failure"
    r"|exceeded max size of memory|not enough (device )?memory",
    re.IGNORECASE,
)


def device_error(error: BaseException, doing: str, device: str) -> ProviderError:
    """Return the error to raise for what a runtime raised.

    Args:
        error: the runtime's own.
        doing: what was being done, as in "running a batch of 8 tokens".
        device: its name.
    """
    text = str(error)
    if _LOST.search(text):
        return DeviceLostError(
            f"{device} was lost while {doing}: {text}. Its driver was reset or it is gone; nothing "
            "on it can be used until the model is loaded again"
        )
    if isinstance(error, MemoryError) or _FULL.search(text):
        return DeviceMemoryError(
            f"{device} had no memory left while {doing}: {text}. Lower --kv-memory, "
            "--max-num-batched-tokens or --max-num-seqs"
        )
    return ProviderError(f"{device} failed while {doing}: {text}")


@contextmanager
def reported(doing: str, device: str) -> Iterator[None]:
    """Raise what a runtime raises as one of our errors; see `device_error`."""
    try:
        yield
    except (OnnxportError, AssertionError):
        raise
    except Exception as error:  # ONNX Runtime's own classes derive from Exception alone
        raise device_error(error, doing, device) from error


def forget(error: BaseException | None) -> None:
    """Let go of what an error's functions held, such as a model that nearly was loaded."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
