"""EXAONE 3.0, 3.5 and Deep: Llama, whose keys and tensors have other names in published files."""

from __future__ import annotations

from typing import Final

from onnxport.errors import CheckpointError
from onnxport.exporter.config import Config, decoder_spec
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.ropeconfig import rope_parameters
from onnxport.graphs.spec import ArchSpec

_OTHERS: Final[tuple[tuple[str, str, type[int | float | str]], ...]] = (
    ("num_hidden_layers", "num_layers", int),
    ("rms_norm_eps", "layer_norm_epsilon", float),
    ("hidden_act", "activation_function", str),
)
# Of which those who read the files differ in what they take where it is absent.
_NEEDED: Final = ("num_key_value_heads", "rope_theta")


def read_spec(config: Config, context_length: int | None) -> ArchSpec:
    """EXAONE 3: optional biases, as Llama's."""
    config.ignore("embed_dropout")  # in training alone
    for key in _NEEDED:
        if not config.has(key) and key not in rope_parameters(config):
            raise CheckpointError(f"{config.path} lacks the key {key!r}, which the model needs.")
    biased = config.get("attention_bias", bool, False)
    return decoder_spec(
        _renamed(config),
        family="exaone",
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=config.get("mlp_bias", bool, False),
        context_length=context_length,
    )


def _renamed(config: Config) -> Config:
    """The configuration with the keys of others. Raises CheckpointError where both differ."""
    found = {}
    for name, other, kind in _OTHERS:
        value = config.get(other, kind, None)
        if value is None:
            continue
        if config.get(name, kind, value) != value:
            raise CheckpointError(
                f"{config.path}: {other} is {value} and {name} another, and are names of one "
                "thing; remove the wrong one."
            )
        found[name] = value
    return config.replaced(**found)


FAMILY: Final = Family(
    name="exaone",
    architecture="ExaoneForCausalLM",
    computed_by="LlamaForCausalLM",
    spec=read_spec,
    tensors=TensorNames(
        embedding="transformer.wte.weight",
        final_norm="transformer.ln_f.weight",
        layer="transformer.h.{}.",
        input_norm="ln_1.weight",
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        o=("attn.attention.out_proj",),
        post_norm="ln_2.weight",
        gate_up=("mlp.c_fc_0", "mlp.c_fc_1"),
        down=("mlp.c_proj",),
        ignored=(".rotary.inv_freq", ".rotary_emb.inv_freq"),
    ),
    other_layouts=(TensorNames(),),
)
