"""Experts from `config.json`, in the spellings that families have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec

# Keys of DeepSeek's and GLM's: how many layers behind the last guess tokens behind the next one.
FURTHER_LAYERS: Final = ("num_nextn_predict_layers", "num_mtp_layers")
_COUNTS: Final = ("num_experts", "num_local_experts")
# Keys of DeepSeek's that say how experts are chosen, and what is done here: of one key the first
# value is what holds where it is absent.
_CORRECTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "scoring_func": ("sigmoid", "noaux_tc"),  # dots.llm1 names the method here
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
_KINDS: Final = {"dense": False, "sparse": True}
_BY_SOFTMAX: Final[Mapping[str, tuple[Any, ...]]] = {
    "scoring_func": ("softmax",),
    "topk_method": ("greedy", "group_limited_greedy"),
    "norm_topk_prob": (False,),
    "moe_layer_freq": (1,),
}


def experts_spec(
    config: Config,
    *,
    count: int | None,
    per_token: int | None,
    count_keys: tuple[str, ...] = _COUNTS,
    per_token_keys: tuple[str, ...] = ("num_experts_per_tok",),
    layers: tuple[bool, ...] | None = None,
    **differences: Any,
) -> ExpertsSpec:
    """Read the keys of experts that every family here shares, and join them with what differs.

    Args:
        config: The model's configuration.
        count: The number of experts where none of `count_keys` is there; None: one must be.
        per_token: Likewise `num_experts_per_tok`.
        count_keys: What the number of experts may be called.
        per_token_keys: Likewise that of those which a token is given to.
        layers: Which layers have experts; None: all.
        differences: The other fields of `ExpertsSpec`.

    Raises:
        CheckpointError: A key is missing, of a wrong type, or contradicts another.
    """
    try:
        return ExpertsSpec(
            count=number_of(config, count_keys, count),
            per_token=number_of(config, per_token_keys, per_token),
            layers=None if layers is None or all(layers) else layers,
            **differences,
        )
    except ValueError as error:
        raise CheckpointError(f"{config.path} contradicts itself: {error}.") from error


def with_experts(spec: ArchSpec, experts: ExpertsSpec) -> ArchSpec:
    """A model with these experts, or as it is where its configuration gives no layer some."""
    has_some = experts.layers is None or any(experts.layers)
    return replace(spec, experts=experts) if has_some else spec


def corrected_experts(
    config: Config,
    *,
    count: int | None,
    per_token: int | None,
    normalized: bool,
    shared: int | None,
    size: int | None = None,
    first_dense: int | None = None,
    layers: tuple[bool, ...] | None = None,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
    count_keys: tuple[str, ...] = ("n_routed_experts", "num_local_experts"),
    shared_key: str = "n_shared_experts",
) -> ExpertsSpec:
    """Experts as DeepSeek V3 has them (arXiv:2412.19437): sigmoids, corrected where they choose.

    Args:
        config: The model's configuration.
        count: The number of experts where none of `count_keys` is there; None: one must be.
        per_token: likewise `num_experts_per_tok`.
        normalized: likewise `norm_topk_prob`.
        shared: likewise `shared_key`; of these experts one layer is made.
        size: likewise `moe_intermediate_size`.
        first_dense: likewise `first_k_dense_replace`; None: every layer has experts, and the key
            may say so.
        layers: which layers have experts, where another key says so.
        scale: `routed_scaling_factor` where absent.
        groups: likewise `n_group` and `topk_group`; a group counts by its two best.
        count_keys: what the number of experts may be called.
        shared_key: what that of the shared ones is called.

    Raises:
        CheckpointError: See `experts_spec`.
        UnsupportedModelError: Experts are chosen in another way.
    """
    check_choice(config, _CORRECTED)
    size = number_of(config, ("moe_intermediate_size",), size)
    if layers is None:
        layers = layers_behind(config, first_dense)
    shared = number_of(config, (shared_key,), shared)
    return experts_spec(
        config,
        count=count,
        per_token=per_token,
        count_keys=count_keys,
        layers=layers,
        size=size,
        normalized=config.get("norm_topk_prob", bool, normalized),
        sigmoid=True,
        corrected=True,
        scale=config.get("routed_scaling_factor", float, scale),
        shared_size=size * shared or None,
        **groups_of(config, groups, best=2),
    )


def softmax_experts(config: Config, *, count: int, size: int, shared: int) -> ExpertsSpec:
    """Experts as DeepSeek V2 has them (arXiv:2405.04434): a softmax that nobody normalizes again.

    Args:
        config: The model's configuration.
        count: `n_routed_experts` where absent.
        size: likewise `moe_intermediate_size`.
        shared: likewise `n_shared_experts`, of which one layer is made.

    Raises:
        CheckpointError: See `experts_spec`.
        UnsupportedModelError: Experts are chosen in another way.
    """
    check_choice(config, _BY_SOFTMAX)
    size = number_of(config, ("moe_intermediate_size",), size)
    groups: dict[str, Any] = {}
    if config.get("topk_method", str, "greedy") == "group_limited_greedy":
        groups = groups_of(config, None, best=1)
    else:
        config.ignore("n_group", "topk_group")
    return experts_spec(
        config,
        count=count,
        per_token=None,
        count_keys=("n_routed_experts", "num_experts"),
        layers=layers_behind(config, 0),
        size=size,
        normalized=False,
        scale=config.get("routed_scaling_factor", float, 1.0),
        shared_size=size * number_of(config, ("n_shared_experts",), shared) or None,
        **groups,
    )


def layers_behind(config: Config, first_dense: int | None) -> tuple[bool, ...]:
    """Which layers have experts: those behind the first ones, see `corrected_experts`."""
    first = config.get("first_k_dense_replace", int, first_dense or 0)
    if first_dense is None and first > 0:
        raise UnsupportedModelError(
            f"{config.path}: first_k_dense_replace is {first}; supported is 0, for transformers "
            "gives every layer of this family experts."
        )
    return tuple(i >= first for i in range(config.require("num_hidden_layers", int)))


def layers_by_kind(
    config: Config, num_layers: int, *, dense: int, reads_first: bool = False
) -> tuple[bool, ...]:
    """Which layers have experts: what `mlp_layer_types` says.

    Args:
        config: The model's configuration.
        num_layers: How many there are.
        dense: How many of the first have none where the key is absent.
        reads_first: transformers reads `first_k_dense_replace` then; if not, it may only repeat
            what holds.

    Raises:
        UnsupportedModelError: Another kind, or more or fewer than there are layers.
        CheckpointError: Both keys are there, and contradict each other.
    """
    first = config.get("first_k_dense_replace", int, None)
    dense = first if reads_first and first is not None else min(dense, num_layers)
    default = ["dense" if layer < dense else "sparse" for layer in range(num_layers)]
    types = config.get("mlp_layer_types", list, default)
    if len(types) != num_layers or not all(str(kind) in _KINDS for kind in types):
        raise UnsupportedModelError(
            f"{config.path}: mlp_layer_types is {types}; supported is one of "
            f"{' and '.join(_KINDS)} for each of {num_layers} layers."
        )
    layers = tuple(_KINDS[kind] for kind in types)
    if first is not None and layers != tuple(layer >= first for layer in range(num_layers)):
        raise CheckpointError(
            f"{config.path}: first_k_dense_replace is {first}, and mlp_layer_types "
            f"{'is' if config.has('mlp_layer_types') else 'is left out, which means'} {types}; "
            "they contradict each other. Remove the wrong one."
        )
    return layers


def groups_of(config: Config, defaults: tuple[int, int] | None, *, best: int) -> dict[str, Any]:
    """The groups that experts are in, as fields; none where every one is chosen."""
    if defaults is None:
        groups, chosen = config.require("n_group", int), config.require("topk_group", int)
    else:
        groups = config.get("n_group", int, defaults[0])
        chosen = config.get("topk_group", int, defaults[1])
    if groups == chosen or groups == 1:  # of one group no other can be chosen
        return {}
    return {"groups": groups, "groups_per_token": chosen, "group_best": best}


def check_choice(config: Config, known: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedModelError for experts that are chosen in another way."""
    for key, allowed in known.items():
        found = config.get(key, object, allowed[0])
        if found not in allowed:
            raise UnsupportedModelError(
                f"{config.path}: {key} is {found!r}; supported is "
                f"{' or '.join(map(repr, allowed))}, which is what transformers computes here."
            )


def number_of(config: Config, keys: tuple[str, ...], default: int | None) -> int:
    """What any of these keys says, which are names of one number."""
    given = {config.require(key, int) for key in keys if config.has(key)}
    if len(given) > 1:
        raise CheckpointError(
            f"{config.path}: {' and '.join(keys)} are {sorted(given)}, and are names of one "
            "number; remove the wrong one."
        )
    if given:
        return next(iter(given))
    return config.require(keys[0], int) if default is None else default
