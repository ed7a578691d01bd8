"""The `cpu` provider: ONNX Runtime's CPU execution provider with our own attention kernel.

Activations are float32. Attention runs in our C++ kernel where it was built, else in the
decomposed graph; `Probe.notes` and `Capabilities.attention` say which.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.graphs.passes.accuracy import set_accuracy, takes_int8
from onnxport.graphs.passes.gated_mlp import fuse_gated_mlp
from onnxport.graphs.passes.gated_silu import fuse_gated_silu
from onnxport.graphs.passes.input_norm import fuse_input_norm
from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.graphs.passes.kv_dtype import set_kv_dtype
from onnxport.graphs.passes.native import NativeLimits, keep_native
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import retype
from onnxport.providers import memory
from onnxport.providers.base import Capabilities, Device, Features, KVFormat, LoadOptions, Probe
from onnxport.providers.cpu.caches import (
    CACHE_DTYPES,
    TILE,
    CachePair,
    Layout,
    allocate,
    canonical_dtype,
    row_bytes,
    supported_dtypes,
)
from onnxport.providers.cpu.library import find_library, isa, matmul_isa, prefers_pairs
from onnxport.providers.host_options import refuse_device_options
from onnxport.providers.memory_plan import name_plans
from onnxport.providers.ort import (
    CPU_EXECUTION_PROVIDER,
    CacheTensor,
    ort_value,
    start_session,
    weight_bytes,
)
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.placement import placement
from onnxport.providers.pool import plan_pool

if TYPE_CHECKING:
    from onnxport.providers.cpu.lora import HostLora

logger = logging.getLogger(__name__)

COMPUTE_DTYPE = "float32"  # of activations
SPIN_US = 5000  # of a thread that waits for work, within a run; much longer than any of its gaps
BLOCK_SIZE = TILE  # tokens; the kernel takes multiples
KERNEL_LIMITS = NativeLimits(
    activation_dtypes=frozenset({"float32"}),
    cache_dtypes=frozenset(CACHE_DTYPES),
    max_head_size=256,
)
NO_KERNEL = (
    "the C++ attention kernel was not built (no C++17 compiler when onnxport was installed), so "
    "attention runs in the slower decomposed graph; install a compiler and reinstall onnxport"
)


class CpuProvider:
    """Loads artifacts on the host's processor."""

    name = "cpu"

    def probe(self) -> Probe:
        """See `providers.base.Provider.probe`."""
        try:
            import onnxruntime as ort
        except ImportError as error:
            return Probe(False, f"onnxruntime is missing ({error}): pip install 'onnxport[cpu]'")
        if CPU_EXECUTION_PROVIDER not in ort.get_available_providers():
            return Probe(False, f"onnxruntime {ort.__version__} has no CPU execution provider")
        has_kernel = find_library() is not None
        notes = () if has_kernel else (NO_KERNEL,)
        device = Device(processor_name(), memory.total_bytes(), "cpu")
        features = Features(
            attention=("custom", "decomposed") if has_kernel else ("decomposed",),
            dtypes=(COMPUTE_DTYPE,),
            kv_cache_dtypes=supported_dtypes(custom=has_kernel),
        )
        versions = {
            "onnxruntime": ort.__version__,
            "attention kernel": isa() or "not built",
            "int8 product kernel": matmul_isa() or "onnxruntime's",
        }
        return Probe(True, "", (device,), versions, notes, features)

    def load(self, artifact: Artifact, options: LoadOptions) -> OrtModel:
        """See `providers.base.Provider.load`."""
        _check(options)
        kernel = _choose_kernel(options)
        graph = artifact.load_graph("paged")
        is_exact = not takes_int8(graph, options.matmul_accuracy_level)
        cache_dtype, layout = _choose_cache(options, kernel, is_exact=is_exact)
        spec = artifact.manifest.model
        plan = partial(
            plan_pool,
            spec,
            options,
            block_size=_choose_block_size(options, kernel),
            item_bytes=row_bytes(cache_dtype, spec.head_size) / spec.head_size,
            free_bytes=memory.available_bytes(),
        )
        # What cannot fit at all is refused before the lowering reads and converts weights.
        plan(weight_bytes=artifact.manifest.files[WEIGHTS_FILE].size)
        custom = kernel is not None
        lora = None
        if options.max_adapters:
            from onnxport.providers.cpu.lora import HostLora

            lora = HostLora(artifact, options, custom=custom)
        choice = (cache_dtype, layout)
        lowered = list(_lower(graph, artifact, options, choice, lora))
        for step in lowered:
            logger.info("%s: %s", artifact.path.name, step)
        converted = {name: value for step in lowered for name, value in step.attached.items()}
        held_bytes = weight_bytes(lowered[-1].model, converted) + (lora.num_bytes() if lora else 0)
        pool = plan(weight_bytes=held_bytes)
        attached = {name: ort_value(value) for name, value in converted.items()}
        session_options = _session_options(options, kernel)
        session_options.add_external_initializers(list(attached), list(attached.values()))
        lowest = lowered[-1].model
        session = start_session(
            (name_plans(lowest) if custom else lowest).SerializeToString(),
            artifact.path,
            session_options,
        )
        capabilities = Capabilities(
            provider=self.name,
            device=processor_name(),
            attention="custom" if kernel else "decomposed",
            compute_dtype=COMPUTE_DTYPE,
            kv_cache_dtype=cache_dtype,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            kv_block_bytes=pool.block_bytes,
            kv_format=KVFormat.of(artifact, canonical_dtype(cache_dtype)),
            max_model_len=pool.max_model_len,
            vocab_size=spec.vocab_size,
            max_batch_rows=None,
            placement=placement(session),
            max_adapters=options.max_adapters,
            max_adapter_rank=options.max_adapter_rank if options.max_adapters else 0,
        )
        adapters = lora.adapters() if lora else None
        pairs, blocks = allocate(spec, pool, cache_dtype, layout)
        caches = _cache_tensors(pairs)
        return OrtModel(session, capabilities, caches, blocks, attached, adapters=adapters)


