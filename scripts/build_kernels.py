"""Build the native libraries into the source tree, for work on them without reinstalling.

    python scripts/build_kernels.py

Leaves `providers/cpu/onnxport_cpu.*`, `providers/nvidia/onnxport_cuda.*`,
`providers/openvino/onnxport_openvino.*` (where the package `openvino` is installed) and
`serving/native/onnxport_sampling.*` (ignored by git) beside the code that loads them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "kernels"
LIBRARIES = {
    "onnxport_cpu": "providers/cpu",
    "onnxport_cuda": "providers/nvidia",
    "onnxport_openvino": "providers/openvino",
    "onnxport_sampling": "serving/native",
}


def main() -> None:
    """Configure, build and copy the libraries."""
    if shutil.which("cmake") is None:
        print("no cmake: nothing is built; tests use the decomposed graph and sample in NumPy")
        return
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"]
    configure.append(f"-DPython3_EXECUTABLE={sys.executable}")
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD), "--parallel"], check=True)
    for name, folder in LIBRARIES.items():
        for built in BUILD.glob(f"**/{name}.*"):
            if built.suffix in {".so", ".dylib", ".dll"}:
                _replace(built, ROOT / folder / built.name)


def _replace(built: Path, place: Path) -> None:
    """Copy a library to its place in one step: a process may have the old one loaded."""
    copy = place.with_suffix(f"{place.suffix}.new")
    shutil.copy2(built, copy)
    copy.replace(place)


if __name__ == "__main__":
    main()
