"""Loaded models, and the batches that tests run on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.providers.base import Attention, LoadOptions, Model, StepInputs
from onnxport.providers.cpu.library import find_library
from onnxport.providers.registry import open_model

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
    new = [len(tokens) for tokens, _, _ in rows]
    total = [len(tokens) + past for tokens, past, _ in rows]
    width = max(len(blocks) for _, _, blocks in rows)
    inputs = StepInputs(
        input_ids=np.array([token for tokens, _, _ in rows for token in tokens], np.int64),
        block_table=np.array([b + [0] * (width - len(b)) for _, _, b in rows], np.int32),
        cumulative_sequence_lengths=np.cumsum([0, *new]).astype(np.int32),
        past_sequence_lengths=np.array([past for _, past, _ in rows], np.int32),
        attention_metadata=np.array([max(new), max(total), min(total)], np.int32),
        logits_indices=(np.cumsum(new) - 1).astype(np.int32),
    )
    return model.run(inputs).copy()
