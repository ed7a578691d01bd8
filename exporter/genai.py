"""`genai_config.json`, so that onnxruntime-genai opens an artifact folder as it is.

Schema: https://onnxruntime.ai/docs/genai/reference/config.html. Its Generator runs the GQA graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from onnxport.exporter.source import SpecialTokens
from onnxport.graphs import contract
from onnxport.graphs.linear_spec import ShortConvSpec
from onnxport.graphs.manifest import GRAPH_FILES
from onnxport.graphs.spec import ArchSpec

FILE: Final = "genai_config.json"

# Families that it does not know by name; all decoders with a GQA graph are run alike.
_LLAMA: Final = (
    *("afmoe", "bailing_moe", "bamba", "cohere", "cohere2", "cohere2_moe", "exaone4", "exaone_moe"),
    "falcon_h1",
    "gemma3n_text",
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "laguna", "mellum", "minimax_m2"),
    *(
        "dots1",
        "ernie4_5_moe",
        "glm",
        "glm4_moe",
        "granitemoe",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
    ),
    *(
        "ministral3",
        "mixtral",
        "nanochat",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
    ),
    *("mimo_v2_flash", "sarvam_moe", "seed_oss", "solar_open"),
    *("apertus", "arcee", "flex_olmo", "glm4", "gpt_neox", "nemotron", "phi", "phimoe", "stablelm"),
    *("exaone", "internlm2", "internlm3", "mimo", "minicpm", "ministral", "orion", "starcoder2"),
    *("falcon", "gpt2", "gpt_bigcode", "gptj", "llama4_text", "opt"),
    *("cwm", "granite_swa", "granitemoe_swa", "hyperclovax", "iquestcoder", "jais2", "vaultgemma"),
)
_TYPES: Final = {
    **dict.fromkeys(_LLAMA, "llama"),
    "gpt_oss": "gptoss",
    "lfm2_moe": "lfm2",
    "lfm3": "lfm2",
}

# Keys of generation_config.json that mean the same there, and their types.
_SEARCH: Final[Mapping[str, type | tuple[type, ...]]] = {
    "do_sample": bool,
    "top_k": int,
    "top_p": (int, float),
    "temperature": (int, float),
    "repetition_penalty": (int, float),
}


def genai_config(
    spec: ArchSpec, tokens: SpecialTokens, generation: Mapping[str, Any]
) -> dict[str, Any]:
    """The configuration as JSON values; `generation` is the model's generation_config.json."""
    model: dict[str, Any] = {
        "type": _TYPES.get(spec.family, spec.family),
        "vocab_size": spec.vocab_size,
        "context_length": spec.context_length,
        "decoder": _decoder(spec),
    }
    if tokens.bos is not None:
        model["bos_token_id"] = tokens.bos
    if tokens.eos:
        model["eos_token_id"] = tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos)
    pad = tokens.pad if tokens.pad is not None else next(iter(tokens.eos), None)
    if pad is not None:
        model["pad_token_id"] = pad
    search: dict[str, Any] = {
        "do_sample": False,
        "max_length": spec.context_length,
        "past_present_share_buffer": True,
    }
    for key, kind in _SEARCH.items():
        if isinstance(generation.get(key), kind):
            search[key] = generation[key]
    return {"model": model, "search": search}


def _decoder(spec: ArchSpec) -> dict[str, Any]:
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    further: dict[str, Any] = {}
    if isinstance(spec.linear, ShortConvSpec):  # of other states it finds the names by itself
        kinds = ("full_attention", "conv")
        further["layer_types"] = [kinds[spec.is_linear(layer)] for layer in range(spec.num_layers)]
        inputs["past_conv_names"] = "past_key_values.%d.conv_state"
        outputs["present_conv_names"] = "present.%d.conv_state"
    return {
        "filename": GRAPH_FILES["gqa"],
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "hidden_size": spec.hidden_size,
        "head_size": spec.head_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_hidden_layers": spec.num_layers,
        "inputs": {
            "input_ids": contract.INPUT_IDS,
            "attention_mask": contract.ATTENTION_MASK,
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
            **inputs,
        },
        "outputs": {
            "logits": contract.LOGITS,
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
            **outputs,
        },
        **further,
    }


def dumps(config: Mapping[str, Any]) -> bytes:
    """The file's bytes."""
    return (json.dumps(config, indent=2) + "\n").encode()
