"""Read a com.microsoft.PagedAttention node, refusing what is not understood."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from onnxport.cache_rows import SCALE_BYTES, int4_head_size
from onnxport.errors import ArtifactError
from onnxport.graphs import contract

if TYPE_CHECKING:
    import onnx

# Granularities of our own: int8 with a scale for each token and KV head, and int4, in uint8, with
# steps for each group of channels besides. Both lie in the cache: `onnxport.cache_rows` says how.
PER_TOKEN: Final = "PER_TOKEN"
PER_GROUP: Final = "PER_GROUP"


class PagedInput(IntEnum):
    """Input positions of the operator's schema in ONNX Runtime 1.31."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    KEY_CACHE = 3
    VALUE_CACHE = 4
    CUMULATIVE_SEQUENCE_LENGTHS = 5
    PAST_SEQUENCE_LENGTHS = 6
    BLOCK_TABLE = 7
    COS = 8
    SIN = 9
    SLOT_MAPPING = 10
    HEAD_SINK = 11
    Q_NORM_WEIGHT = 12
    K_NORM_WEIGHT = 13
    K_SCALE = 14
    V_SCALE = 15
    ATTENTION_METADATA = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionNode:
    """One paged attention, its attributes with the schema's defaults filled in."""

    name: str
    inputs: tuple[str, ...]  # by PagedInput, "" where omitted
    # attention [num_tokens, num_heads * v_head_size], present key, present value or ""; without
    # the latter two it reads what another layer's node has written, see `writes`
    outputs: tuple[str, str, str]
    num_heads: int
    kv_num_heads: int
    head_size: int
    v_head_size: int  # leading channels of a row that are its value where the cache is latent
    scale: float | None  # None: 1 / sqrt(head_size)
    softcap: float  # 0: none
    local_window_size: int | None  # tokens a query sees, its own included; None: all
    local_window_chunked: bool  # ours: windows do not slide, but are chunks, one behind the other
    do_rotary: bool
    rotary_interleaved: bool
    rotary_offset: int
    is_causal: bool
    qk_norm_epsilon: float
    k_quant_type: str  # NONE, PER_TENSOR, PER_CHANNEL, or ours: PER_TOKEN, PER_GROUP
    v_quant_type: str
    kv_cache_layout: str  # SEPARATE, LATENT
    k_cache_dtype: str  # "" is the cache tensor's own type
    v_cache_dtype: str

    @property
    def is_quantized(self) -> bool:
        """Whether the cache holds numbers that have scales."""
        return self.k_quant_type != "NONE" or self.v_quant_type != "NONE"

    @property
    def is_packed(self) -> bool:
        """Whether the query input holds keys and values too."""
        return not self.inputs[PagedInput.KEY]

    @property
    def writes(self) -> bool:
        """Whether the new keys and values are its layer's own, and go to the cache.

        Otherwise its caches are the outputs of another layer's node, and hold these already. To
        write them again, as the operator does, changes nothing.
        """
        return bool(self.outputs[1])

    @property
    def is_latent(self) -> bool:
        """Whether there is one cache, in whose rows values lie in front, and one KV head."""
        return self.kv_cache_layout == "LATENT"

    def input(self, position: PagedInput) -> str:
        """The value at an input, "" where omitted."""
        return self.inputs[position]


_CACHES: Final = slice(PagedInput.KEY_CACHE, PagedInput.VALUE_CACHE + 1)
_DEFAULTS: Final[Mapping[str, int | float | str]] = {
    "scale": 0.0,
    "softcap": 0.0,
    "local_window_size": -1,
    "local_window_chunked": 0,
    "do_rotary": 0,
    "rotary_interleaved": 0,
    "rotary_offset": 0,
    "is_causal": 1,
    "qk_norm_epsilon": 1e-6,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "kv_cache_layout": "SEPARATE",
    "k_cache_dtype": "",
    "v_cache_dtype": "",
    "v_head_size": 0,
}


def is_paged_attention(node: onnx.NodeProto) -> bool:
    """Whether this is the operator, of its own domain."""
    return bool(node.op_type == "PagedAttention" and node.domain == contract.MICROSOFT)


def attention_nodes(model: onnx.ModelProto) -> list[PagedAttentionNode]:
    """Every paged attention of a model, in graph order, which is the layers' order.

    Raises ArtifactError for an attribute that is not understood or a cache that is no 4-D input,
    or 4-D output of another one.
    """
    shapes = {info.name: _dims(info) for info in (*model.graph.input, *model.graph.output)}
    written = {info.name for info in model.graph.output}
    return [
        read_paged_attention(node, shapes, written)
        for node in model.graph.node
        if is_paged_attention(node)
    ]


