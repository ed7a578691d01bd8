"""Small real artifacts for the tests that need a real model."""

from tests.providers.conftest import alternating_artifact, tiny_artifact, wide_artifact

__all__ = ["alternating_artifact", "tiny_artifact", "wide_artifact"]
