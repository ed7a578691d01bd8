"""VaultGemma: Gemma 2 without norms on what layers add."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.exporter.families import gemma2
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.gemma import TENSORS
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """VaultGemma: what layers add goes to the stream as it is."""
    spec = gemma2.read_spec(config, context_length)
    return replace(spec, family="vaultgemma", output_norms=None, inner_norm_eps=None)


FAMILY: Final = Family(
    name="vaultgemma", architecture="VaultGemmaForCausalLM", spec=read_spec, tensors=TENSORS
)
