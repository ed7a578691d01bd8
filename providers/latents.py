"""What cannot be done with a model whose attention is of latents (`graphs.latent_spec`)."""

from __future__ import annotations

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions


def refuse_latents(artifact: Artifact, provider: str) -> None:
    """Raise ProviderError where a provider that has no such attention is to load such a model."""
    if artifact.manifest.model.latent is not None:
        raise ProviderError(
            f"{artifact.path.name} has multi-head latent attention, which the {provider} provider "
            "does not compute; cpu, cuda, webgpu, migraphx and directml do"
        )


def refuse_latent_adapters(artifact: Artifact, options: LoadOptions) -> None:
    """Raise ProviderError where slots for LoRA adapters are asked for beside such a model."""
    if options.max_adapters and artifact.manifest.model.latent is not None:
        raise ProviderError(
            f"max_adapters is {options.max_adapters}, and {artifact.path.name} has multi-head "
            "latent attention: its projections are none that adapters can be added to here, for "
            "kv_b_proj is no product of the graph. Load it without adapters, or merge the adapter "
            "into the checkpoint and export that"
        )
