"""The `openvino` provider: Intel's own runtime, reading the artifact's ONNX graph.

It runs on the CPU. A GPU and an NPU are found and named, and refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from onnxport.providers import memory
from onnxport.providers.base import Capabilities, Device, KVFormat, LoadOptions, Probe
from onnxport.providers.openvino.caches import CacheFormat, CachePair, allocate, read_format
from onnxport.providers.openvino.convert import (
    RELEASE,
    Weights,
    collect_weights,
    convert,
    lower,
)
from onnxport.providers.openvino.model import OpenVinoModel
from onnxport.providers.pool import plan_pool

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
NO_CACHE_THERE: Final = (
    "its KV cache would have to live in device memory, which this version does not do"
)
REFUSED: Final = {  # device kind -> why it cannot be used
    "GPU": NO_CACHE_THERE,
    "NPU": "its plugin compiles static shapes and has no paged attention",
}


class OpenVinoProvider:
    """Loads artifacts with OpenVINO."""

    name = "openvino"

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
        devices = tuple(_device(core, name) for name in core.available_devices)
        notes = tuple(
            f"{name} is not used: {REFUSED[kind]}"
            for name in core.available_devices
            if (kind := name.partition(".")[0]) in REFUSED
        )
        if "CPU" not in core.available_devices:
            return Probe(False, "openvino finds no CPU plugin", devices, versions, notes)
        return Probe(True, "", devices, versions, notes)

    def load(self, artifact: Artifact, options: LoadOptions) -> OpenVinoModel:
        """See `providers.base.Provider.load`."""
        import openvino as ov

        config = _config(options)
        free_bytes = memory.available_bytes()
        spec = artifact.manifest.model
        lowered = list(lower(artifact))
        for step in lowered:
            logger.info("%s: %s", artifact.path.name, step)
        attached = {name: value for step in lowered for name, value in step.attached.items()}
        weights = collect_weights(artifact, lowered[-1].model, attached)
        converted = convert(lowered[-1].model, weights)
        core = ov.Core()
        try:
            compiled = core.compile_model(converted.model, "CPU", config)
        except Exception as error:
            raise ProviderError(
                f"OpenVINO {ov.__version__} could not compile the graph for the CPU with "
                f"{config}: {error}"
            ) from error
        form = _cache_format(compiled, spec, options)
        token_bytes = form.layer_bytes / form.block_size
        pool = plan_pool(
            spec,
            options,
            block_size=form.block_size,
            item_bytes=token_bytes / (2 * spec.num_kv_heads * spec.head_size),
            free_bytes=free_bytes,
            weight_bytes=_weight_bytes(weights),
        )
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        capabilities = Capabilities(
            provider=self.name,
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
        pairs, blocks = allocate(form, spec.num_layers, pool.num_blocks)
        tensors = _tensors(pairs, form)
        return OpenVinoModel(compiled, capabilities, tensors, blocks, converted.memory)


def _device(core: Any, name: str) -> Device:
    """A device by its full name; memory where OpenVINO says, and the host's for the CPU."""
    total = memory.available_bytes() if name == "CPU" else None
    if "GPU_DEVICE_TOTAL_MEM_SIZE" in core.get_property(name, "SUPPORTED_PROPERTIES"):
        total = int(core.get_property(name, "GPU_DEVICE_TOTAL_MEM_SIZE"))
    return Device(f"{name}: {core.get_property(name, 'FULL_DEVICE_NAME')}", total)


def _config(options: LoadOptions) -> Mapping[str, Any]:
    """The plugin's properties; what is left out is the plugin's choice."""
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
    config: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": options.threads or memory.physical_cores(),
        "NUM_STREAMS": 1,
    }
    precision = PRECISIONS.get(options.matmul_accuracy_level or 0)
    if options.kv_cache_dtype == "float32":
        if precision not in (None, "f32"):
            raise ProviderError(
                f"kv_cache_dtype is 'float32' and matmul_accuracy_level is "
                f"{options.matmul_accuracy_level}; OpenVINO keeps a float32 cache only where it "
                "computes in float32: leave the level out, or set it to 1"
            )
        precision = "f32"
    if precision is not None:
        config["INFERENCE_PRECISION_HINT"] = precision
    if options.matmul_accuracy_level in PRECISIONS:
        config["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0  # no activations in int8
    if options.kv_cache_dtype != "auto":
        config["KV_CACHE_PRECISION"] = KV_PRECISIONS[options.kv_cache_dtype]
    return config


def _cache_format(compiled: Any, spec: ArchSpec, options: LoadOptions) -> CacheFormat:
    """What the plugin made of the caches, held to what was asked for."""
    found = []
    for name in (contract.past_key(0), contract.past_value(0)):
        port = compiled.input(name)
        dims = [dim.get_length() for dim in list(port.get_partial_shape())[1:]]
        found.append((port.get_element_type().to_string(), dims))
    (key_type, key), (value_type, value) = found
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


def _weight_bytes(weights: Weights) -> int:
    """Host memory that the weights take: as constants, and once more packed for the kernels."""
    return 2 * sum(value.nbytes for value in weights.values())


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
