"""MiniCPM of the first, second and fourth generation: Llama with multipliers.

What these do to the residual stream is said in `granite`.
"""

from __future__ import annotations

from typing import Final

from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family
from onnxport.exporter.families.granite import checked_multiplier
from onnxport.exporter.families.minicpm3 import multiplied
from onnxport.graphs.spec import ArchSpec


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """MiniCPM: the head is the embedding unless told otherwise; no experts, no sparse attention."""
    config.ignore("mup_denominator")  # of draft heads alone
    spec = decoder_spec(config, family="minicpm", tied=True, context_length=context_length)
    embedding, depth, base = (
        checked_multiplier(config, key, config.require(key, float))
        for key in ("scale_emb", "scale_depth", "dim_model_base")
    )
    return multiplied(spec, embedding, depth, base)


FAMILY: Final = Family(name="minicpm", architecture="MiniCPMForCausalLM", spec=read_spec)
