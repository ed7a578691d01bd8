"""The `openvino` provider: Intel's own runtime, reading the artifact's ONNX graph.

It runs on the CPU. A GPU and an NPU are found and named, and refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import attribute_int
from onnxport.graphs.passes.int8_matmul import INT8_LEVEL, MATMUL_NBITS
from onnxport.graphs.spec import ArchSpec
from onnxport.providers import memory
from onnxport.providers.base import (
    Capabilities,
    Device,
    DeviceKind,
    Features,
    KVFormat,
    LoadOptions,
    Probe,
)
from onnxport.providers.host_options import refuse_device_options
from onnxport.providers.openvino.caches import CacheFormat, CachePair, allocate, read_format
from onnxport.providers.openvino.convert import (
    RELEASE,
    Weights,
    collect_weights,
    convert,
    lower,
)
from onnxport.providers.openvino.model import Graph, OpenVinoModel
from onnxport.providers.pool import PoolPlan, plan_pool

logger = logging.getLogger(__name__)

INSTALL: Final = "pip install 'onnxport[openvino]'"
KV_PRECISIONS: Final = {  # kv_cache_dtype -> KV_CACHE_PRECISION
    "int8": "u8",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
}
NAMES: Final = {  # OpenVINO's element types -> ours, of activations and caches
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "u8": "int8",
}
PRECISIONS: Final = {1: "f32", 2: "f16", 3: "bf16"}  # matmul_accuracy_level -> inference precision
HINTS: Final = {"float32": "f32", "bfloat16": "bf16"}  # dtype -> inference precision
CAPABILITIES: Final = {"float32": "FP32", "bfloat16": "BF16"}  # dtype -> optimization capability
# 2026.4 offers float16 where the processor has it (AVX512-FP16), but every graph with paged
# attention that was tried there gave NaN or logits without any relation to the right ones.
NO_FLOAT16: Final = (
    "OpenVINO's CPU plugin computes paged attention in float16 wrongly; ask for float32 or bfloat16"
)
CACHES: Final = {  # dtype of activations -> the caches that the plugin has for it
    "float32": ("int8", "float16", "float32"),
    "bfloat16": ("int8", "bfloat16"),
}
FLOAT32_CACHES: Final = ("float16", "float32")
KINDS: Final[Mapping[str, DeviceKind]] = {"CPU": "cpu", "GPU": "gpu", "NPU": "npu"}
FEW_TOKENS: Final = 24  # up to which int8 beats AMX; measured on Sapphire Rapids, two cores
NO_CACHE_THERE: Final = (
    "its KV cache would have to live in device memory, which this version does not do"
)
REFUSED: Final = {  # device kind -> why it cannot be used
    "GPU": NO_CACHE_THERE,
    "NPU": "its plugin compiles static shapes and has no paged attention",
}


class OpenVinoProvider:
    """Loads artifacts with OpenVINO.

    Args:
        device: as OpenVINO names it, in any case: cpu, gpu, gpu.1, npu.
    """

    name = "openvino"

    def __init__(self, device: str = "cpu") -> None:
        self._device = device.upper()

    def probe(self) -> Probe:
        """See `providers.base.Provider.probe`."""
        try:
            import openvino as ov
        except ImportError as error:
            return Probe(False, f"openvino is missing ({error}): {INSTALL}")
        version = ov.__version__.split("-")[0]
        versions = {"openvino": version}
        if version.rpartition(".")[0] != RELEASE:
            reason = (
                f"openvino {version} is installed; the inputs of its paged attention change with "
                f"every release, and those of {RELEASE} are known: {INSTALL}"
            )
            return Probe(False, reason, (), versions)
        core = ov.Core()
        # The one that is used comes first.
        names = sorted(core.available_devices, key=lambda name: name != self._device)
        devices = tuple(_device(core, name) for name in names)
        refused = {
            name: f"{name} is not used: {REFUSED[kind]}"
            for name in (*core.available_devices, self._device)
            if (kind := name.partition(".")[0]) in REFUSED
        }
        reason = refused.pop(self._device, "")
        if not reason and self._device not in core.available_devices:
            found = ", ".join(core.available_devices)
            reason = f"openvino finds no {self._device} here; it finds {found}"
        features = None if reason else _features(core)
        return Probe(not reason, reason, devices, versions, tuple(refused.values()), features)

    def load(self, artifact: Artifact, options: LoadOptions) -> OpenVinoModel:
        """See `providers.base.Provider.load`."""
        if reason := self.probe().reason:
            raise ProviderError(reason)
        _check(options)
        import openvino as ov

        free_bytes = memory.available_bytes()
        spec = artifact.manifest.model
        lowered = list(lower(artifact))
        for step in lowered:
            logger.info("%s: %s", artifact.path.name, step)
        model = lowered[-1].model
        attached = {name: value for step in lowered for name, value in step.attached.items()}
        weights = collect_weights(artifact, model, attached)
        converted = convert(model, weights)
        core = ov.Core()
        natural = core.get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        level = _accuracy_level(model, options.matmul_accuracy_level)
        graphs = [
            Graph(_compile(core, converted.model, config), most_tokens)
            for most_tokens, config in _configs(options, level, natural)
        ]
        _check_precision(graphs[-1].compiled, options)
        form = _cache_format([graph.compiled for graph in graphs], spec, options)
        token_bytes = form.layer_bytes / form.block_size
        pool = plan_pool(
            spec,
            options,
            block_size=form.block_size,
            item_bytes=token_bytes / (2 * spec.num_kv_heads * spec.head_size),
            free_bytes=free_bytes,
            weight_bytes=_weight_bytes(weights, len(graphs)),
        )
        pairs, blocks = allocate(form, spec.num_layers, pool.num_blocks)
        capabilities = _capabilities(artifact, core, graphs[-1].compiled, form, pool)
        return OpenVinoModel(graphs, capabilities, _tensors(pairs, form), blocks, converted.memory)


def _capabilities(
    artifact: Artifact, core: Any, compiled: Any, form: CacheFormat, pool: PoolPlan
) -> Capabilities:
    """What was loaded; `compiled` is the graph that takes any number of tokens."""
    spec = artifact.manifest.model
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    return Capabilities(
        provider=OpenVinoProvider.name,
        device=core.get_property("CPU", "FULL_DEVICE_NAME"),
        attention="native",
        compute_dtype=NAMES[precision],
        kv_cache_dtype=form.dtype,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        kv_block_bytes=pool.block_bytes,
        kv_format=KVFormat(
            artifact.manifest.fingerprint,
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_size,
            form.canonical_dtype,
        ),
        max_model_len=pool.max_model_len,
        vocab_size=spec.vocab_size,
        max_batch_rows=None,
        placement=_placement(compiled),
    )


def _device(core: Any, name: str) -> Device:
    """A device by its full name; memory where OpenVINO says, and the host's for the CPU."""
    total = memory.total_bytes() if name == "CPU" else None
    if "GPU_DEVICE_TOTAL_MEM_SIZE" in core.get_property(name, "SUPPORTED_PROPERTIES"):
        total = int(core.get_property(name, "GPU_DEVICE_TOTAL_MEM_SIZE"))
    kind = KINDS.get(name.partition(".")[0], "npu")  # an accelerator of another make
    return Device(f"{name}: {core.get_property(name, 'FULL_DEVICE_NAME')}", total, kind)


