"""A paged graph on a device that ONNX Runtime drives: what its execution providers have in common.

A provider describes its device in a `Recipe` and says where it is in a `Target`; the lowering, the
caches in device memory and the checks are the same for all. With `emulate` the CPU stands in for
the device: it runs the very graph that the device would get, with the same shapes, padding and
bindings.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import TensorProto

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.block_transfers import zeros_graph
from onnxport.graphs.passes.accuracy import has_int8_products
from onnxport.graphs.passes.chunk_linear import CHUNK_TOKENS
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers import memory
from onnxport.providers.base import Capabilities, KVFormat, LoadOptions
from onnxport.providers.buckets import Buckets
from onnxport.providers.device_blocks import BlockRoom, allocate
from onnxport.providers.device_logits import DeviceLogits
from onnxport.providers.device_lowering import TYPES, DeviceLowering
from onnxport.providers.device_states import device_states
from onnxport.providers.failures import reported
from onnxport.providers.features import Attention
from onnxport.providers.hidden_states import check_hidden_layers, final_features
from onnxport.providers.mixed_layers import refuse_mixed_adapters
from onnxport.providers.ort import (
    CPU,
    Target,
    ort_value,
    quiet_options,
    start_session,
    weight_bytes,
)
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.placement import check_host_operators, host_operators, placement
from onnxport.providers.pool import PoolPlan, plan_pool
from onnxport.providers.recipe import Recipe
from onnxport.providers.replay import DecodeReplay
from onnxport.providers.states import plan_memory
from onnxport.providers.step_memory import StepMemory

logger = logging.getLogger(__name__)

TRANSFER_BLOCKS: Final = 8  # moved at a time by devices that compile a graph for each shape
BUCKET_TOKENS: Final = 2048  # most tokens of a step, on devices that compile for shapes
BUCKET_ROWS: Final = 256  # most sequences of a step there


def load_on_device(
    artifact: Artifact, options: LoadOptions, recipe: Recipe, target: Target, *, emulate: bool
) -> OrtModel:
    """Lower an artifact for a device and start it.

    Raises:
        ProviderError: an option does not fit, the device does not start, or it leaves nodes to
            the host that are not allowed there.
        CapacityError: weights or cache do not fit.
    """
    if emulate:
        dtypes = tuple(name for name in recipe.dtypes if name != "bfloat16")
        recipe = replace(recipe, dtypes=dtypes, free_bytes=memory.available_bytes())
        target = CPU
    if options.capture_graphs and recipe.capture_options is None:
        raise ProviderError(
            f"capture_graphs was asked for; the {recipe.provider} provider has nothing to replay, "
            "leave it out"
        )
    refuse_mixed_adapters(artifact, options)
    has_states = artifact.manifest.model.linear is not None
    if options.capture_graphs and has_states:
        raise ProviderError(
            "capture_graphs was asked for; steps of a model that has layers with a state are not "
            "replayed: leave it out"
        )
    tells = check_hidden_layers(artifact, options) > 0 or artifact.manifest.model.draft is not None
    if options.capture_graphs and tells:
        raise ProviderError(
            "capture_graphs was asked for; hidden states, which a draft head reads and tells, and "
            "of which embeddings are made, are not in steps that are replayed: leave it out, or "
            "guess by another method, and make no embeddings"
        )
    if options.capture_graphs and options.allowed_on_host:
        raise ProviderError(
            "capture_graphs was asked for, and allowed_on_host; steps of which the host runs a "
            "part cannot be replayed: leave one of them out"
        )
    lowering = DeviceLowering(artifact, options, recipe, target, emulate=emulate)
    if options.capture_graphs and lowering.attention != "native":
        raise ProviderError(
            "capture_graphs was asked for; only steps with native attention can be replayed, and "
            f"it is decomposed here: {lowering.why_decomposed}"
        )
    captures = options.capture_graphs
    if captures is None:
        captures = not emulate and can_capture(
            artifact.manifest.model, options, recipe, lowering.attention, tells=tells
        )
    steps = list(lowering.steps())
    for step in steps:
        logger.info("%s: %s", artifact.path.name, step)
    model = steps[-1].model
    attached_to = {tensor.name for tensor in model.graph.initializer}
    made = (item for step in steps for item in step.attached.items())
    converted = {name: value for name, value in made if name in attached_to}
    spec, item_bytes = artifact.manifest.model, numpy_dtype(TYPES[lowering.dtype]).itemsize
    # What was converted stays in the host's memory; a device has a copy of its own.
    held_bytes = weight_bytes(model, converted if target.is_host else {})
    held_bytes += lowering.adapter_bytes(steady=captures)
    if captures:
        held_bytes += BUCKET_ROWS * spec.num_logits * 4  # logits, which have a place of their own
    plan = partial(
        plan_pool,
        spec,
        options,
        block_size=lowering.block_size,
        item_bytes=item_bytes,
        free_bytes=recipe.free_bytes,
        buffer_bytes=recipe.buffer_bytes,
        groups=lowering.groups,
    )
    pool, states = plan_memory(
        spec,
        options,
        recipe.free_bytes,
        plan,
        held_bytes,
        conv_item_bytes=item_bytes,
        num_spare=int(recipe.bucketed),
        buffer_bytes=recipe.buffer_bytes,
    )
    attached = {name: ort_value(value) for name, value in converted.items()}
    session_options = _session_options(options, lowering.needs_library)
    session_options.add_external_initializers(list(attached), list(attached.values()))
    session = _start(model, artifact.path, session_options, target, recipe if captures else None)
    on_host: dict[str, int] = {}
    if not target.is_host:
        on_host = dict(host_operators(session, model))
        check_host_operators(
            on_host, recipe.expected_on_host, options.allowed_on_host, recipe.provider
        )
    buckets = None
    if recipe.bucketed or captures:
        buckets = _buckets(pool, captures=captures, has_states=has_states)
    spare = max(1, buckets.spare_blocks) if buckets else 0
    pool_bytes = pool.num_blocks * pool.block_bytes + states.num_bytes
    with reported(f"making a KV cache of {pool_bytes} bytes and what it needs", recipe.device):
        group = TRANSFER_BLOCKS if recipe.bucketed else None
        room = BlockRoom(pool.num_blocks, spare, pool.block_size, group)
        caches, blocks = allocate(model, spec, lowering.groups, room, target)
        caches += device_states(spec, states, TYPES[lowering.dtype], target)
        capabilities = _capabilities(artifact, recipe, lowering, pool)
        capabilities = replace(
            capabilities,
            placement=placement(session),
            on_host=on_host,
            emulated=emulate,
            # ONNX Runtime's kernels on a processor do, whatever the device would.
            int8_products=(emulate or recipe.int8_products) and has_int8_products(model),
            state_slots=states.num_slots,
            state_bytes=states.slot_bytes,
        )
        logits, replay = None, None
        if recipe.selects_logits:
            logits = DeviceLogits(spec.num_logits, target, None if emulate else recipe.page_lock)
        if captures:
            assert logits is not None, "what can replay steps can select logits"
            assert buckets is not None, "what is replayed is padded"
            logits.reserve(buckets.max_rows)
            replay = DecodeReplay(session, caches, target, logits, buckets.widths, pool.block_size)
        step_memory = None
        if lowering.attention == "decomposed":
            taken = held_bytes + states.num_bytes
            left_bytes = None if recipe.free_bytes is None else recipe.free_bytes - taken
            step_memory = StepMemory.plan(spec, pool, item_bytes, left_bytes, buckets)
        return OrtModel(
            session,
            capabilities,
            caches,
            blocks,
            attached,
            buckets,
            replay,
            lowering.adapters(target, steady=captures),
            step_memory=step_memory,
            device_logits=logits,
            most_row_tokens=CHUNK_TOKENS if has_states else None,
        )


def can_capture(
    spec: ArchSpec, options: LoadOptions, recipe: Recipe, attention: Attention, *, tells: bool
) -> bool:
    """Whether a device replays the decode steps of a model where nobody says so.

    Args:
        spec: the model.
        options: `allowed_on_host` is used.
        recipe: of the device.
        attention: how it is computed.
        tells: whether steps return hidden states.
    """
    # The host counts positions, which some models need in operators beside attention.
    in_parts = bool(options.allowed_on_host) or spec.counts_positions
    has_states = spec.linear is not None
    can = recipe.capture_options is not None and attention == "native"
    return can and not (tells or in_parts or has_states)


def _start(
    model: onnx.ModelProto, folder: Path, options: Any, target: Target, recording: Recipe | None
) -> Any:
    """Start the model's session; `recording` is of the device that is to replay its runs.

    The small graphs beside it are not recorded: a run that is replayed has no new outputs.
    """
    serialized = model.SerializeToString()
    if recording is None:
        return start_session(serialized, folder, options, target)
    if not target.is_host:  # on the host, which emulates the device, there is nothing to record
        chosen = {**target.options, **(recording.capture_options or {})}
        target = replace(target, options=chosen)
    try:
        return start_session(serialized, folder, options, target)
    except ProviderError as error:
        raise ProviderError(
            f"{error} Decode steps are to be replayed there. If that is why, as where the CPU runs "
            "a part of them, --no-capture-graphs (capture_graphs=False) goes without, and says "
            "which operators these are."
        ) from error


def _buckets(pool: PoolPlan, *, captures: bool, has_states: bool) -> Buckets:
    limits = (BUCKET_TOKENS, BUCKET_ROWS, pool.max_model_len, pool.block_size)
    # A native PagedAttention looks up the blocks that there are; how wide the table is, is nothing.
    return Buckets(*limits, few_widths=captures, row_is_tile=has_states)


def no_native_blocks(head_size: int) -> int:
    """The block size of a device without a PagedAttention of its own: there is none."""
    raise AssertionError("asked for the blocks of a PagedAttention that is not there")


def why_not_started(target: Target) -> str:
    """Why an execution provider does not start; "" where it does."""
    model = zeros_graph(TensorProto.FLOAT).SerializeToString()
    try:
        start_session(model, None, quiet_options(), target)
    except ProviderError as error:
        return str(error).strip()
    return ""


def _capabilities(
    artifact: Artifact, recipe: Recipe, lowering: DeviceLowering, pool: PoolPlan
) -> Capabilities:
    spec, options = artifact.manifest.model, lowering.options
    return Capabilities(
        provider=recipe.provider,
        device=recipe.device,
        attention=lowering.attention,
        compute_dtype=lowering.dtype,
        kv_cache_dtype=lowering.dtype,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        kv_block_bytes=pool.block_bytes,
        kv_format=KVFormat.of(artifact, lowering.dtype, lowering.groups),
        max_model_len=pool.max_model_len,
        vocab_size=spec.num_logits,
        max_batch_rows=BUCKET_ROWS if recipe.bucketed else recipe.max_batch_rows,
        max_batch_tokens=BUCKET_TOKENS if recipe.bucketed else None,
        placement={},
        max_adapters=options.max_adapters,
        max_adapter_rank=options.max_adapter_rank if options.max_adapters else 0,
        takes_exact_logits=recipe.selects_logits,
        summarizes_logits=recipe.selects_logits,
        windows=lowering.groups.windows,
        features=check_hidden_layers(artifact, options),
        final_features=final_features(artifact, options),
        moves_blocks=spec.has_even_caches,
    )


def _session_options(options: LoadOptions, library: Path | None) -> Any:
    """Options of the model's session, with a library of operators if there is one."""
    chosen = quiet_options()
    chosen.intra_op_num_threads = options.threads or memory.physical_cores()
    if library is not None:
        chosen.register_custom_ops_library(str(library))
    return chosen
