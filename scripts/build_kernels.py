"""Build the CPU kernels into the source tree, for work on them without reinstalling.

    python scripts/build_kernels.py

Leaves `providers/cpu/onnxport_cpu.*` (ignored by git) beside its provider.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "kernels"


def main() -> None:
    """Configure, build and copy the library."""
    if shutil.which("cmake") is None:
        print("no cmake: the CPU kernels are not built; tests use the decomposed graph")
        return
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-DCMAKE_BUILD_TYPE=Release"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD), "--parallel"], check=True)
    for built in BUILD.glob("**/onnxport_cpu.*"):
        if built.suffix in {".so", ".dylib", ".dll"}:
            shutil.copy2(built, ROOT / "providers" / "cpu" / built.name)


if __name__ == "__main__":
    main()
