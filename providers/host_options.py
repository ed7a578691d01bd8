"""Options that mean something on devices apart from the host alone."""

from __future__ import annotations

from onnxport.errors import ProviderError
from onnxport.providers.base import LoadOptions


def refuse_device_options(provider: str, options: LoadOptions) -> None:
    """Refuse what could have no effect on a provider that runs on the host."""
    if options.allowed_on_host:
        raise ProviderError(
            f"allowed_on_host is {', '.join(options.allowed_on_host)}; the {provider} provider "
            "runs everything on the host, so there is nothing to allow: leave it out"
        )
    if options.capture_graphs:
        raise ProviderError(
            f"capture_graphs was asked for; the {provider} provider has nothing to replay, leave "
            "it out (it is for cuda)"
        )
