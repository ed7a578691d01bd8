"""The `cpu` provider: ONNX Runtime's CPU execution provider with our own attention kernel.

Activations are float32. Attention runs in our C++ kernel where it was built, else in the
decomposed graph; `Probe.notes` and `Capabilities.attention` say which.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxport.cache_rows import row_bytes
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.spec import ArchSpec
from onnxport.providers import memory
from onnxport.providers.base import Capabilities, Device, KVFormat, LoadOptions, Probe
from onnxport.providers.cpu import library
from onnxport.providers.cpu.cache_pages import CachePages
from onnxport.providers.cpu.caches import (
    SMALL_BYTES,
    LayerCaches,
    allocate,
    supported_dtypes,
)
from onnxport.providers.cpu.choices import (
    COMPUTE_DTYPE,
    NO_KERNEL,
    check,
    choose_block_size,
    choose_cache,
    choose_kernel,
)
from onnxport.providers.cpu.graph_source import GraphSource
from onnxport.providers.cpu.settling import settle_later
from onnxport.providers.cpu.state_pools import allocate_states
from onnxport.providers.features import Features
from onnxport.providers.hidden_states import check_hidden_layers, final_features
from onnxport.providers.imports import unless_interrupted, unless_left_behind
from onnxport.providers.latents import refuse_latent_adapters
from onnxport.providers.layer_groups import CacheKind, cache_kinds
from onnxport.providers.mixed_layers import refuse_mixed_adapters
from onnxport.providers.ort import (
    CPU,
    CPU_EXECUTION_PROVIDER,
    CacheTensor,
    ort_value,
    start_session,
)
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.placement import placement
from onnxport.providers.pool import PoolPlan, least_bytes, plan_pool
from onnxport.providers.states import plan_memory

if TYPE_CHECKING:
    from onnxport.providers.host_lora import HostLora
    from onnxport.providers.step_memory import StepMemory

SPIN_US = 5000  # of a thread that waits for work, within a run; much longer than any of its gaps


class CpuProvider:
    """Loads artifacts on the host's processor."""

    name = "cpu"

    def probe(self) -> Probe:
        """See `providers.base.Provider.probe`."""
        try:
            import onnxruntime as ort

            unless_left_behind(ort)
        except ImportError as error:
            unless_interrupted(error)
            return Probe(False, f"onnxruntime is missing ({error}): pip install 'onnxport[cpu]'")
        if CPU_EXECUTION_PROVIDER not in ort.get_available_providers():
            return Probe(False, f"onnxruntime {ort.__version__} has no CPU execution provider")
        has_kernel = library.find_library() is not None
        notes = () if has_kernel else (NO_KERNEL,)
        device = Device(processor_name(), memory.total_bytes(), "cpu")
        features = Features(
            attention=("custom", "decomposed") if has_kernel else ("decomposed",),
            dtypes=(COMPUTE_DTYPE,),
            kv_cache_dtypes=supported_dtypes(custom=has_kernel),
            has_experts=True,
            has_other_experts=True,
            has_states=True,
            has_latents=True,
            has_mixed_layers=True,
            tells_states=True,
        )
        versions = {
            "onnxruntime": ort.__version__,
            "attention kernel": library.isa() or "not built",
            "int8 product kernel": library.matmul_isa() or "onnxruntime's",
        }
        return Probe(True, "", (device,), versions, notes, features)

    def load(self, artifact: Artifact, options: LoadOptions) -> OrtModel:
        """See `providers.base.Provider.load`."""
        check(options)
        check_hidden_layers(artifact, options)
        spec = artifact.manifest.model
        kernel = choose_kernel(options, spec)
        source = GraphSource(artifact, options, custom=kernel is not None)
        cache_dtype, layout = cache = choose_cache(
            options, kernel, is_exact=source.is_exact, latent=spec.latent is not None
        )
        free_bytes = memory.available_bytes()
        groups = source.groups
        plan = _pool_planner(artifact, options, kernel, cache_dtype, groups, free_bytes)
        plan_both = partial(plan_memory, spec, options, free_bytes, plan)
        # What cannot fit at all is refused before the lowering reads and converts weights.
        plan_both(least_bytes(artifact))
        lora = _host_lora(artifact, options, kernel)
        graph, converted = source.lowered(cache, lora)
        held_bytes = graph.stored_bytes + sum(value.nbytes for value in converted.values())
        held_bytes += lora.num_bytes() if lora else 0
        pool, states = plan_both(held_bytes)
        attached = {name: ort_value(value) for name, value in converted.items()}
        session_options = _session_options(options, kernel, attached)
        session = start_session(graph.model, artifact.path, session_options)
        caches, blocks = allocate(spec, groups, pool, cache_dtype, layout)
        pools, matrices = allocate_states(spec, states)
        model = OrtModel(
            session,
            replace(
                _capabilities(session, artifact, options, kernel, pool, cache_dtype, groups),
                int8_products=not source.is_exact,
                state_slots=states.num_slots,
                state_bytes=states.slot_bytes,
                host_states=True,
            ),
            [*_cache_tensors(spec, caches, groups), *pools],
            blocks,
            attached,
            adapters=lora.adapters() if lora else None,
            is_host=True,
            step_memory=None
            if kernel
            else _step_memory(artifact, pool, free_bytes - held_bytes - states.num_bytes),
        )
        if kernel is not None:
            arrays = [array for place in caches.values() for array in place]
            pages = CachePages(arrays, SMALL_BYTES), CachePages(matrices)
            has_planes = model.capabilities.takes_exact_logits
            settle_later(model, kernel, pages, has_planes=has_planes)
        return model


