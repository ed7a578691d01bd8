"""What benchmarks/limits.py compares with the limits of a processor. Nothing is timed."""

from __future__ import annotations

import sys

import pytest

from benchmarks import limits
from tests.providers.conftest import ArtifactMaker


def test_limits_are_of_quantized_weights(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of others it would tell that a step reads nothing."""
    quantized = tiny_artifact("llama", "int8")
    whole, coarse = (limits.read_bytes(quantized, coarse=one) for one in (False, True))
    assert whole > coarse > 0
    assert limits.token_operations(quantized) > 0
    monkeypatch.setattr(sys, "argv", ["limits", str(tiny_artifact("llama", "fp16"))])
    with pytest.raises(SystemExit, match=r"no quantized weights; .* --precision int4 or int8"):
        limits.main()
