"""OpenVINO's plugin for Intel's GPUs: caches in the device's memory, in floating point.

We have no such GPU. What is known of the plugin comes from its source and from the plugin itself,
which compiles our graphs for Intel's driver without a device (scripts/intel_driver.sh).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from onnxport.errors import OptionError, ProviderError
from onnxport.providers import memory
from onnxport.providers.base import LoadOptions
from onnxport.providers.features import Features
from onnxport.providers.openvino.caches import CacheFormat
from onnxport.providers.openvino.plugin import NAMES, PRECISIONS, QUANTIZATION_GROUP, Build, Room
from onnxport.providers.openvino.tensors import TensorBlocks, TensorPair, allocate_remote
from onnxport.providers.transfers import Blocks

HINTS: Final = {"float16": "f16", "float32": "f32"}  # dtype -> inference precision
CAPABILITIES: Final = {"float16": "FP16", "float32": "FP32"}  # dtype -> optimization capability
LEVEL_DTYPES: Final = {level: NAMES[precision] for level, precision in PRECISIONS.items()}
BFLOAT16_LEVEL: Final = 3  # of matmul_accuracy_level
TOTAL: Final = "GPU_DEVICE_TOTAL_MEM_SIZE"
LARGEST_BUFFER: Final = "GPU_DEVICE_MAX_ALLOC_MEM_SIZE"
IN_USE: Final = "GPU_MEMORY_STATISTICS"  # kind of memory -> bytes that this process took


class GpuPlugin:
    """See `plugin.Plugin`."""

    transposed_keys = True
    takes_extensions = False
    gathers_experts = False  # some do, as the source has it; which ones, nobody saw here
    proven = False
    wrong: Final[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, device: str) -> None:
        self.device = device

    def features(self, core: Any) -> Features:
        """See `plugin.Plugin.features`. Caches have the type of the activations."""
        able = core.get_property(self.device, "OPTIMIZATION_CAPABILITIES")
        dtypes = tuple(dtype for dtype, capability in CAPABILITIES.items() if capability in able)
        found = Features.one_type(("native",), dtypes, runs_ours=False)
        return replace(found, level_dtypes=LEVEL_DTYPES)

    def check(self, options: LoadOptions) -> None:
        """See `plugin.Plugin.check`."""
        if options.allowed_on_host or options.capture_graphs:
            given = "allowed_on_host" if options.allowed_on_host else "capture_graphs"
            raise ProviderError(
                f"{given} was given; OpenVINO decides by itself what runs on the host, and "
                "replays nothing: leave it out"
            )
        if options.dtype not in ("auto", *HINTS):
            raise OptionError(
                f"dtype is {options.dtype!r}; OpenVINO computes in {', '.join(HINTS)} on a GPU, "
                "ask for one of them or auto"
            )
        if options.kv_cache_dtype not in ("auto", *HINTS):
            raise OptionError(
                f"kv_cache_dtype is {options.kv_cache_dtype!r}; on a GPU, OpenVINO's KV cache is "
                f"used in {', '.join(HINTS)} only, for how it packs others is not known here: ask "
                "for one of them or auto"
            )
        if options.matmul_accuracy_level == BFLOAT16_LEVEL:
            raise OptionError(
                f"matmul_accuracy_level is {BFLOAT16_LEVEL}, which is bfloat16; OpenVINO has none "
                "on a GPU: ask for 1, 2 or 4, or leave it out"
            )
        asked = _asked(options)
        if len(set(asked.values())) > 1:
            given = " and ".join(f"{name} is {getattr(options, name)!r}" for name in asked)
            raise OptionError(
                f"{given}; on a GPU, OpenVINO computes in the type of its KV cache: give one of "
                "them, or such as agree"
            )

    def builds(self, core: Any, options: LoadOptions, level: int) -> Sequence[Build]:
        """See `plugin.Plugin.builds`: one graph, whose cache has the type of the activations.

        `threads` are those that compile. Left alone, the plugin takes an int8 cache, or an int4
        one where weights are int4.
        """
        precision = self._precision(core, options, level)
        config: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
        }
        if level in PRECISIONS:
            config[QUANTIZATION_GROUP] = 0
        if options.threads is not None:
            config["COMPILATION_NUM_THREADS"] = options.threads
        known = core.get_property(self.device, "SUPPORTED_PROPERTIES")
        if missing := [name for name in config if name not in known]:
            raise ProviderError(
                f"this OpenVINO does not take {', '.join(missing)} for {self.device}; install the "
                "version that onnxport names: pip install 'onnxport[openvino]'"
            )
        return [Build(None, config)]

    def _precision(self, core: Any, options: LoadOptions, level: int) -> str:
        for asked in _asked(options).values():
            return asked
        if PRECISIONS.get(level) in HINTS.values():
            return PRECISIONS[level]
        return HINTS[self.features(core).dtypes[0]]

    def room(self, core: Any, weight_bytes: int, num_graphs: int, host_bytes: int) -> Room:
        """See `plugin.Plugin.room`. What other processes took of the device is not known."""
        import openvino as ov

        known = core.get_property(self.device, "SUPPORTED_PROPERTIES")
        largest = (
            core.get_property(self.device, LARGEST_BUFFER) if LARGEST_BUFFER in known else None
        )
        if TOTAL not in known:
            return Room(None, num_graphs * weight_bytes, largest)
        taken = core.get_property(self.device, IN_USE) if IN_USE in known else {}
        free = max(0, int(core.get_property(self.device, TOTAL)) - sum(taken.values()))
        kind = core.get_property(self.device, "DEVICE_TYPE")
        if kind == ov.properties.device.Type.INTEGRATED:  # its memory is the host's
            free = min(free, memory.available_bytes())
        return Room(free, num_graphs * weight_bytes, largest)

    def allocate(
        self, core: Any, form: CacheFormat, num_layers: int, num_blocks: int
    ) -> tuple[list[TensorPair], Blocks]:
        """See `plugin.Plugin.allocate`."""
        context = core.get_default_context(self.device)
        pairs = allocate_remote(context, form, num_layers, num_blocks)
        return pairs, TensorBlocks(pairs, form)


def _asked(options: LoadOptions) -> dict[str, str]:
    """The options that ask for a type, and the precision that each means."""
    asked = {
        "dtype": HINTS.get(options.dtype),
        "kv_cache_dtype": HINTS.get(options.kv_cache_dtype),
        "matmul_accuracy_level": PRECISIONS.get(options.matmul_accuracy_level or 0),
    }
    return {name: precision for name, precision in asked.items() if precision is not None}
