"""What cannot be done with a model whose layers differ in their heads, or share keys and values."""

from __future__ import annotations

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions


def refuse_mixed_layers(artifact: Artifact, provider: str) -> None:
    """Raise ProviderError where a provider whose layers are all alike is to load such a model."""
    if artifact.manifest.model.has_mixed_layers:
        raise ProviderError(
            f"layers of {artifact.path.name} have other heads than others or read their keys and "
            f"values, which {provider} does not do; choose another provider, such as cpu"
        )


def refuse_mixed_adapters(artifact: Artifact, options: LoadOptions) -> None:
    """Raise ProviderError where slots for LoRA adapters are asked for beside such a model."""
    if options.max_adapters and artifact.manifest.model.has_mixed_layers:
        raise ProviderError(
            f"max_adapters is {options.max_adapters}, and layers of {artifact.path.name} differ in "
            "their projections, while slots have room for those of one kind. Load it without "
            "adapters, or merge the adapter into the checkpoint and export that"
        )
