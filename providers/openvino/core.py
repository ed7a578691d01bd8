"""OpenVINO's core, without what it does to the process, and to the stack for signals.

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


def import_openvino() -> Any:
    """The module openvino, which does not tell its makers that it was imported.

    To do so it would fork this process from a thread of its own, and wait for the child at exit. If
    another thread holds a lock at that moment, be it the loader's, both wait for ever. It has a
    stand-in for where its telemetry is not installed; that is used here.
    """
    name = "openvino_telemetry"
    is_new = "openvino" not in sys.modules and name not in sys.modules
    if is_new:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import openvino
    finally:
        if is_new:
            del sys.modules[name]
    return openvino


def new_core() -> Any:
    """An openvino.Core with its plugins loaded; the thread keeps the signal stack that it has."""
    ov = import_openvino()
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
