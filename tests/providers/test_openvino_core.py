"""What OpenVINO leaves behind in the thread that loads it."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from onnxport.providers.openvino import core

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signal stacks are Linux's here")


def signal_stack() -> tuple[int | None, int, int]:
    """Address, flags and size of this thread's."""
    found = core._SignalStack()
    assert core._signal_stack(None, ctypes.byref(found)) == 0
    return found.memory, found.flags, found.size


def test_nobody_is_told_of_an_import() -> None:
    """No process is forked, and who wants telemetry afterwards has it."""
    pytest.importorskip("openvino")
    script = (
        "import os, sys\n"
        "forks = []\n"
        "os.register_at_fork(before=lambda: forks.append(1))\n"
        "from onnxport.providers.registry import get_provider\n"
        "assert get_provider('openvino').probe().available\n"
        "assert 'openvino' in sys.modules\n"
        "assert 'openvino_telemetry' not in sys.modules\n"
        "import time\n"
        "time.sleep(0.5)\n"
        "assert not forks, forks\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