def _features(core: Any) -> Features:
    """What the CPU plugin can do on this processor; its own choice of a type comes first."""
    import openvino as ov

    able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    natural = core.get_property("CPU", "INFERENCE_PRECISION_HINT")
    dtypes = [dtype for dtype, capability in CAPABILITIES.items() if capability in able]
    dtypes.sort(key=lambda dtype: getattr(ov.Type, HINTS[dtype]) != natural)
    caches = [name for name in KV_PRECISIONS if any(name in CACHES[dtype] for dtype in dtypes)]
    return Features(("native",), tuple(dtypes), tuple(caches))


def _check(options: LoadOptions) -> None:
    """Refuse what OpenVINO has not, before anything is read."""
    if options.attention not in (None, "native"):
        raise ProviderError(
            f"the openvino provider has no {options.attention!r} attention; it runs OpenVINO's "
            "own, ask for native or leave it out"
        )
    if options.kv_cache_dtype not in ("auto", *KV_PRECISIONS):
        raise ProviderError(
            f"kv_cache_dtype is {options.kv_cache_dtype!r}; the openvino provider stores "
            f"{', '.join(KV_PRECISIONS)} or auto"
        )
    refuse_device_options("openvino", options)
    _check_dtype(options)
    level = options.matmul_accuracy_level
    kind = options.kv_cache_dtype
    if kind in FLOAT32_CACHES and PRECISIONS.get(level or 0, "f32") != "f32":
        raise ProviderError(
            f"kv_cache_dtype is {kind!r} and matmul_accuracy_level is {level}; OpenVINO keeps a "
            f"{kind} cache only where it computes in float32: leave the level out, or set it to 1"
        )


