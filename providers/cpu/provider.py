"""The `cpu` provider: ONNX Runtime's CPU execution provider with our own attention kernel.

Activations are float32. Attention runs in our C++ kernel where it was built, else in the
decomposed graph; `Probe.notes` and `Capabilities.attention` say which.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.providers import memory
from onnxport.providers.base import Capabilities, Device, Features, KVFormat, LoadOptions, Probe
from onnxport.providers.cpu.caches import (
    TILE,
    CachePair,
    Layout,
    allocate,
    canonical_dtype,
    row_bytes,
    supported_dtypes,
)
from onnxport.providers.cpu.library import (
    converts_half,
    find_library,
    isa,
    matmul_isa,
    prefers_pairs,
)
from onnxport.providers.cpu.settling import settle_later
from onnxport.providers.graph_cache import GraphCache, LoweredGraph, graph_key
from onnxport.providers.host_options import refuse_device_options
from onnxport.providers.ort import (
    CPU_EXECUTION_PROVIDER,
    CacheTensor,
    ort_value,
    start_session,
)
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.placement import placement
from onnxport.providers.pool import plan_pool

if TYPE_CHECKING:
    import onnx

    from onnxport.providers.cpu.lora import HostLora

logger = logging.getLogger(__name__)

COMPUTE_DTYPE = "float32"  # of activations
SPIN_US = 5000  # of a thread that waits for work, within a run; much longer than any of its gaps
BLOCK_SIZE = TILE  # tokens; the kernel takes multiples
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
        kept = _graph_cache(artifact, options, custom=kernel is not None)
        known = kept.read() if kept else None
        graph = artifact.load_graph("paged") if known is None else None
        is_exact = _is_exact(graph, options) if known is None else known.is_exact
        cache_dtype, layout = choice = _choose_cache(options, kernel, is_exact=is_exact)
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
        lora = None
        if options.max_adapters:
            from onnxport.providers.cpu.lora import HostLora

            lora = HostLora(artifact, options, custom=kernel is not None)
        if known is None:
            known, converted = _lower(graph, artifact, options, choice, lora, is_exact=is_exact)
            if kept:
                kept.write(known)
        else:
            logger.info("%s: lowered by an earlier start", artifact.path.name)
            converted = known.convert(artifact)
        held_bytes = known.stored_bytes + sum(value.nbytes for value in converted.values())
        pool = plan(weight_bytes=held_bytes + (lora.num_bytes() if lora else 0))
        attached = {name: ort_value(value) for name, value in converted.items()}
        session_options = _session_options(options, kernel)
        session_options.add_external_initializers(list(attached), list(attached.values()))
        session = start_session(known.model, artifact.path, session_options)
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
            takes_exact_logits=contract.EXACT_LOGITS in {one.name for one in session.get_inputs()},
        )
        adapters = lora.adapters() if lora else None
        pairs, blocks = allocate(spec, pool, cache_dtype, layout)
        caches = _cache_tensors(pairs)
        model = OrtModel(
            session, capabilities, caches, blocks, attached, adapters=adapters, is_host=True
        )
        if kernel is not None:
            settle_later(model, kernel)
        return model


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

    Where weights are multiplied with int8, 16 bits in attention are no loss of precision: the
    automatic choice is bfloat16 if the processor multiplies it, else float16 if it converts that.
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
        half = "float32" if is_exact or not converts_half() else "float16"
        dtype = "bfloat16" if in_pairs else half
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


def _graph_cache(artifact: Artifact, options: LoadOptions, *, custom: bool) -> GraphCache | None:
    """Where the lowered graph is kept; None where it is not, as with adapters."""
    if options.graph_cache is None or options.max_adapters:
        return None
    import onnxruntime as ort

    choices = {
        "provider": "cpu",
        "onnxruntime": ort.__version__,
        "attention": "custom" if custom else "decomposed",
        "kv_cache_dtype": options.kv_cache_dtype,
        "matmul_accuracy_level": options.matmul_accuracy_level,
        "matmul_isa": matmul_isa(),
        "prefers_pairs": prefers_pairs(),
        "converts_half": converts_half(),
        "coarse_head": options.coarse_head,
    }
    graphs = Path(contract.__file__).parent
    key = graph_key(artifact, (graphs, graphs / "passes", Path(__file__).parent), choices)
    return None if key is None else GraphCache(options.graph_cache, key)


def _is_exact(graph: onnx.ModelProto | None, options: LoadOptions) -> bool:
    """Whether all products are to be in float32."""
    from onnxport.graphs.passes.accuracy import takes_int8

    assert graph is not None
    return not takes_int8(graph, options.matmul_accuracy_level)


def _lower(
    graph: onnx.ModelProto | None,
    artifact: Artifact,
    options: LoadOptions,
    choice: tuple[str, Layout],
    lora: HostLora | None,
    *,
    is_exact: bool,
) -> tuple[LoweredGraph, dict[str, NDArray[Any]]]:
    """Lower the graph; also the contents of the initializers that are attached to it."""
    # Its passes import onnx.
    from onnxport.providers.cpu import lowering

    assert graph is not None
    int8 = matmul_isa() is not None
    steps = list(lowering.lower(graph, artifact, options, choice, lora, int8=int8))
    for step in steps:
        logger.info("%s: %s", artifact.path.name, step)
    lowered = lowering.lowered_graph(
        artifact, steps, is_exact=is_exact, is_native=choice[1] != "plain"
    )
    return lowered, lowering.converted(steps)


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
