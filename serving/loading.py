"""From an artifact folder to an engine."""

from __future__ import annotations

from pathlib import Path

from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import AUTO, open_model
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.tokenizer import TOKENIZER_FILE, Tokenizer


def open_engine(
    path: Path,
    provider: str = AUTO,
    options: LoadOptions | None = None,
    config: EngineConfig | None = None,
    *,
    needs_tokenizer: bool = True,
) -> Engine:
    """Load the artifact in `path` with its tokenizer; closing the engine closes the model.

    Args:
        path: the artifact folder.
        provider: one of the providers, or "auto".
        options: what the provider may be told; None leaves it all to the provider.
        config: the engine's limits; None for the defaults.
        needs_tokenizer: refuse an artifact without a tokenizer; otherwise its engine takes token
            ids only.

    Raises:
        ArtifactError: `path` is not a valid artifact, or has no tokenizer and needs one.
        ProviderError: the provider cannot run it.
        CapacityError: it does not fit the memory.
    """
    eos_token_ids = frozenset(Artifact.read(path).manifest.eos_token_ids)
    tokenizer = None
    if needs_tokenizer or (path / TOKENIZER_FILE).is_file():
        tokenizer = Tokenizer.from_folder(path, eos_token_ids)
    model = open_model(path, provider, options or LoadOptions())
    try:
        return Engine(model, tokenizer, config, eos_token_ids)
    except BaseException:
        model.close()
        raise