def read_paged_attention(
    node: onnx.NodeProto,
    shapes: Mapping[str, tuple[int | str, ...]],
    written: Collection[str] = (),
) -> PagedAttentionNode:
    """Read one node.

    Args:
        node: The node.
        shapes: Of the graph's inputs and outputs, which give the head size.
        written: The graph's outputs, which a node that reads what others wrote has for caches.

    Raises:
        ArtifactError: An attribute is missing or not understood, a latent cache has what it cannot
            have, or the cache is no graph input (or, where it is read only, output)
            [num_blocks, block_size, kv_heads, head_size] with a fixed head size.
    """
    from onnx import helper

    given: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    given = {k: v.decode() if isinstance(v, bytes) else v for k, v in given.items()}
    known = {*_DEFAULTS, "num_heads", "kv_num_heads"}
    if unknown := sorted(set(given) - known):
        raise ArtifactError(
            f"PagedAttention {node.name!r} has attributes that are not understood: {unknown}"
        )
    if missing := sorted({"num_heads", "kv_num_heads"} - set(given)):
        raise ArtifactError(f"PagedAttention {node.name!r} lacks {missing}")
    is_latent = given.get("kv_cache_layout") == "LATENT"
    num_outputs = 2 if is_latent else 3
    reads = len(node.output) == 1 and {*node.input[_CACHES]} <= {*written} and not is_latent
    if len(node.input) > len(PagedInput) or not (reads or len(node.output) == num_outputs):
        raise ArtifactError(
            f"PagedAttention {node.name!r} has {len(node.input)} inputs and {len(node.output)} "
            f"outputs; at most {len(PagedInput)} and exactly {num_outputs} are understood, or 1 "
            "output where it reads what another one has written"
        )
    inputs = (*node.input, *[""] * (len(PagedInput) - len(node.input)))
    shape = shapes.get(inputs[PagedInput.KEY_CACHE], ())
    if len(shape) != 4 or not isinstance(shape[3], int):
        raise ArtifactError(
            f"the key cache of PagedAttention {node.name!r} must be a graph input [num_blocks, "
            f"block_size, kv_heads, head_size] with a fixed head size, found {list(shape)}"
        )
    value = {**_DEFAULTS, **given}
    head_size = _head_size(shape[3], value["k_quant_type"])
    if head_size is None:
        raise ArtifactError(
            f"the key cache of PagedAttention {node.name!r} has rows of {shape[3]} bytes, which no "
            "head has in int4"
        )
    if is_latent:
        _check_latent(node.name, inputs, value, head_size)
    elif value["v_head_size"] not in (0, head_size):
        raise ArtifactError(
            f"PagedAttention {node.name!r} has v_head_size {value['v_head_size']} beside head "
            f"size {head_size}; values must be as wide as keys"
        )
    window = value["local_window_size"]
    return PagedAttentionNode(
        name=node.name,
        inputs=inputs,
        outputs=_three(*node.output),
        num_heads=value["num_heads"],
        kv_num_heads=value["kv_num_heads"],
        head_size=head_size,
        v_head_size=value["v_head_size"] or head_size,
        scale=value["scale"] or None,
        softcap=value["softcap"],
        local_window_size=window if window > 0 else None,
        local_window_chunked=bool(value["local_window_chunked"]),
        do_rotary=bool(value["do_rotary"]),
        rotary_interleaved=bool(value["rotary_interleaved"]),
        rotary_offset=value["rotary_offset"],
        is_causal=bool(value["is_causal"]),
        qk_norm_epsilon=value["qk_norm_epsilon"],
        k_quant_type=value["k_quant_type"],
        v_quant_type=value["v_quant_type"],
        kv_cache_layout=value["kv_cache_layout"],
        k_cache_dtype=value["k_cache_dtype"],
        v_cache_dtype=value["v_cache_dtype"],
    )


def _check_latent(
    name: str, inputs: tuple[str, ...], value: Mapping[str, Any], head_size: int
) -> None:
    """Hold a node with a latent cache to what the operator's schema says of it."""
    wrong = {
        f"kv_num_heads {value['kv_num_heads']}, which must be 1": value["kv_num_heads"] != 1,
        "no key of its own": not inputs[PagedInput.KEY],
        "values": bool(inputs[PagedInput.VALUE]),
        "a cache of values": bool(inputs[PagedInput.VALUE_CACHE]),
        f"v_head_size {value['v_head_size']} in rows of {head_size}": not (
            0 <= value["v_head_size"] <= head_size
        ),
        "no scale, and values narrower than keys": not value["scale"]
        and value["v_head_size"] not in (0, head_size),
    }
    found = [what for what, is_so in wrong.items() if is_so]
    if found:
        raise ArtifactError(f"PagedAttention {name!r} of a LATENT cache has {', '.join(found)}")


def rotary_dim(
    layer: PagedAttentionNode,
    initializers: Mapping[str, onnx.TensorProto],
    producers: Mapping[str, onnx.NodeProto],
) -> int | None:
    """Channels of a head that rotate, by the width of the cos table, looked up through a Cast.

    None where it is no initializer [positions, rotary_dim / 2].
    """
    name = layer.input(PagedInput.COS)
    while name in producers and producers[name].op_type in ("Cast", "Identity"):
        name = producers[name].input[0]
    if name not in initializers or len(initializers[name].dims) != 2:
        return None
    return 2 * int(initializers[name].dims[1])


def _three(attention: str, key: str = "", value: str = "") -> tuple[str, str, str]:
    return attention, key, value


def _head_size(elements: int, granularity: str) -> int | None:
    """The channels of a head, from the elements of a row of the cache; None: it has none."""
    if granularity == PER_GROUP:
        return int4_head_size(elements)
    return elements - (SCALE_BYTES if granularity == PER_TOKEN else 0)


def _dims(info: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(
        int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param)
        for dim in info.type.tensor_type.shape.dim
    )
