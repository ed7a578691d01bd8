"""What OpenVINO leaves behind in the thread that loads it."""

from __future__ import annotations

import ctypes
import sys

import pytest

from onnxport.providers.openvino import core

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signal stacks are Linux's here")


def signal_stack() -> tuple[int | None, int, int]:
    """Address, flags and size of this thread's."""
    found = core._SignalStack()
    assert core._signal_stack(None, ctypes.byref(found)) == 0
    return found.memory, found.flags, found.size


def test_signals_are_handled_where_they_were() -> None:
    """Whichever of several cores goes first."""
    pytest.importorskip("openvino")
    before = signal_stack()
    cores = [core.new_core() for _ in range(3)]
    assert signal_stack() == before
    while cores:
        del cores[0]
        assert signal_stack() == before


def test_a_signal_stack_comes_back() -> None:
    before = signal_stack()
    memory = ctypes.create_string_buffer(1 << 16)
    other = core._SignalStack(ctypes.addressof(memory), 0, len(memory))
    with core.same_signal_stack():
        assert core._signal_stack(ctypes.byref(other), None) == 0
        assert signal_stack()[0] == ctypes.addressof(memory)
    assert signal_stack() == before
