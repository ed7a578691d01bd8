"""Hugging Face `config.json` → `ArchSpec`, strictly.

Every key is used, or listed here as one that cannot change the logits, or an error. A key whose
value is null counts as absent. What differs between model families is in `families/`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.ropeconfig import read_rope, rope_from
from onnxport.graphs.spec import ArchSpec

CONFIG_FILE: Final = "config.json"

T = TypeVar("T")
D = TypeVar("D")

logger = logging.getLogger(__name__)

# Keys that are read elsewhere, or concern training, sampling, loading or bookkeeping.
IRRELEVANT: Final = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "embd_pdrop",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "internal_version",
        "is_llama_config",
        "keys_to_ignore_at_inference",
        "label2id",
        "length_penalty",
        "max_length",
        "max_sequence_length",  # Llama 1; transformers never read it
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",  # splits a product in parts; the sum is the same
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "resid_pdrop",
        "residual_dropout",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "router_jitter_noise",  # in training alone
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)

# Keys that would change the logits, with the one value at which they do nothing.
NEUTRAL: Final[Mapping[str, Any]] = {
    "activation": "swiglu",  # of Falcon 3, beside hidden_act, which says the same
    "add_cross_attention": False,
    "attention_bias": False,
    "cross_attention_hidden_size": None,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "lm_head_bias": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
    "use_sliding_window": False,
}


# Families that rotate a part of each head, where partial_rotary_factor says so.
PARTIAL_ROTARY: Final[frozenset[str]] = frozenset(
    {
        *("bailing_moe", "bamba", "glm", "glm4", "glm4_moe", "gpt_neox", "gptj", "laguna"),
        *("mimo_v2_flash", "minimax_m2", "nemotron", "phi", "phi3"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "stablelm"),
    }
)

# Families of which `use_bidirectional_attention` may be of images alone.
SEE_IMAGES_WHOLE: Final[frozenset[str]] = frozenset({"gemma4_text"})


class Config:
    """A model's `config.json`; remembers which keys were used."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        """Wrap the parsed JSON object of the file `path`."""
        self.path = path
        self._values = {key: value for key, value in values.items() if value is not None}
        self._nulls = frozenset(values.keys() - self._values.keys())
        self._used: set[str] = set()

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Read `config.json` in `folder`. Raises CheckpointError if it cannot be read."""
        path = folder / CONFIG_FILE
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}: {error.strerror}. A checkpoint is a folder with {CONFIG_FILE}"
                ", safetensors weights and a tokenizer."
            ) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} is not a JSON object.")
        return cls(values, path)

    @property
    def architectures(self) -> tuple[str, ...]:
        """The model classes that the file names, usually one."""
        listed = self.get("architectures", list, [])
        return tuple(str(name) for name in listed)

    def replaced(self, **values: Any) -> Config:
        """The same with other values of some keys; what is used of it counts as used here."""
        other = Config({**self._values, **values}, self.path)
        other._nulls, other._used = self._nulls, self._used
        return other

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Whether `key` is there and null, which is seldom what its absence means."""
        return key in self._nulls

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`, which must be there. Raises CheckpointError if it is not."""
        value = self.get(key, kind, None)
        if value is None:
            raise CheckpointError(f"{self.path} lacks the key {key!r}, which the model needs.")
        return value

    def get(self, key: str, kind: type[T], default: D) -> T | D:
        """The value of `key`, or `default` where it is absent or null.

        Raises CheckpointError for a value of another type. An int is accepted as a float.
        """
        self._used.add(key)
        if key not in self._values:
            return default
        value = self._values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(
                f"{self.path}: {key!r} is {value!r}, expected a value of type {kind.__name__}."
            )
        return value

    def ignore(self, *keys: str) -> None:
        """Count these keys as used: of the model at hand they change no logit."""
        self._used.update(keys)

    def check_all_used(self, family: str) -> None:
        """Raise UnsupportedModelError for keys that were not used and may change the result."""
        unknown = {
            key: value
            for key, value in self._values.items()
            if key not in self._used
            and key not in IRRELEVANT
            and not (key in NEUTRAL and value == NEUTRAL[key])
        }
        if unknown:
            found = ", ".join(f"{key} = {short(value)}" for key, value in sorted(unknown.items()))
            hint = (
                " Export the original, unquantized checkpoint instead."
                if "quantization_config" in unknown
                else " Remove it from config.json if you know that it changes nothing."
            )
            raise UnsupportedModelError(
                f"{self.path} has {len(unknown)} key(s) that the exporter does not understand for "
                f"the family {family!r}, and that could change the result: {found}.{hint}"
            )


def check_causal(config: Config, *, of_images: bool = False) -> None:
    """Refuse a model whose tokens see those behind them, as some have that embed text.

    Args:
        config: The model's configuration.
        of_images: Whether "vision" says that of the tokens of images alone.

    Raises:
        UnsupportedModelError: They do.
    """
    for key, value in (("use_bidirectional_attention", False), ("is_causal", True)):
        found = config.get(key, object, value)
        if found != value and not (of_images and found == "vision"):
            raise UnsupportedModelError(
                f"{config.path}: {key} is {found!r}, so that tokens see those behind them, as in "
                "some models that embed text; supported is causal attention."
            )


def context_within(config: Config, end: int, asked: int | None, what: str, beyond: str) -> int:
    """The context length of a model that is supported up to `end` tokens alone; a warning says so.

    Args:
        config: The model's configuration.
        end: The longest context.
        asked: The context length that was asked for; None: as long as may be.
        what: What `end` is, as in "the first chunk".
        beyond: What the model does there, as in "this model attends in chunks".

    Raises:
        UnsupportedModelError: More was asked for.
    """
    if asked is not None and asked > end:
        raise UnsupportedModelError(
            f"{config.path}: a context length of {asked} tokens was asked for; beyond {end}, "
            f"{what}, {beyond}, which is not supported. Choose one from 1 to {end}."
        )
    trained = config.require("max_position_embeddings", int)
    if asked is None and trained > end:
        logger.warning(
            "the context is %d tokens, not %d: beyond that %s, which is not supported",
            *(end, trained, beyond),
        )
    return min(trained, end) if asked is None else asked


def decoder_spec(
    config: Config,
    *,
    family: str,
    head_size: int | None = None,
    num_layers: int | None = None,
    num_kv_heads: int | None = None,
    intermediate_size: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: tuple[int | None, ...] | None = None,
    context_length: int | None = None,
    theta: float = 10_000.0,
    partial_rotary_factor: float = 1.0,
    rope: Mapping[str, Any] | None = None,
    hidden_act: str | None = None,
    tied: bool = False,
    epsilon: str = "rms_norm_eps",
) -> ArchSpec:
    """Read the keys that every family here shares, and join them with what differs.

    Args:
        config: The model's configuration.
        family: The family's name.
        head_size: `head_dim` where the key is absent; None: hidden_size / num_attention_heads.
        num_layers: The number of layers; None: `num_hidden_layers`.
        num_kv_heads: `num_key_value_heads` where absent; None: num_attention_heads, which null
            means in any case.
        intermediate_size: `intermediate_size` where absent; None: it must be there.
        qkv_bias: The query, key and value projections have biases.
        o_bias: The attention output projection has a bias.
        mlp_bias: The gate, up and down projections have biases.
        qk_norm: Query and key heads are normalized.
        sliding_window: Per layer, visible tokens with the query's own; None: every layer sees all.
        context_length: The longest sequence in tokens; None: max_position_embeddings.
        theta: `rope_theta` where absent.
        partial_rotary_factor: likewise.
        rope: RoPE keys in the new spelling; None: the configuration's.
        hidden_act: the activation, of `spec_checks.HIDDEN_ACTS`; None: `hidden_act`, a SiLU.
        tied: `tie_word_embeddings` where absent.
        epsilon: What the norms' epsilon is called.

    Raises:
        CheckpointError: A key is missing, of a wrong type, or contradicts another.
        UnsupportedModelError: A value that is not supported.
    """
    check_causal(config, of_images=family in SEE_IMAGES_WHOLE)
    hidden_size = config.require("hidden_size", int)
    num_heads = config.require("num_attention_heads", int)
    if num_layers is None:
        num_layers = config.require("num_hidden_layers", int)
    head_size = config.get("head_dim", int, head_size or hidden_size // max(num_heads, 1))
    if num_kv_heads is None or config.is_null("num_key_value_heads"):
        num_kv_heads = num_heads
    if intermediate_size is None or config.has("intermediate_size"):
        intermediate_size = config.require("intermediate_size", int)
    norm_eps = config.require(epsilon, float)
    if not 0 < norm_eps < math.inf:
        raise CheckpointError(f"{config.path}: {epsilon} is {norm_eps}; it must be above 0.")
    defaults = {"rope_theta": theta, "partial_rotary_factor": partial_rotary_factor}
    if rope is None:
        embedding, context_length = read_rope(config, head_size, context_length, defaults)
    else:
        embedding, context_length = rope_from(config, rope, head_size, context_length)
    if embedding.rotary_dim != head_size and family not in PARTIAL_ROTARY:
        raise UnsupportedModelError(
            f"{config.path}: partial_rotary_factor makes {embedding.rotary_dim} of {head_size} "
            f"channels rotate, and transformers ignores it for the family {family!r}. Remove it."
        )
    try:
        return ArchSpec(
            family=family,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads", int, num_kv_heads),
            head_size=head_size,
            vocab_size=config.require("vocab_size", int),
            rms_norm_eps=norm_eps,
            hidden_act=hidden_act or _hidden_act(config),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            tie_word_embeddings=config.get("tie_word_embeddings", bool, tied),
            context_length=context_length,
            sliding_window=sliding_window or (None,) * num_layers,
            rope=embedding,
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def _hidden_act(config: Config) -> str:
    found = config.get("hidden_act", str, "silu")
    if found not in {"silu", "swish"}:  # two names of one function
        raise UnsupportedModelError(f"{config.path}: hidden_act is {found!r}; supported is 'silu'.")
    return "silu"


def check_heads(config: Config, spec: ArchSpec) -> ArchSpec:
    """The spec, if heads share the width of a token, as transformers computes it of some families.

    Raises UnsupportedModelError.
    """
    if spec.q_size != spec.hidden_size:
        raise UnsupportedModelError(
            f"{config.path}: head_dim is {spec.head_size}; supported is hidden_size / "
            "num_attention_heads, which is what transformers computes here."
        )
    return spec


def short(value: Any, limit: int = 120) -> str:
    """A value as JSON has it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
