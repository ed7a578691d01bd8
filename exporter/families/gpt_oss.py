"""gpt-oss: experts with biases and bounded activations, and attention that may look at nothing.

Published checkpoints have experts in MXFP4; fine-tuned ones may have them in 16 bits, transposed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from onnxport.errors import UnsupportedModelError
from onnxport.exporter import mxfp4
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.expertsconfig import experts_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.exporter.windows import windows_by_type
from onnxport.graphs.spec import ArchSpec

_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"
_YARN: Final = {  # where the configuration has no RoPE parameters but, perhaps, the base
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """gpt-oss: every other layer, from the first, has a window unless told otherwise."""
    _check_quantization(config)
    num_layers = config.require("num_hidden_layers", int)
    window = config.get("sliding_window", int, None if config.is_null("sliding_window") else 128)
    types = [_FULL if layer % 2 else _SLIDING for layer in range(num_layers)]
    biased = config.get("attention_bias", bool, True)
    spec = decoder_spec(
        config,
        family="gpt_oss",
        head_size=None if config.is_null("head_dim") else 64,
        num_kv_heads=8,
        qkv_bias=biased,
        o_bias=biased,
        sliding_window=windows_by_type(config, window, types),
        context_length=context_length,
        rope=_rope(config),
    )
    experts = experts_spec(
        config,
        count=128,
        per_token=4,
        per_token_keys=("num_experts_per_tok", "experts_per_token"),
        size=spec.intermediate_size,
        normalized=True,
        biased=True,
        alpha=config.get("swiglu_alpha", float, 1.702),
        up_offset=1.0,
        limit=config.get("swiglu_limit", float, 7.0),
    )
    config.ignore("initial_context_length")  # transformers does not read it, either
    return replace(spec, experts=experts, attention_sinks=True)


def _rope(config: Config) -> dict[str, Any]:
    """The RoPE parameters: YaRN as in the published models unless told otherwise."""
    told = config.has("rope_parameters") or config.has("rope_scaling")
    return {"rope_theta": 150_000.0, **({} if told else _YARN), **rope_parameters(config)}


def _check_quantization(config: Config) -> None:
    """MXFP4 is read as it is stored; anything else is refused."""
    quantization = config.get("quantization_config", dict, {})
    method = quantization.get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise UnsupportedModelError(
            f"{config.path}: the weights are quantized with {method!r}; supported is 'mxfp4'. "
            "Export the original checkpoint instead."
        )


_MXFP4: Final = TensorNames(
    router="mlp.router",
    expert_gate_up=(f"mlp.experts.gate_up_proj{mxfp4.BLOCKS}",),
    expert_down=(f"mlp.experts.down_proj{mxfp4.BLOCKS}",),
    experts_in_turns=True,
    expert_blocks=(mxfp4.BLOCK_SIZE,),
)
FAMILY: Final = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    spec=read_spec,
    tensors=_MXFP4,
    other_layouts=(
        replace(
            _MXFP4,
            expert_gate_up=("mlp.experts.gate_up_proj",),
            expert_down=("mlp.experts.down_proj",),
            experts_transposed=True,
            expert_blocks=(),
        ),
    ),
)
