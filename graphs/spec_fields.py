"""The fields of a decoder's description in a manifest: their types, and reading them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from onnxport.errors import ArtifactError
from onnxport.graphs.altup_spec import AltUpSpec
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.fields import NONE, check_fields, counts, flags, is_a, numbers, with_nulls
from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.heads_spec import HeadsSpec
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.linear_spec import linear_from_json
from onnxport.graphs.multipliers_spec import MultipliersSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec_checks import SIZES

# Fields that are objects, and what reads them.
_PARTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "rope": RopeSpec.from_json,
    "local_rope": RopeSpec.from_json,
    "experts": ExpertsSpec.from_json,
    "draft": DraftSpec.from_json,
    "latent": LatentSpec.from_json,
    "linear": linear_from_json,
    "global_heads": HeadsSpec.from_json,
    "multipliers": MultipliersSpec.from_json,
    "altup": AltUpSpec.from_json,
    "query_growth": GrowthSpec.from_json,
}
_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "family": (str,),
    **dict.fromkeys(SIZES, (int,)),
    "rms_norm_eps": (float,),
    "hidden_act": (str,),
    "qkv_bias": (bool,),
    "o_bias": (bool,),
    "mlp_bias": (bool,),
    "qk_norm": (bool,),
    "tie_word_embeddings": (bool,),
    "sliding_window": (list,),
    "rope": (dict,),
    "attention_scale": (float, NONE),
    "residual_scale": (float, NONE),
    "logits_scale": (float, NONE),
    "rotated_layers": (list, NONE),
    "output_norms": (bool, NONE),
    "inner_norm_eps": (float, NONE),
    "local_rope": (dict, NONE),
    "raw_inputs": (bool, NONE),
    "whole_qk_norm": (bool, NONE),
    "attention_softcap": (float, NONE),
    "logits_softcap": (float, NONE),
    "experts": (dict, NONE),
    "attention_sinks": (bool, NONE),
    "stream_scale": (float, NONE),
    "draft": (dict, NONE),
    "latent": (dict, NONE),
    "linear": (dict, NONE),
    "attention_gate": (bool, NONE),
    "ungated": (bool, NONE),
    "mlp_layers": (list, NONE),
    "qk_norm_last": (bool, NONE),
    "layer_norms": (bool, NONE),
    "parallel_layers": (bool, NONE),
    "norm_biases": (bool, NONE),
    "parallel_norms": (bool, NONE),
    "head_bias": (bool, NONE),
    "apart_qk_norm": (bool, NONE),
    "global_heads": (dict, NONE),
    "value_norm": (bool, NONE),
    "shared_kv_layers": (int, NONE),
    "shared_kv_intermediate_size": (int, NONE),
    "layer_scales": (bool, NONE),
    "layer_input_size": (int, NONE),
    "multipliers": (dict, NONE),
    "layer_input_rows": (int, NONE),
    "altup": (dict, NONE),
    "gate_cutoffs": (list, NONE),
    "head_gates": (bool, NONE),
    "learned_positions": (int, NONE),
    "embedding_size": (int, NONE),
    "stream_norms": (bool, NONE),
    "no_final_norm": (bool, NONE),
    "inverse_layer_scale": (bool, NONE),
    "qkv_bound": (float, NONE),
    "embedding_norm": (bool, NONE),
    "state_input_norms": (bool, NONE),
    "softplus_gates": (bool, NONE),
    "layer_heads": (list, NONE),
    "window_sinks": (bool, NONE),
    "value_size": (int, NONE),
    "value_scale": (float, NONE),
    "query_growth": (dict, NONE),
    "unweighted_qk_norm": (bool, NONE),
    "chunked_windows": (bool, NONE),
}
# Fields that artifacts of before lack, as those do today where they are None.
LATER: Final = (
    *("residual_scale", "logits_scale", "rotated_layers"),
    *("output_norms", "inner_norm_eps", "local_rope"),
    *("raw_inputs", "whole_qk_norm", "attention_softcap", "logits_softcap"),
    *("experts", "attention_sinks", "stream_scale", "draft"),
    *("latent", "linear", "attention_gate", "qk_norm_last"),
    *("layer_norms", "parallel_layers", "ungated", "mlp_layers"),
    *("norm_biases", "parallel_norms", "head_bias", "apart_qk_norm"),
    *("global_heads", "value_norm", "shared_kv_layers", "shared_kv_intermediate_size"),
    *("layer_scales", "layer_input_size", "multipliers"),
    *("layer_input_rows", "altup", "gate_cutoffs", "head_gates", "learned_positions"),
    *("embedding_size", "stream_norms", "no_final_norm", "inverse_layer_scale"),
    *("qkv_bound", "embedding_norm", "state_input_norms", "softplus_gates", "layer_heads"),
    *("window_sinks", "value_size", "value_scale"),
    *("query_growth", "unweighted_qk_norm", "chunked_windows"),
)


def read_fields(value: Any) -> dict[str, Any]:
    """Return what `ArchSpec` is made of. Raises ArtifactError for what `to_json` did not write."""
    fields = check_fields("model", with_nulls(value, LATER), _FIELDS)
    windows = fields["sliding_window"]
    if not all(window is None or is_a(window, int) for window in windows):
        raise ArtifactError(f"model.sliding_window has an entry that is no integer: {windows}")
    fields["sliding_window"] = tuple(windows)
    for name in ("rotated_layers", "mlp_layers"):
        fields[name] = flags(f"model.{name}", fields[name])
    fields["layer_heads"] = counts("model.layer_heads", fields["layer_heads"])
    for name, read in _PARTS.items():
        if fields[name] is not None:
            fields[name] = read(fields[name])
    fields["gate_cutoffs"] = numbers("model.gate_cutoffs", fields["gate_cutoffs"])
    return fields
