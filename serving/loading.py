"""From an artifact folder to an engine."""

from __future__ import annotations

from pathlib import Path

from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import AUTO, open_model
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.tokenizer import Tokenizer


def open_engine(
    path: Path,
    provider: str = AUTO,
    options: LoadOptions | None = None,
    config: EngineConfig | None = None,
) -> Engine:
    """Load the artifact in `path` with its tokenizer; closing the engine closes the model.

    Raises:
        ArtifactError: `path` is not a valid artifact.
        ProviderError: the provider cannot run it.
        CapacityError: it does not fit the memory.
    """
    eos_token_ids = frozenset(Artifact.read(path).manifest.eos_token_ids)
    tokenizer = Tokenizer.from_folder(path, eos_token_ids)
    model = open_model(path, provider, options or LoadOptions())
    try:
        return Engine(model, tokenizer, config)
    except BaseException:
        model.close()
        raise
