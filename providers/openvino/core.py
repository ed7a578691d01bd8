"""OpenVINO's core, without what it does to the stack that signals are handled on.

Each CPU plugin gives the thread that loads it an alternate signal stack, frees that when it goes,
and puts back the one from before. Where the plugin that came first goes first, what the last one
puts back has been freed. Python handles signals there, so the next Ctrl-C writes into whatever has
that memory by then. Seen in OpenVINO 2026.4.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _SignalStack(ctypes.Structure):
    """Linux's stack_t."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("size", ctypes.c_size_t),
    )


def new_core() -> Any:
    """An openvino.Core with its plugins loaded; the thread keeps the signal stack that it has."""
    import openvino as ov

    with same_signal_stack():
        core = ov.Core()
        core.available_devices  # noqa: B018  asks every plugin, so that it is loaded
    return core


@contextmanager
def same_signal_stack() -> Iterator[None]:
    """Give the thread back its alternate signal stack, or that it has none, at the end."""
    before = _SignalStack()
    if sys.platform != "linux" or _signal_stack(None, ctypes.byref(before)):
        yield
        return
    try:
        yield
    finally:
        _signal_stack(ctypes.byref(before), None)


def _signal_stack(new: Any, old: Any) -> int:
    """See sigaltstack(2)."""
    status: int = ctypes.CDLL(None).sigaltstack(new, old)
    return status