def processor_name() -> str:
    """The processor's name as the system reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _check(options: LoadOptions) -> None:
    """Refuse what the processor has not, and what could have no effect."""
    if options.dtype not in ("auto", COMPUTE_DTYPE):
        raise ProviderError(
            f"dtype is {options.dtype!r}; the cpu provider computes in {COMPUTE_DTYPE} only, ask "
            "for that or auto"
        )
    refuse_device_options("cpu", options)


def _choose_kernel(options: LoadOptions) -> Path | None:
    """The kernel library to use, None for the decomposed graph."""
    if options.attention not in (None, "custom", "decomposed"):
        raise ProviderError(
            f"the cpu provider has no {options.attention!r} attention, for ONNX Runtime ships no "
            "CPU kernel; ask for custom or decomposed"
        )
    kernel = None if options.attention == "decomposed" else find_library()
    if kernel is None and options.attention == "custom":
        raise ProviderError(f"custom attention was asked for, but {NO_KERNEL}")
    if kernel is None and options.attention is None:
        logger.warning("%s", NO_KERNEL)
    return kernel


def _choose_cache(
    options: LoadOptions, kernel: Path | None, *, is_exact: bool
) -> tuple[str, Layout]:
    """The type of the caches, and how they lie in memory.

    Where weights are multiplied with int8, bfloat16 in attention is no loss of precision: if the
    processor is faster at that, it is the automatic choice.
    """
    dtype = options.kv_cache_dtype
    allowed = supported_dtypes(custom=kernel is not None)
    if dtype not in ("auto", *allowed):
        raise ProviderError(
            f"kv_cache_dtype is {dtype!r}; the cpu provider's "
            f"{'custom' if kernel else 'decomposed'} attention stores {', '.join(allowed)} or auto"
        )
    if kernel is None:
        return "float32", "plain"
    in_pairs = not is_exact and prefers_pairs()
    if dtype == "auto":
        dtype = "bfloat16" if in_pairs else "float32"
    return dtype, "paired" if in_pairs and dtype == "bfloat16" else "tiled"


def _choose_block_size(options: LoadOptions, kernel: Path | None) -> int:
    size = BLOCK_SIZE if options.block_size is None else options.block_size
    if size < 1 or (kernel and size % BLOCK_SIZE):
        raise ProviderError(
            f"block_size is {size}; the cpu provider's kernel takes positive multiples of "
            f"{BLOCK_SIZE}, the decomposed graph any positive number"
        )
    return size


def _session_options(options: LoadOptions, kernel: Path | None) -> Any:
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
    return chosen


def _lower(
    graph: onnx.ModelProto,
    artifact: Artifact,
    options: LoadOptions,
    cache: tuple[str, Layout],
    lora: HostLora | None,
) -> Iterator[PassResult]:
    """Apply the passes in turn; the last result holds the graph to run."""
    cache_dtype, layout = cache
    step = retype(graph, artifact.read_tensor)
    yield step
    if options.matmul_accuracy_level is not None:
        step = set_accuracy(step.model, options.matmul_accuracy_level)
        yield step
    if lora is not None:
        step = lora.lower(step.model)
        yield step
    if layout != "plain":
        step = fuse_gated_silu(step.model)
        yield step
        if matmul_isa() is not None:
            step = use_int8_matmul(step.model)
            yield step
            step = fuse_gated_mlp(step.model)
            yield step
            step = fuse_input_norm(step.model)
            yield step
        step = set_kv_dtype(step.model, cache_dtype)
        yield step
        yield keep_native(step.model, replace(KERNEL_LIMITS, attributes={"cache_layout": layout}))
    else:
        from onnxport.graphs.passes.decompose import decompose

        yield decompose(step.model)


def _cache_tensors(pairs: Sequence[CachePair]) -> list[CacheTensor]:
    """Each layer's caches under the graph's names, in the same memory."""
    return [
        CacheTensor(past(layer), present(layer), ort_value(cache))
        for layer, pair in enumerate(pairs)
        for cache, past, present in zip(
            pair,
            (contract.past_key, contract.past_value),
            (contract.present_key, contract.present_value),
            strict=True,
        )
    ]