def _check_dtype(options: LoadOptions) -> None:
    """Refuse a type of activations that OpenVINO has not, or that another option contradicts."""
    if options.dtype == "auto":
        return
    if options.dtype == "float16":
        raise ProviderError(f"dtype is 'float16'; {NO_FLOAT16}")
    if options.dtype not in HINTS:
        raise ProviderError(
            f"dtype is {options.dtype!r}; the openvino provider computes in {', '.join(HINTS)}, "
            "ask for one of them or auto"
        )
    level = options.matmul_accuracy_level
    if PRECISIONS.get(level or 0, HINTS[options.dtype]) != HINTS[options.dtype]:
        raise ProviderError(
            f"dtype is {options.dtype!r} and matmul_accuracy_level is {level}, which computes in "
            f"{NAMES[PRECISIONS[level or 0]]}; OpenVINO has one type for both, leave one out"
        )
    if options.kv_cache_dtype not in ("auto", *CACHES[options.dtype]):
        raise ProviderError(
            f"kv_cache_dtype is {options.kv_cache_dtype!r} and dtype is {options.dtype!r}; where "
            f"OpenVINO computes in that it stores {', '.join(CACHES[options.dtype])}: ask for one "
            "of them, or leave one of the two out"
        )


def _check_precision(compiled: Any, options: LoadOptions) -> None:
    """Refuse another type than the one that was asked for, and one that does not work."""
    found = NAMES[compiled.get_property("INFERENCE_PRECISION_HINT").to_string()]
    if options.dtype not in ("auto", found):
        raise ProviderError(
            f"dtype is {options.dtype!r}, but on this processor OpenVINO made a graph in {found}; "
            "ask for that, or for auto"
        )
    if found == "float16":
        raise ProviderError(
            f"matmul_accuracy_level is {options.matmul_accuracy_level}; {NO_FLOAT16}, or leave the "
            "level out"
        )


def _accuracy_level(model: onnx.ModelProto, asked: int | None) -> int:
    """What products may round activations to; see graphs.passes.accuracy.

    Without an answer of the caller it is the most precise level of the artifact's MatMulNBits.
    Int8 is a level of that operator alone: where there is none, it asks for nothing.
    """
    own = [
        attribute_int(node, "accuracy_level", 0)
        for node in model.graph.node
        if node.op_type == MATMUL_NBITS
    ]
    level = min(own, default=0) if asked is None else asked
    return level if own or level in PRECISIONS else 0


