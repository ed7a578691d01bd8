"""Compiles the kernel in add_lora.cu for a GPU, with NVIDIA's run-time compiler (NVRTC).

NVRTC comes with the packages that ONNX Runtime's own kernels need; nothing but the driver knows the
GPU before a model is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from onnxport.errors import ProviderError

logger = logging.getLogger(__name__)

FOLDER: Final = Path(__file__).parent
SOURCES: Final = ("add_lora.h", "floats.h", "add_lora.cu")  # one behind the other
# Of the CUDA that ONNX Runtime was built for; it is loaded with ONNX Runtime's own libraries.
COMPILER: Final = "nvrtc64_130_0.dll" if sys.platform == "win32" else "libnvrtc.so.13"
NUMBER_TYPES: Final = {"float32": 1, "float16": 10, "bfloat16": 16}  # as ONNX counts
OPTIONS: Final = ("--std=c++17", "--device-as-default-execution-space", "--fmad=true")


def compile_add_lora(capability: tuple[int, int], dtype: str) -> bytes:
    """Compile the kernel for one kind of GPU; returns what its driver loads (a cubin).

    Args:
        capability: the GPU's compute capability, such as (9, 0).
        dtype: of activations and adapters: float32, float16 or bfloat16.

    Raises:
        ProviderError: the compiler is missing, or refuses the source.
    """
    library = _compiler()
    source = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SOURCES)
    source = source.replace("#pragma once", "")
    options = (
        *OPTIONS,
        f"--gpu-architecture=sm_{capability[0]}{capability[1]}",
        f"--define-macro=NUMBER_TYPE={NUMBER_TYPES[dtype]}",
    )
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"add_lora.cu", 0, None, None
        ),
        "taking the source",
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), given)
        _check(library, status, f"compiling ({_log(library, program)})")
        return _text(library, "nvrtcGetCUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: Any, program: ctypes.c_void_p) -> str:
    text = _text(library, "nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
    return text.strip()[:2000] or "it says nothing"


def _text(library: Any, getter: str, program: ctypes.c_void_p) -> bytes:
    """What two functions of NVRTC say together: one the size, one the content."""
    size = ctypes.c_size_t()
    _check(library, library[f"{getter}Size"](program, ctypes.byref(size)), getter)
    content = ctypes.create_string_buffer(size.value)
    _check(library, library[getter](program, content), getter)
    return content.raw


def _check(library: Any, status: int, doing: str) -> None:
    if not status:
        return
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    words = library.nvrtcGetErrorString(status).decode()
    raise ProviderError(f"NVIDIA's run-time compiler failed: {doing}: {words}")


@cache
def _compiler() -> Any:
    """NVRTC.

    Raises:
        ProviderError: it is not installed.
    """
    for place in (COMPILER, *map(str, _installed())):
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            logger.debug("%s: %s", place, error)
    raise ProviderError(
        f"NVIDIA's run-time compiler, {COMPILER}, is missing: pip install 'onnxport[cuda]'"
    )


def _installed() -> Iterator[Path]:
    """NVRTC in NVIDIA's own packages."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(Path(folder).glob(f"**/{COMPILER}"))
