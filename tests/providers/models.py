"""Loaded models, and the batches that tests run on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library
from onnxport.providers.features import Attention
from onnxport.providers.ort import quiet_options
from onnxport.providers.registry import open_model
from tests.conformance.models import step

Row = tuple[list[int], int, list[int]]  # new tokens, past length, block ids


@contextmanager
def opened(
    path: Path, attention: Attention | None, *, provider: str = "cpu", **options: object
) -> Iterator[Model]:
    """A model on two threads with a pool of 1024 tokens, unless told otherwise."""
    if attention == "custom" and find_library() is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    pool = {} if "kv_memory" in options else {"kv_cache_tokens": 1024}
    chosen = LoadOptions(**{"threads": 2, **pool, **options}, attention=attention)  # type: ignore[arg-type]
    model = open_model(path, provider, chosen)
    try:
        yield model
    finally:
        model.close()


def run_rows(model: Model, rows: list[Row]) -> NDArray[np.float32]:
    """Run one batch; returns each row's logits of its last token, float32 [len(rows), vocab]."""
    ends = np.cumsum([len(tokens) for tokens, _, _ in rows])
    last = (ends - 1).astype(np.int32)
    return model.run(step(rows, model.capabilities, logits_indices=last)).copy()


def use_kernel(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let what a module tries on a device run on our kernel, in the type that it takes."""
    library = find_library()
    if library is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")

    def options() -> Any:
        chosen = quiet_options()
        chosen.register_custom_ops_library(str(library))
        return chosen

    monkeypatch.setattr(module, "quiet_options", options)
    monkeypatch.setattr(module, "TYPES", {"float32": TensorProto.FLOAT})
