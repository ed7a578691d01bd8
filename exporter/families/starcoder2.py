"""StarCoder2: LayerNorms, biases everywhere, no gate, a window on all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.exporter.config import Config
from onnxport.exporter.expertsconfig import check_choice
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ungatedconfig import ungated_spec
from onnxport.graphs.spec import ArchSpec

# Keys of published files that say what transformers computes without reading them.
_KNOWN: Final[Mapping[str, tuple[Any, ...]]] = {
    "activation_function": ("gelu", "gelu_pytorch_tanh"),  # hidden_act is what is read
    "attention_softmax_in_fp32": (True,),
    "mlp_type": ("default",),
    "norm_type": ("layer_norm",),
    "scale_attention_softmax_in_fp32": (True,),
    "scale_attn_weights": (True,),
}


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """StarCoder2: biases unless told otherwise; a `sliding_window` of all layers, if any."""
    check_choice(config, _KNOWN)
    config.ignore("embedding_dropout", "layer_norm_epsilon")  # the norms' is norm_epsilon
    biased = config.get("use_bias", bool, True)
    window = config.get("sliding_window", int, None)
    spec = ungated_spec(
        config,
        default="gelu_pytorch_tanh",
        family="starcoder2",
        num_kv_heads=2,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        sliding_window=(window,) * config.require("num_hidden_layers", int),
        context_length=context_length,
        tied=True,
        epsilon="norm_epsilon",
    )
    return replace(spec, layer_norms=True, norm_biases=True)


FAMILY: Final = Family(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    spec=read_spec,
    tensors=TensorNames(up="mlp.c_fc", down=("mlp.c_proj",)),
)
