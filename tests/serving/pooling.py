"""Prompts that the null model embeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.engine import Engine
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import Embedder, PoolingParams
from tests.serving.helpers import null_engine, run

Floats = NDArray[np.float32]
LAST, MEAN = Embedder("last"), Embedder("mean")


def embed(
    engine: Engine,
    request_id: str,
    prompt: str | Sequence[int],
    params: PoolingParams | None = None,
    **options: Any,
) -> None:
    treated = RequestOptions(**options)
    engine.submit(engine.prepare_embedding(request_id, prompt, params, treated))


def states(prompt: Sequence[int], windows: tuple[int | None, ...] = (None,)) -> Floats:
    """What the null model makes of each token of a prompt, one token after the other."""
    found = []
    for end in range(1, len(prompt) + 1):
        found.append(vector(prompt[:end], Embedder("last", normalized=False), windows))
    return np.stack(found)


def vector(
    prompt: Sequence[int],
    embedder: Embedder = LAST,
    windows: tuple[int | None, ...] = (None,),
    params: PoolingParams | None = None,
    *,
    has_states: bool = False,
) -> Floats:
    """The vector of a prompt that is alone, computed at once; by a model with states if so."""
    engine = null_engine(
        num_blocks=512,
        max_num_batched_tokens=512,
        windows=windows,
        one_table=True,
        enable_prefix_caching=False,
        state_slots=2 if has_states else 0,
        embedder=embedder,
    )
    embed(engine, "alone", prompt, params)
    [delta] = run(engine)["alone"]
    assert delta.embedding is not None
    return delta.embedding
