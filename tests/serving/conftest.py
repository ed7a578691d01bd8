"""Small real artifacts for the tests that need a real model."""

from tests.providers.conftest import tiny_artifact, wide_artifact

__all__ = ["tiny_artifact", "wide_artifact"]
