"""What a family is: how its configuration reads, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from onnxport.exporter.config import Config
from onnxport.graphs.spec import ArchSpec

_ROOTS: Final = (
    "model.",
    "gpt_neox.",
    "transformer.",
)  # what is ahead of names where a head is beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The names of a checkpoint's tensors.

    A projection's parts are stacked in this order; one name is of all parts, stacked already.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    # Of learned positions, with so many rows that no token has ahead of the first one's.
    positions: str = "transformer.wpe.weight"
    positions_offset: int = 0
    # What makes the stream of the embedding, and of it what the head reads, where they differ.
    token_in: str = "model.decoder.project_in"
    token_out: str = "model.decoder.project_out"
    layer: str = "model.layers.{}."  # prefix of all below
    blocks: bool = False  # a layer's feed-forward layer has the number behind that of the others
    input_norm: str = "input_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    # The one tensor has of each head of keys its queries, key and value; they may be one head's.
    qkv_by_head: bool = False
    transposed: bool = False  # products of layers are stored [inputs, outputs]
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    sinks: str = "self_attn.sinks"
    attention_gate: str | None = None  # of gated attention; None: below each query in its tensor
    # Of latent attention: what reads the layer's input, of which the first makes queries by itself
    # or what queries are made of; the norms of what they give; and what makes queries, or keys and
    # values of each head, of that.
    latent_q: str = "self_attn.q_proj"
    latent_q_a: str = "self_attn.q_a_proj"
    latent_q_norm: str = "self_attn.q_a_layernorm.weight"
    latent_q_b: str = "self_attn.q_b_proj"
    latent_kv_a: str = "self_attn.kv_a_proj_with_mqa"
    latent_kv_norm: str = "self_attn.kv_a_layernorm.weight"
    latent_kv_b: str = "self_attn.kv_b_proj"
    # Of keys and of values each, [heads, latents, channels] and [heads, channels, latents]; None:
    # the tensor above has both.
    latent_apart: tuple[str, str] | None = None
    o: tuple[str, ...] = ("self_attn.o_proj",)
    post_norm: str = "post_attention_layernorm.weight"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    up: str = "mlp.up_proj"  # of feed-forward layers without a gate
    activation: str = "mlp.act_fn."  # prefix of the numbers of an xIELU
    router: str = "mlp.gate"
    # With "{}" for the expert, or of one tensor that has all experts.
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: tuple[str, ...] = ("mlp.experts.{}.down_proj",)
    experts_transposed: bool = False  # that tensor is [experts, inputs, outputs], not the reverse
    experts_in_turns: bool = False  # outputs of gate and up take turns in it
    expert_blocks: tuple[int, ...] = ()  # inputs whose weights were quantized with one scale
    # Of all experts: [experts, 2 * size], where gate and up take turns, and [experts, hidden].
    expert_gate_up_bias: str = "mlp.experts.gate_up_proj_bias"
    expert_down_bias: str = "mlp.experts.down_proj_bias"
    correction: str = "mlp.gate.e_score_correction_bias"  # of scores where they choose experts
    correction_axes: tuple[int, ...] = ()  # ahead of that of the experts
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: tuple[str, ...] = ("mlp.shared_experts.down_proj",)
    shared_gate: str = "mlp.shared_expert_gate"
    o_norm: str = "post_attention_layernorm.weight"  # of models that normalize what layers add
    down_norm: str = "post_feedforward_layernorm.weight"  # likewise
    norm_offset: float = 0.0  # what the weights of all norms lack
    told_by: tuple[str, ...] = ()  # how names end that a checkpoint named otherwise does not have
    plain_norms: bool = False  # norms have no weights, which then are ones
    # Of experts apart from a shared layer: norms of what router and experts read, and of what these
    # and the shared layer make, and what each expert's output is times.
    router_norm: str = "router.scale"
    experts_norm: str = "pre_feedforward_layernorm_2.weight"
    experts_out_norm: str = "post_feedforward_layernorm_2.weight"
    shared_out_norm: str = "post_feedforward_layernorm_1.weight"
    sum_norm: str = "post_mlp_layernorm.weight"  # of what experts and a shared layer add together
    expert_scales: str = "router.per_expert_scale"
    layer_scale: str = "layer_scalar"
    # Of what each layer is told of a token: the table, the product of the embedding and the norm of
    # what that gives; and of a layer, what reads the stream, what is added to it, and its norm.
    layer_inputs: str = "model.embed_tokens_per_layer.weight"
    layer_inputs_product: str = "model.per_layer_model_projection"
    layer_inputs_norm: str = "model.per_layer_projection_norm.weight"
    layer_input_gate: str = "per_layer_input_gate"
    layer_input_out: str = "per_layer_projection"
    layer_input_norm: str = "post_per_layer_input_norm.weight"
    # Of several streams (`AltUpSpec`): what begins and ends them, with "{}" for the stream, or of
    # one tensor that has all; and of a layer what foretells and corrects them, and LAuReL.
    altup_start: str = "model.altup_projections.{}"
    altup_merge: str = "model.altup_unembed_projections.{}"
    altup_router: str = "altup.modality_router"
    altup_router_norm: str = "altup.router_norm.weight"
    altup_predict: str = "altup.prediction_coefs"
    altup_correct: str = "altup.correction_coefs"
    altup_scale: str = "altup.correct_output_scale"
    laurel_left: str = "laurel.linear_left"
    laurel_right: str = "laurel.linear_right"
    laurel_norm: str = "laurel.post_laurel_norm.weight"
    # Of layers without attention. The products' inputs are one of queries, keys and values, those
    # of the gate, of beta and of the decay; or, where rows of each key head lie together, one of
    # the first two and one of the others; or one of the others alone. Of six the first three are
    # of queries, of keys and of values. A layer that is a convolution has one product.
    linear_in: tuple[str, ...] = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    linear_conv: str = "linear_attn.conv1d.weight"  # its bias, if it has one, is called alike
    # Of queries, keys and values each; None: the tensor above has all.
    linear_conv_apart: tuple[str, str, str] | None = None
    linear_conv_in_thirds: bool = False  # these have a third of all each, whatever their names say
    conv_axes: tuple[int, ...] = (1,)  # between a kernel's channels and its tokens
    linear_a_log: str = "linear_attn.A_log"
    linear_dt_bias: str = "linear_attn.dt_bias"
    linear_norm: str = "linear_attn.norm.weight"  # which has no offset
    linear_o: tuple[str, ...] = ("linear_attn.out_proj",)
    # Of Kimi Delta Attention, where `linear_in` are those of queries, keys and values: what makes
    # of a layer's input what decays, and the gate, are made of, and this.
    linear_decay: tuple[str, str] = ("self_attn.f_a_proj", "self_attn.f_b_proj")
    linear_gate: tuple[str, str] = ("self_attn.g_a_proj", "self_attn.g_b_proj")
    linear_beta: str = "self_attn.b_proj"
    head_axes: tuple[int, int] = (0, 0)  # axes of 1 ahead of and behind that of `linear_a_log`
    # Of layers of state spaces. One product makes the gate, what the convolution reads and steps.
    space_in: str = "mamba.in_proj"
    space_conv: str = "mamba.conv1d.weight"
    space_conv_bias: str = "mamba.conv1d.bias"
    space_a_log: str = "mamba.A_log"
    space_dt_bias: str = "mamba.dt_bias"
    space_skip: str = "mamba.D"  # what of values goes past states
    space_norm: str = "mamba.norm.weight"  # which has no offset
    space_o: str = "mamba.out_proj"
    # Of a draft head: the product of what the model's layers read, and norms, see `DraftSpec`.
    features: str = "fc"
    joint_norm: str = "input_norm.weight"
    apart_norm: str = "fc_norm.{}.weight"  # with "{}" for the place of the model's layer
    hidden_norm: str = "hidden_norm.weight"  # behind the prefix of the first layer
    # Or of multi-token prediction: norms of the token's embedding, and of the state beside it; the
    # first one is also of models that begin with it.
    embedding_norm: str = "enorm.weight"
    state_norm: str = "hnorm.weight"
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)  # suffixes of buffers that we recompute
    images: tuple[str, ...] = ()  # prefixes of the part that reads images
    further: tuple[str, ...] = ()  # prefixes of what guesses a token behind the next one

    def moved(self, move: Callable[[str], str]) -> TensorNames:
        """The names with another prefix, but for the head's, which lies beside the model."""
        return replace(
            self,
            embedding=move(self.embedding),
            final_norm=move(self.final_norm),
            positions=move(self.positions),
            token_in=move(self.token_in),
            token_out=move(self.token_out),
            layer=move(self.layer),
            layer_inputs=move(self.layer_inputs),
            layer_inputs_product=move(self.layer_inputs_product),
            layer_inputs_norm=move(self.layer_inputs_norm),
            altup_start=move(self.altup_start),
            altup_merge=move(self.altup_merge),
        )

    @property
    def first_norm(self) -> str:
        """The name of the norm ahead of the first layer, if it has one."""
        return self.layer.format(0) + self.input_norm

    def fit(self, found: frozenset[str]) -> bool:
        """Whether a checkpoint with the tensors `found` may be named so, but for its experts."""
        gates = (f"{self.attention_gate}.weight",) if self.attention_gate else ()
        return self.embedding in found and all(
            any(name.endswith(one) for name in found) for one in (*gates, *self.told_by)
        )

    def have_dense(self, found: frozenset[str]) -> bool:
        """Whether `found` has a feed-forward layer by these names."""
        return any(name.endswith(f".{self.down[0]}.weight") for name in found)

    def have_experts(self, found: frozenset[str]) -> bool:
        """Whether `found` has experts by these names.

        What guesses further tokens may have them in another way than the model.
        """
        (experts, *_) = self.expert_gate_up
        of_each = experts.format(0) + "."

        def is_one(name: str) -> bool:
            return of_each in name if "{}" in experts else name.endswith(experts)

        return any(is_one(name) and not name.startswith(self.further) for name in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family."""

    name: str  # transformers' model_type
    other_types: tuple[str, ...] = ()  # what else its checkpoints may have for that
    architecture: str  # transformers' class
    computed_by: str | None = None  # another class that checkpoints may name: see `find_family`
    spec: Callable[[Config, int | None], ArchSpec]  # (config, context length or None)
    tensors: TensorNames = TensorNames()
    other_layouts: tuple[TensorNames, ...] = ()  # that its checkpoints may have instead
    further_layers: tuple[str, ...] = ()  # keys: how many layers behind the last guess more tokens
    # (the model's names, its number of layers, all tensors) -> the names of the first layer of
    # multi-token prediction, of which those of embedding and head may be absent, and then are the
    # model's, and those of experts may be another layout's; None: it is not read.
    mtp: Callable[[TensorNames, int, frozenset[str]], TensorNames] | None = None
    correction_tells: bool = False  # a file without what corrects scores of experts has it not
    head_tells: bool = False  # without `tie_word_embeddings` a head is tied that is not stored

    @property
    def layouts(self) -> tuple[TensorNames, ...]:
        """Names that its checkpoints may have."""
        return self.tensors, *self.other_layouts

    def names_in(self, found: frozenset[str]) -> TensorNames:
        """The names that a checkpoint with the tensors `found` gives them."""
        layouts = (*self.layouts, *map(_without_head, self.layouts))
        fitting = [one for one in layouts if one.fit(found)]
        fitting = fitting or [one for one in layouts if one.embedding in found] or [self.tensors]
        fitting = [one for one in fitting if one.first_norm in found] or fitting
        # What may have experts may have none, whose names would tell.
        fitting = [one for one in fitting if one.have_experts(found)] or fitting
        fitting = [one for one in fitting if one.have_dense(found)] or fitting
        return next((one for one in fitting if one.head in found), fitting[0])

    @property
    def base(self) -> str:
        """Transformers' class of the model without its head, such as Qwen3Model."""
        return f"{self._stem}Model"

    @property
    def classifier(self) -> str:
        """Transformers' class of one with a score head, such as Qwen3ForSequenceClassification.

        Where another class reads images, too, that of text alone says so.
        """
        text = "Text" if self.name.endswith("_text") else ""
        return f"{self._stem}{text}ForSequenceClassification"

    @property
    def _stem(self) -> str:
        """What the names of transformers' classes begin with."""
        return self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")

    def count_further_layers(self, config: Config) -> int:
        """Layers behind the last one, which guess tokens behind the next one."""
        return max((config.get(key, int, 0) for key in self.further_layers), default=0)


def _without_head(names: TensorNames) -> TensorNames:
    """The names in a model that was saved without its head, and so without the prefix."""
    prefix = next((one for one in _ROOTS if names.layer.startswith(one)), "")
    return names.moved(lambda name: name.removeprefix(prefix))
