"""OpenVINO's plugin for processors: caches in host memory, uint8 unless told otherwise."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import OptionError, ProviderError
from onnxport.graphs.contract import INT8_LEVEL
from onnxport.providers import memory
from onnxport.providers.base import LoadOptions
from onnxport.providers.features import Features
from onnxport.providers.host_options import refuse_device_options
from onnxport.providers.openvino.caches import CacheFormat, allocate
from onnxport.providers.openvino.plugin import NAMES, PRECISIONS, QUANTIZATION_GROUP, Build, Room
from onnxport.providers.openvino.tensors import TensorPair
from onnxport.providers.transfers import Blocks

KV_PRECISIONS: Final = {  # kv_cache_dtype -> KV_CACHE_PRECISION
    "int8": "u8",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
}
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
# What caches need, that only one type of activations has.
CACHE_HINTS: Final = {"float16": "f32", "float32": "f32", "bfloat16": "bf16"}
# Level 2 allows float16. Asked for that, OpenVINO takes bfloat16, which is less precise, where the
# processor has no float16, and computes wrongly where it has.
LEVELS: Final = PRECISIONS | {2: "f32"}
LEVEL_DTYPES: Final = {level: NAMES[precision] for level, precision in LEVELS.items()}
X86: Final = ("x86_64", "amd64")
FEW_TOKENS: Final = 24  # up to which int8 beats AMX; measured on Sapphire Rapids, two cores


class CpuPlugin:
    """See `plugin.Plugin`."""

    device = "CPU"
    transposed_keys = False
    takes_extensions = True
    gathers_experts = platform.machine().lower() in X86  # the plugin does so there alone
    proven = True
    wrong: Final[Mapping[str, str]] = MappingProxyType({"float16": NO_FLOAT16})

    def features(self, core: Any) -> Features:
        """See `plugin.Plugin.features`."""
        import openvino as ov

        able = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        natural = core.get_property("CPU", "INFERENCE_PRECISION_HINT")
        dtypes = [dtype for dtype, capability in CAPABILITIES.items() if capability in able]
        dtypes.sort(key=lambda dtype: getattr(ov.Type, HINTS[dtype]) != natural)
        caches = [n for n in KV_PRECISIONS if any(n in CACHES[dtype] for dtype in dtypes)]
        beside = {dtype: CACHES[dtype] for dtype in dtypes}
        return Features(
            ("native",),
            tuple(dtypes),
            tuple(caches),
            beside,
            LEVEL_DTYPES,
            has_experts=self.gathers_experts,
            has_states=True,
            has_mixed_layers=True,
        )

    def check(self, options: LoadOptions) -> None:
        """See `plugin.Plugin.check`."""
        if options.kv_cache_dtype not in ("auto", *KV_PRECISIONS):
            raise OptionError(
                f"kv_cache_dtype is {options.kv_cache_dtype!r}; the openvino provider stores "
                f"{', '.join(KV_PRECISIONS)} or auto"
            )
        refuse_device_options("openvino", options)
        _check_dtype(options)
        _check_cache(options, f"dtype is {options.dtype!r}", options.dtype)
        level = options.matmul_accuracy_level or 0
        dtype = LEVEL_DTYPES.get(level, "auto")
        reason = f"matmul_accuracy_level is {level}, which computes in {dtype}"
        _check_cache(options, reason, dtype)

    def builds(self, core: Any, options: LoadOptions, level: int) -> Sequence[Build]:
        """See `plugin.Plugin.builds`."""
        natural = core.get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
        if LEVELS.get(level) == "f32":  # perhaps the artifact's own
            reason = f"the accuracy level is {level}, which computes in float32"
            _check_cache(options, reason, "float32")
        asked = LEVEL_DTYPES.get(options.matmul_accuracy_level or 0, "float32")
        if CAPABILITIES[asked] not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise ProviderError(
                f"dtype is {options.dtype!r} and matmul_accuracy_level is "
                f"{options.matmul_accuracy_level}, which computes in {asked}; on this processor "
                "OpenVINO has none, leave the level out"
            )
        return builds(options, level, natural)

    def room(self, core: Any, weight_bytes: int, num_graphs: int, host_bytes: int) -> Room:
        """See `plugin.Plugin.room`: weights are constants, and packed anew for each graph."""
        return Room(host_bytes, (1 + num_graphs) * weight_bytes, None)

    def allocate(
        self, core: Any, form: CacheFormat, num_layers: int, num_blocks: int
    ) -> tuple[list[TensorPair], Blocks]:
        """See `plugin.Plugin.allocate`."""
        pairs, blocks = allocate(form, num_layers, num_blocks)
        return [(_tensor(a, form.dtype), _tensor(b, form.dtype)) for a, b in pairs], blocks


def builds(options: LoadOptions, level: int, natural: str) -> list[Build]:
    """The graphs to compile, each with its properties.

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
    precision = HINTS.get(options.dtype, LEVELS.get(level))
    precision = CACHE_HINTS.get(options.kv_cache_dtype, precision)
    if level in LEVELS:
        config[QUANTIZATION_GROUP] = 0
    if options.kv_cache_dtype != "auto":
        config["KV_CACHE_PRECISION"] = KV_PRECISIONS[options.kv_cache_dtype]
    if precision is not None:
        whole = Build(None, {**config, "INFERENCE_PRECISION_HINT": precision})
    else:
        whole = Build(None, config)
    # Other caches follow the precision of the graph, and the two could not share them.
    shared = options.kv_cache_dtype in ("auto", "int8")
    if precision is None and level == INT8_LEVEL and natural != "f32" and shared:
        return [Build(FEW_TOKENS, {**config, "INFERENCE_PRECISION_HINT": "f32"}), whole]
    return [whole]


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
    level = options.matmul_accuracy_level or 0
    if LEVEL_DTYPES.get(level, options.dtype) != options.dtype:
        raise ProviderError(
            f"dtype is {options.dtype!r} and matmul_accuracy_level is {level}, which computes in "
            f"{LEVEL_DTYPES[level]}; OpenVINO has one type for both, leave one out"
        )


def _check_cache(options: LoadOptions, reason: str, dtype: str) -> None:
    """Refuse a type of cache that OpenVINO has not where it computes in `dtype`, for a reason."""
    allowed = CACHES.get(dtype)
    if allowed is not None and options.kv_cache_dtype not in ("auto", *allowed):
        raise OptionError(
            f"kv_cache_dtype is {options.kv_cache_dtype!r} and {reason}; where OpenVINO computes "
            f"in that it stores {', '.join(allowed)}: ask for one of them, or leave one of the "
            "two out"
        )


def _tensor(cache: NDArray[Any], dtype: str) -> Any:
    """An openvino.Tensor over a cache's memory."""
    import openvino as ov

    kind = next(kind for kind, name in NAMES.items() if name == dtype)
    raw = cache.view(np.uint16) if dtype == "bfloat16" else cache
    return ov.Tensor(raw, ov.Shape(list(cache.shape)), getattr(ov.Type, kind))