def processor_name() -> str:
    """The processor's name as the system reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _pool_planner(
    artifact: Artifact,
    options: LoadOptions,
    kernel: Path | None,
    cache_dtype: str,
    groups: LayerGroups,
    free_bytes: int,
) -> partial[PoolPlan]:
    """What plans the pool beside `weight_bytes`."""
    spec = artifact.manifest.model
    return partial(
        plan_pool,
        spec,
        options,
        block_size=choose_block_size(options, kernel),
        item_bytes=row_bytes(cache_dtype, spec.head_size) / spec.head_size,
        row_bytes=partial(row_bytes, cache_dtype),
        free_bytes=free_bytes,
        groups=groups,
    )


def _step_memory(artifact: Artifact, pool: PoolPlan, left_bytes: int) -> StepMemory:
    """What steps of the decomposed graph may take of what the weights leave."""
    from onnxport.providers.step_memory import StepMemory

    item_bytes = row_bytes(COMPUTE_DTYPE, 1)
    return StepMemory.plan(artifact.manifest.model, pool, item_bytes, left_bytes)


def _host_lora(artifact: Artifact, options: LoadOptions, kernel: Path | None) -> HostLora | None:
    """What adds adapters; None where there are none."""
    if not options.max_adapters:
        return None
    refuse_latent_adapters(artifact, options)
    refuse_mixed_adapters(artifact, options)
    from onnxport.providers.device_arrays import DeviceArrays
    from onnxport.providers.host_lora import HostLora

    return HostLora(artifact, options, DeviceArrays(CPU), custom=kernel is not None)


def _session_options(options: LoadOptions, kernel: Path | None, attached: Mapping[str, Any]) -> Any:
    """ONNX Runtime's, with our operators and the initializers that are attached to the graph."""
    import onnxruntime as ort

    chosen = ort.SessionOptions()
    chosen.log_severity_level = 3
    chosen.intra_op_num_threads = options.threads or memory.physical_cores()
    # Threads that spin after a run would take the processors from sampling and grammars.
    chosen.add_session_config_entry("session.force_spinning_stop", "1")
    # Nor may they spin from the start until there is a run, while weights are packed.
    chosen.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    if kernel is not None:
        chosen.register_custom_ops_library(str(kernel))
        operators = library.load_library(kernel)
        operators.onnxport_cpu_set_session_threads(chosen.intra_op_num_threads)
    chosen.add_external_initializers(list(attached), list(attached.values()))
    return chosen


def _capabilities(
    session: Any,
    artifact: Artifact,
    options: LoadOptions,
    kernel: Path | None,
    pool: PoolPlan,
    cache_dtype: str,
    groups: LayerGroups,
) -> Capabilities:
    """What was loaded."""
    inputs = {one.name for one in session.get_inputs()}
    return Capabilities(
        provider=CpuProvider.name,
        device=processor_name(),
        attention="custom" if kernel else "decomposed",
        compute_dtype=COMPUTE_DTYPE,
        kv_cache_dtype=cache_dtype,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        kv_block_bytes=pool.block_bytes,
        kv_format=KVFormat.of(artifact, cache_dtype, groups),
        max_model_len=pool.max_model_len,
        vocab_size=artifact.manifest.model.num_logits,
        max_batch_rows=None,
        placement=placement(session),
        max_adapters=options.max_adapters,
        max_adapter_rank=options.max_adapter_rank if options.max_adapters else 0,
        takes_exact_logits=contract.EXACT_LOGITS in inputs,
        summarizes_logits=contract.SUMMARY_SCALES in inputs,
        windows=groups.windows,
        moves_blocks=artifact.manifest.model.has_even_caches,
        features=check_hidden_layers(artifact, options),
        final_features=final_features(artifact, options),
    )


def _cache_tensors(
    spec: ArchSpec, caches: Mapping[CacheKind, LayerCaches], groups: LayerGroups
) -> list[CacheTensor]:
    """Each layer's caches under the graph's names, in the same memory; see `LayerGroups`."""
    return [
        CacheTensor(past, present, ort_value(cache))
        for layer, kind in zip(spec.cached_layers, cache_kinds(spec, groups), strict=True)
        for cache, (past, present) in zip(
            caches[kind], contract.cache_names(layer, len(caches[kind])), strict=True
        )
    ]