def _configs(
    options: LoadOptions, level: int, natural: str
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """The plugin's properties of each graph to compile, and the most tokens it is for.

    Where the processor multiplies 16-bit matrices (AMX), that is OpenVINO's choice, and it is the
    fastest for many rows; for few, activations in int8 are. An artifact that allows int8 gets both.

    Args:
        options: `threads`, `dtype` and `kv_cache_dtype` are used.
        level: what MatMulNBits may round its activations to, see graphs.passes.accuracy.
        natural: the precision that OpenVINO chooses by itself on this processor.
    """
    config: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": options.threads or memory.physical_cores(),
        "NUM_STREAMS": 1,
    }
    precision = HINTS.get(options.dtype, PRECISIONS.get(level))
    if options.kv_cache_dtype in FLOAT32_CACHES:
        precision = "f32"
    if level in PRECISIONS:
        config["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # no activations in int8
    if options.kv_cache_dtype != "auto":
        config["KV_CACHE_PRECISION"] = KV_PRECISIONS[options.kv_cache_dtype]
    # Other caches follow the precision of the graph, and the two could not share them.
    shared = options.kv_cache_dtype in ("auto", "int8")
    if precision is None and level == INT8_LEVEL and natural != "f32" and shared:
        yield FEW_TOKENS, {**config, "INFERENCE_PRECISION_HINT": "f32"}
    if precision is not None:
        config["INFERENCE_PRECISION_HINT"] = precision
    yield None, config


def _compile(core: Any, model: Any, config: Mapping[str, Any]) -> Any:
    try:
        return core.compile_model(model, "CPU", config)
    except Exception as error:
        raise ProviderError(
            f"OpenVINO could not compile the graph for the CPU with {dict(config)}: {error}"
        ) from error


def _cache_format(graphs: Sequence[Any], spec: ArchSpec, options: LoadOptions) -> CacheFormat:
    """What the plugin made of the caches, held to what was asked for."""
    found = [
        [_port(compiled.input(name(0))) for name in (contract.past_key, contract.past_value)]
        for compiled in graphs
    ]
    assert found.count(found[0]) == len(found), f"graphs do not share a cache: {found}"
    (key_type, key), (value_type, value) = found[0]
    if key_type != value_type or key_type not in NAMES:
        raise ProviderError(
            f"OpenVINO chose {key_type} keys and {value_type} values for the KV cache; known are "
            f"{', '.join(NAMES)}, both alike. Ask for another kv_cache_dtype"
        )
    dtype = NAMES[key_type]
    if options.kv_cache_dtype not in ("auto", dtype):
        raise ProviderError(
            f"kv_cache_dtype is {options.kv_cache_dtype!r}, but on this processor OpenVINO made "
            f"a cache of {dtype}; ask for that, or for auto"
        )
    form = read_format(spec, dtype, key, value)
    if options.block_size not in (None, form.block_size):
        raise ProviderError(
            f"block_size is {options.block_size}; OpenVINO's CPU plugin stores blocks of "
            f"{form.block_size} tokens, ask for that or leave it out"
        )
    return form


def _port(port: Any) -> tuple[str, list[int]]:
    """The element type of a cache input, and the sizes of one of its blocks."""
    dims = list(port.get_partial_shape())[1:]
    return port.get_element_type().to_string(), [dim.get_length() for dim in dims]


def _weight_bytes(weights: Weights, num_graphs: int) -> int:
    """Host memory that the weights take: as constants, and packed for the kernels of each graph."""
    return (1 + num_graphs) * sum(value.nbytes for value in weights.values())


def _placement(compiled: Any) -> Mapping[str, int]:
    """Device -> operators that it really runs; constants and inputs are not counted."""
    kinds = [node.get_rt_info()["layerType"] for node in compiled.get_runtime_model().get_ops()]
    idle = {"Const", "Input", "Output"}
    count = sum(kind.astype(str) not in idle for kind in kinds)
    return dict.fromkeys(compiled.get_property("EXECUTION_DEVICES"), count)


def _tensors(pairs: list[CachePair], form: CacheFormat) -> dict[str, Any]:
    """The caches by input name, as openvino.Tensor over the same memory."""
    import openvino as ov

    names = {name: kind for kind, name in NAMES.items()}
    kind = getattr(ov.Type, names[form.dtype])
    tensors = {}
    for layer, pair in enumerate(pairs):
        for name, cache in zip((contract.past_key, contract.past_value), pair, strict=True):
            raw = cache.view(np.uint16) if form.dtype == "bfloat16" else cache
            tensors[name(layer)] = ov.Tensor(raw, ov.Shape(list(cache.shape)), kind)
    return tensors
