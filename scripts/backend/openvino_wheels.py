"""Where OpenVINO's package can be had to build with.

The `openvino` provider has an operator of its own, which is built with that package's headers, and
left out without them (see CMakeLists.txt). Markers know nothing of a C library and its release, and
a requirement that cannot be met would end an installation for any other provider.
"""

from __future__ import annotations

import platform
import sys

OPENVINO = "openvino==2026.4.1"
LAST_PYTHON = (3, 14)  # that this release has wheels for
# The oldest glibc that its wheels for Linux run with, by processor.
GLIBC = {"x86_64": (2, 28), "aarch64": (2, 35)}
OTHERS = {("darwin", "arm64"), ("win32", "AMD64")}


def requirement() -> list[str]:
    """The requirement of OpenVINO's package; none where it has no wheel."""
    machine = platform.machine()
    if sys.version_info[:2] > LAST_PYTHON:
        return []
    if sys.platform != "linux":
        return [OPENVINO] if (sys.platform, machine) in OTHERS else []
    library, release = platform.libc_ver()
    if library != "glibc" or machine not in GLIBC:
        return []
    parts = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    return [OPENVINO] if tuple(parts) >= GLIBC[machine] else []
