"""`verify` of a mixture whose tokens rounding gives to other experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu.library import find_library
from onnxport.serving.verify.verifier import Checks, Verifier
from tests.exporter import checkpoints


@pytest.mark.skipif(find_library() is None, reason="the C++ kernel was not built")
def test_experts_in_groups_with_8_bit_activations(tmp_path: Path) -> None:
    """Three of twenty tokens have another expert in one layer; in float32 all is exact."""
    checkpoints.make(checkpoints.CASES["deepseek-v3"], tmp_path / "checkpoint")
    options = ExportOptions(precision="int4", threads=1, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    checks = Checks(variants=False, speed=False, caches=False)
    found = Verifier(Artifact.read(path), LoadOptions(kv_cache_tokens=512), checks).verify("cpu")
    assert found.state == "passed", found.modes
    exact, served = (mode.tolerance for mode in found.modes)
    assert (exact.name, exact.nearest_diff) == ("float32 arithmetic", None)
    assert served.name == "8-bit activations, experts"
