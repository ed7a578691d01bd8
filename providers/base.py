"""What a provider is: a graph on a device, with the physical KV cache.

A provider knows nothing of requests. It is probed, it loads an artifact (choosing the passes its
device needs), and the loaded model runs packed batches. Shared code never asks which provider it
has; a difference is a field of `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.lora import LoraAdapter
from onnxport.providers.features import Attention, Features
from onnxport.providers.load_checks import check_load_options

DeviceKind = Literal["cpu", "gpu", "npu"]
SPELLINGS: Mapping[str, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a provider can use."""

    name: str
    memory_bytes: int | None  # total memory, None where the device does not say
    kind: DeviceKind = "cpu"


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a provider can be used on this machine, and why not."""

    available: bool
    reason: str  # why it is missing and what to install; "" when available
    devices: tuple[Device, ...] = ()  # the first is the one that `load` takes
    versions: Mapping[str, str] = field(default_factory=dict)  # library name -> version
    notes: tuple[str, ...] = ()  # what a user should know, such as "no compiled kernel"
    features: Features | None = None  # None where the provider is missing


CACHE_FRACTION = 0.4  # of the memory that the weights leave free, unless told otherwise


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a caller may choose when an artifact is loaded; None lets the provider choose.

    Types may be given in the short SPELLINGS and are held in the long ones.

    Raises:
        ProviderError: a number is out of its range; names the option.
    """

    threads: int | None = None  # compute threads; None: the physical cores
    kv_cache_tokens: int | None = None  # pool size in tokens; None: from kv_memory
    kv_memory: int | float | None = None  # int: bytes; float in (0, 1]: of free memory; None: 0.4
    kv_share: float = CACHE_FRACTION  # of the memory that is free, where neither is given
    kv_cache_dtype: str = "auto"  # auto, or one of Features.kv_cache_dtypes
    block_size: int | None = None  # tokens per KV block
    max_model_len: int | None = None  # longest sequence in tokens; None: the artifact's context
    attention: Attention | None = None  # force a lowering; None: the best there is
    matmul_accuracy_level: int | None = None  # MatMulNBits: 1 = fp32, 4 = int8 activations
    dtype: str = "auto"  # of activations: auto, or one of Features.dtypes
    # Operator types, such as "GatherBlockQuantized", that may run on the host where the device
    # does not take them; what the provider itself expects there needs no mention.
    allowed_on_host: tuple[str, ...] = ()
    # Record decode steps and replay them (CUDA graphs); None: where the provider can.
    capture_graphs: bool | None = None
    max_adapters: int = 0  # LoRA adapters that can be loaded at once; 0: a graph without any
    max_adapter_rank: int = 16  # largest rank of an adapter
    adapter_dtype: str = "auto"  # what adapters are kept in: auto, or one of ADAPTER_DTYPES
    graph_cache: Path | None = None  # folder that keeps lowered graphs; None: none is kept
    # Whether a provider may keep half a byte more for each of the output head's weights, and so
    # read less where `StepInputs.exact_logits` allows it. Tokens are the same, but for the chance
    # that docs/providers.md tells.
    coarse_head: bool = True
    # Whether layers with a sliding window have block tables of their own where the provider can,
    # so that blocks behind the window are used again.
    hybrid_kv_cache: bool = True
    # Layers, from 0: `run` tells what these read of the residual stream, see
    # `StepInputs.hidden_states`.
    hidden_layers: tuple[int, ...] = ()
    final_states: bool = False  # `run` tells what the final norm makes of a token, behind these
    # States of sequences that a model with linear attention is to have room for, see
    # `Capabilities.state_slots`; None: as many as the provider likes. It may give fewer, where
    # there is no memory for more. Other models have none, whatever is asked for.
    state_slots: int | None = None

    def __post_init__(self) -> None:
        """Spell types in one way, and refuse what no provider could mean."""
        for name in ("dtype", "kv_cache_dtype", "adapter_dtype"):
            value = getattr(self, name)
            object.__setattr__(self, name, SPELLINGS.get(value, value))
        check_load_options(self)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What K/V blocks are, apart from the provider that holds them.

    In the canonical form, which all providers read and write, a block of `block_size` tokens is an
    array [num_layers, parts, num_kv_heads, block_size, elements] of `dtype`: keys, after RoPE, then
    values, in rows that `onnxport.cache_rows` describes; of floats they are head_size numbers.
    Where attention is of latents (`graphs.latent_spec`) their rows are all that there is.
    Blocks of one model can therefore move between providers: `providers.rows.convert`.
    """

    model: str  # identifies the weights: hex SHA-256 of the manifest's file checksums
    num_layers: int  # that a block has room for
    num_kv_heads: int
    head_size: int
    dtype: str  # of rows: one of `cache_rows.DTYPES`
    # Of each layer of the model, its group and its place in that group's blocks, where there are
    # several groups (`Capabilities.windows`); (): one, of all layers in their order.
    places: tuple[tuple[int, int], ...] = ()
    parts: int = 2  # keys and values; 1: rows that both are made of

    @classmethod
    def of(cls, artifact: Artifact, dtype: str, groups: LayerGroups | None = None) -> KVFormat:
        """The format of an artifact's blocks, with elements of `dtype`.

        Args:
            artifact: the model.
            dtype: of the elements.
            groups: how its layers are divided; None: not at all.
        """
        spec, fingerprint = artifact.manifest.model, artifact.manifest.fingerprint
        layers = len(spec.cached_layers)
        places: tuple[tuple[int, int], ...] = ()
        if groups is not None and len(groups.windows) > 1:
            layers, places = groups.num_places, groups.places
        sizes = (layers, spec.num_kv_heads, spec.head_size)
        return cls(fingerprint, *sizes, dtype, places, spec.cache_parts)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded model can do; fixed once it is loaded."""

    provider: str
    device: str
    attention: Attention
    compute_dtype: str  # of activations: float32, float16, bfloat16
    kv_cache_dtype: str
    block_size: int  # tokens per KV block
    num_blocks: int  # blocks in the pool, all of them usable
    kv_block_bytes: int  # bytes of one block over all layers that it has, keys and values
    kv_format: KVFormat  # of what `Model.read_blocks` returns and `write_blocks` takes
    max_model_len: int  # longest sequence in tokens
    vocab_size: int  # logits of a row: the model's tokens, or those that a draft head guesses
    max_batch_rows: int | None  # most sequences in one run; None: no limit
    placement: Mapping[str, int]  # execution provider -> number of nodes it really runs
    max_batch_tokens: int | None = None  # most tokens in one run; None: no limit
    # Operator type -> number of nodes that the host runs for a device that is not the host.
    on_host: Mapping[str, int] = field(default_factory=dict)
    emulated: bool = False  # a stand-in device ran the provider's own graph, see Provider
    max_adapters: int = 0  # slots for LoRA adapters, numbered from 1; 0: none
    max_adapter_rank: int = 0  # largest rank of an adapter; 0 without slots
    # Whether `run` may compute less by StepInputs.exact_logits and allowed_tokens.
    takes_exact_logits: bool = False
    summarizes_logits: bool = False  # whether `run` writes StepInputs.summaries
    # Of each group of layers that has block tables of its own, the tokens that a query sees, its
    # own included; None: all. Blocks behind a window may be given to others.
    windows: tuple[int | None, ...] = (None,)
    # Whether `read_blocks` and `write_blocks` are there; not where the caches of layers have
    # several shapes.
    moves_blocks: bool = True
    features: int = 0  # numbers of each token that `run` tells by StepInputs.hidden_states; 0: none
    final_features: int = 0  # the last of these, which the final norm has made; 0: it tells none
    int8_products: bool = False  # products of quantized weights may round activations to int8
    # Whether a token that joins a block of the cache lets those before it be rounded anew, so that
    # one which is overwritten afterwards leaves a trace in them.
    rounds_anew: bool = False
    # Slots for states of sequences, numbered from 1; 0: the model's layers have K/V alone. A state
    # is what layers with a state know of all tokens of a sequence so far; that of no tokens
    # is slot 0.
    state_slots: int = 0
    state_bytes: int = 0  # of one slot over all layers that have states; 0 without slots
    # Whether a row may write the slot that it reads, and slots take memory when first written.
    host_states: bool = False

    @property
    def kv_tokens(self) -> int:
        """Tokens that there is room for, even if no window gives any up."""
        return self.num_blocks // len(self.windows) * self.block_size


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One packed batch; every array is C-contiguous and in host memory."""

    input_ids: NDArray[np.int64]  # [num_tokens]
    block_table: NDArray[np.int32]  # [batch, max_num_blocks]; unused entries are 0
    cumulative_sequence_lengths: NDArray[np.int32]  # [batch + 1], starts at 0, ends at num_tokens
    past_sequence_lengths: NDArray[np.int32]  # [batch]
    attention_metadata: NDArray[np.int32]  # [3]: max query length, max KV length, the same again
    logits_indices: NDArray[np.int32]  # [num_logits], indices into input_ids
    # [batch], the adapter slot of each row; 0 is the model without one. None: no row has one.
    adapter_slots: NDArray[np.int32] | None = None
    # [num_logits], how many of a row's largest logits must be exact, at least 0, which stands for
    # all. None: all of all rows. See `Model.run`.
    exact_logits: NDArray[np.int32] | None = None
    # [num_logits, contract.mask_words(vocab)], which tokens each row may get; bit i % 32 of word
    # i // 32 is that of token i. None: all, and no number of `exact_logits` is
    # contract.ALL_ALLOWED then. While `run` runs, a thread may fill rows of which that number is 0,
    # and set it afterwards.
    allowed_tokens: NDArray[np.int32] | None = None
    # [num_logits, 2], contract.RACES: the random number of a row that draws from all, and what its
    # logits are multiplied by, 0 where it does not. None: no row does.
    races: NDArray[np.float64] | None = None
    # What `run` is to tell of each row of logits besides, contract.SUMMARY_SCALES; and where to,
    # [num_logits, contract.summary_floats(vocab)]. None: nothing. Only where `summarizes_logits`.
    summary_scales: NDArray[np.float32] | None = None
    summaries: NDArray[np.float32] | None = None
    # Of the second group of layers and those behind it, as `block_table`: see
    # `Capabilities.windows`. Entries that no query of the step sees may be any block.
    more_block_tables: tuple[NDArray[np.int32], ...] = ()
    # [num_tokens, Capabilities.features], which `run` writes: what LoadOptions.hidden_layers read
    # of each token, side by side, and what LoadOptions.final_states asks for. None: nobody wants to
    # know.
    hidden_states: NDArray[np.float32] | None = None
    # [batch], slots of states: the one that a row goes on from, 0 where it begins, and the one that
    # it leaves its state in after its last token. The latter are distinct, none is 0, and none is
    # read by any row of the step, but where `Capabilities.host_states` by the one that writes it.
    # None where `Capabilities.state_slots` is 0.
    state_reads: NDArray[np.int32] | None = None
    state_writes: NDArray[np.int32] | None = None
    # Of a draft head alone, and of each of them: `contract` says what they are.
    target_hidden_states: NDArray[np.float32] | None = None  # [num_tokens, features]
    draft_hidden_states: NDArray[np.float32] | None = None  # [num_tokens, hidden]
    last_hidden_states: NDArray[np.float32] | None = None  # [num_logits, hidden], `run` writes it


class Model(Protocol):
    """An artifact loaded on a device. Not thread-safe: one caller at a time."""

    @property
    def capabilities(self) -> Capabilities:
        """What was really loaded."""
        ...

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Write the new tokens' K/V and return logits, float32 [num_logits, vocab], host.

        Where a row asks for its k largest logits in `exact_logits`, these and all that equal the
        k-th are what they would be if all had been asked for. Each of the others is less than the
        k-th, and need not be what it would be: what draws among the k largest draws the same. A
        model may miss one of them with a chance of at most 2.3e-11 (docs/providers.md). Rows
        with logits that are not finite are exact. Where `races` has a factor for the row, the
        largest logits are those with the largest sums. All that is said of the tokens that
        `allowed_tokens` allows the row, if there are such; logits of others may be any finite
        numbers, or what they are. A model may always return all of them exact;
        `takes_exact_logits` says whether it would gain by not doing so.

        The array may be overwritten by the next `run`. Raises ProviderError when the device
        fails; the slots that the step would have written, of K/V and of states, are undefined
        then, and all others as they were, so that the caller can try again with fewer rows. Its
        subclass DeviceMemoryError says that fewer are likely to fit; DeviceLostError, which the
        transfers raise too, that nothing of this model can be used again but `close`.
        """
        ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the whole content of block `sources[i]` to block `targets[i]`, in any order.

        No block is both a source and a target, and targets are distinct. Raises ProviderError
        when the device fails.
        """
        ...

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """Return the blocks in canonical form, in memory of its own; see `moves_blocks`.

        The shape is [len(blocks), num_layers, parts, num_kv_heads, block_size, elements], the
        dtype that of `KVFormat`. Raises ProviderError when the device fails.
        """
        ...

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """Replace the content of `blocks`, distinct ones, by what `read_blocks` returned once.

        Raises ProviderError when the device fails; the blocks are undefined then.
        """
        ...

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        """Put an adapter in a slot, 1 to `max_adapters`, or empty it; for the next `run`.

        Raises AdapterError when its numbers do not fit the type in which they are kept,
        ProviderError when the device fails or the model was loaded without slots, CapacityError
        when the adapter's rank is above `max_adapter_rank` or memory is short.
        """
        ...

    def close(self) -> None:
        """Free the session and the cache. Idempotent."""
        ...


class Provider(Protocol):
    """A kind of device.

    A provider of hardware that is not at hand can be made to emulate it: its own lowered graph,
    with the same shapes, padding and I/O binding, runs on the CPU (`Capabilities.emulated`).
    """

    @property
    def name(self) -> str:
        """The name a user gives: cpu, openvino, cuda, webgpu, migraphx, directml."""
        ...

    def probe(self) -> Probe:
        """Look without loading a model; never raises for a missing library."""
        ...

    def load(self, artifact: Artifact, options: LoadOptions) -> Model:
        """Lower the artifact for this device and start it.

        Raises ProviderError when the device or an option does not fit, CapacityError when the
        weights or the smallest useful cache do not.
        """
        ...
