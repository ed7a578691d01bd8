"""What LoRA adapters can be read from: PEFT's folders, and files that the exporter knows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxport.graphs.spec import ArchSpec
    from onnxport.serving.adapters.peft import AdapterContent


def read_adapter(path: Path, base: ArchSpec) -> AdapterContent:
    """Read an adapter: a folder as PEFT writes it, or a `.gguf` file of llama.cpp.

    Args:
        path: where it is.
        base: the model that it has to fit.

    Raises:
        AdapterError: it cannot be read, asks for what cannot be served, or does not fit the model.
    """
    from onnxport.errors import AdapterError
    from onnxport.serving.adapters import peft

    try:
        is_gguf = path.suffix.lower() == ".gguf" and not path.is_dir()
    except OSError as error:  # of a path that cannot be looked at
        raise AdapterError(f"{path} cannot be read: {error}") from error
    return read_gguf(path, base) if is_gguf else peft.read_adapter(path, base)


def read_gguf(path: Path, base: ArchSpec) -> AdapterContent:
    """Read an adapter from a GGUF file, as llama.cpp's converter writes it; see `read_adapter`."""
    from onnxport.exporter.gguf.adapter import read_adapter as read
    from onnxport.serving.adapters.peft import AdapterContent, fingerprint

    found = read(path, base)
    return AdapterContent(
        *(found.adapter, fingerprint(found.adapter), path, found.base_model),
        *(found.task_name, found.prompt_prefix, found.invocation),
    )
