"""The `openvino` provider: Intel's own runtime, reading the artifact's ONNX graph.

It runs on the CPU, or by name on a GPU. An NPU is found and named, and refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import onnx

from onnxport.errors import OptionError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import attribute_int
from onnxport.graphs.passes import lora as lora_passes
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.split_experts import QMOE
from onnxport.providers import memory
from onnxport.providers.base import Capabilities, Device, DeviceKind, KVFormat, LoadOptions, Probe
from onnxport.providers.failures import device_error
from onnxport.providers.hidden_states import refuse_hidden_states
from onnxport.providers.imports import unless_interrupted, unless_left_behind
from onnxport.providers.latents import refuse_latents
from onnxport.providers.mixed_layers import refuse_mixed_adapters, refuse_mixed_layers
from onnxport.providers.openvino.caches import CacheFormat
from onnxport.providers.openvino.checks import (
    check_attention,
    check_experts,
    check_precision,
    check_sinks,
    check_trust,
)
from onnxport.providers.openvino.compiled import placement, precision
from onnxport.providers.openvino.convert import (
    RELEASE,
    collect_weights,
    convert,
    finish,
    lower,
)
from onnxport.providers.openvino.core import import_openvino, new_core
from onnxport.providers.openvino.cpu import CACHES, LEVEL_DTYPES, CpuPlugin
from onnxport.providers.openvino.extension import load_extension
from onnxport.providers.openvino.gpu import GpuPlugin
from onnxport.providers.openvino.layer_caches import allocate, check_caches, row_bytes
from onnxport.providers.openvino.lora import OpenVinoLora
from onnxport.providers.openvino.model import Graph, OpenVinoModel
from onnxport.providers.openvino.plugin import PRECISIONS, Build, Plugin
from onnxport.providers.openvino.states import RowStates
from onnxport.providers.pool import PoolPlan, check_weights, converted_bytes, plan_pool
from onnxport.providers.states import plan_memory, refuse_states

logger = logging.getLogger(__name__)

INSTALL: Final = "pip install 'onnxport[openvino]'"
KINDS: Final[Mapping[str, DeviceKind]] = {"CPU": "cpu", "GPU": "gpu", "NPU": "npu"}
REFUSED: Final = {  # device kind -> why it cannot be used
    "NPU": "its plugin compiles static shapes and has no paged attention",
}
NEVER_RUN: Final = (
    "we never ran this on a GPU: `onnxport verify ARTIFACT --provider openvino:gpu` tells whether "
    "it computes rightly"
)
DRIVER: Final = "an Intel GPU needs its OpenCL driver, which Debian calls intel-opencl-icd"


@dataclass(frozen=True, slots=True)
class _Variant:
    """A lowered graph: with LoRA adapters, or without."""

    model: onnx.ModelProto
    adapted: bool


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
            ov = import_openvino()
            unless_left_behind(ov)
        except ImportError as error:
            unless_interrupted(error)
            return Probe(False, f"openvino is missing ({error}): {INSTALL}")
        version = ov.__version__.split("-")[0]
        versions = {"openvino": version}
        if version.rpartition(".")[0] != RELEASE:
            reason = (
                f"openvino {version} is installed; the inputs of its paged attention change with "
                f"every release, and those of {RELEASE} are known: {INSTALL}"
            )
            return Probe(False, reason, (), versions)
        core = new_core()
        used = _find(self._device, core.available_devices)
        # The one that is used comes first.
        names = sorted(core.available_devices, key=lambda name: name != used)
        devices = tuple(_device(core, name) for name in names)
        if reason := _why_not(self._device, core.available_devices):
            return Probe(False, reason, devices, versions)
        assert used is not None
        notes = tuple(note for name in names if (note := _note(name, used)))
        return Probe(True, "", devices, versions, notes, _plugin(used).features(core))

    def load(self, artifact: Artifact, options: LoadOptions) -> OpenVinoModel:
        """See `providers.base.Provider.load`."""
        if reason := self.probe().reason:
            raise ProviderError(reason)
        refuse_hidden_states(artifact, options, self.name)
        refuse_latents(artifact, self.name)
        refuse_mixed_adapters(artifact, options)
        core = new_core()
        plugin = _plugin(_find(self._device, core.available_devices) or self._device)
        if plugin.device != "CPU":
            refuse_mixed_layers(artifact, f"openvino on a {plugin.device}")
        check_attention(options)
        plugin.check(options)
        spec = artifact.manifest.model
        if spec.linear is not None:
            options = _for_states(artifact, plugin, options)
        lora = _lora(artifact, plugin, options)
        host_bytes = memory.available_bytes()
        check_weights(host_bytes, converted_bytes(artifact))  # before they are made
        passes = lower(artifact, lora.lower if lora else None, keep_experts=plugin.gathers_experts)
        lowered = list(passes)
        for step in lowered:
            logger.info("%s: %s", artifact.path.name, step)
        model = lowered[-1].model
        check_sinks(model, plugin)
        level = _accuracy_level(model, options.matmul_accuracy_level)
        builds = plugin.builds(core, options, level)
        check_trust(core, plugin, builds[-1])
        attached = {name: value for step in lowered for name, value in step.attached.items()}
        weights = collect_weights(artifact, model, attached)
        weight_bytes = sum(value.nbytes for value in weights.values())
        variants = _variants(artifact, lowered, adapted=lora is not None)
        room = plugin.room(core, weight_bytes, len(variants) * len(builds), host_bytes)
        if len(variants) > 1 and (room.free_bytes or 0) < 2 * room.weight_bytes:
            variants = variants[-1:]
            room = plugin.room(core, weight_bytes, len(builds), host_bytes)
        check_weights(room.free_bytes, room.weight_bytes)
        converted = [
            convert(variant.model, weights, lora.convert if lora else None) for variant in variants
        ]
        graphs = [
            replace(_compile(core, plugin, one.model, build), adapted=variant.adapted)
            for variant, one in zip(variants, converted, strict=True)
            for build in builds
        ]
        check_precision(graphs[-1].compiled, plugin, options)
        check_experts(model, graphs)
        forms = check_caches(graphs, plugin, spec, options)
        form = forms[0]
        token_bytes = form.layer_bytes / form.block_size
        plan = partial(
            plan_pool,
            spec,
            options,
            block_size=form.block_size,
            item_bytes=token_bytes / (2 * spec.num_kv_heads * spec.head_size),
            free_bytes=room.free_bytes,
            buffer_bytes=room.buffer_bytes,
            row_bytes=row_bytes(spec, forms),
        )
        held_bytes = room.weight_bytes + (lora.num_bytes() if lora else 0)
        pool, states = plan_memory(
            spec, options, room.free_bytes, plan, held_bytes, copies_rows=True
        )
        capabilities = _capabilities(artifact, core, plugin, graphs[-1].compiled, form, pool)
        capabilities = replace(
            _with_adapters(capabilities, options),
            int8_products=_has_products(model) and any(build.quantizes for build in builds),
            state_slots=states.num_slots,
            state_bytes=states.slot_bytes,
        )
        layers = spec.cached_layers
        try:
            pairs, blocks = allocate(core, plugin, forms, pool.num_blocks)
            rows = RowStates(spec, states) if states.num_slots else None
        except Exception as error:  # OpenVINO's own classes derive from Exception alone
            doing = f"making a KV cache of {pool.num_blocks * pool.block_bytes} bytes"
            raise device_error(error, doing, capabilities.device) from error
        adapters = lora.adapters() if lora else None
        held = [tensor for one in converted for tensor in one.memory]
        return OpenVinoModel(graphs, capabilities, pairs, blocks, held, adapters, layers, rows)


def _for_states(artifact: Artifact, plugin: Plugin, options: LoadOptions) -> LoadOptions:
    """Options of a model that has layers with a state, which are computed in float32.

    What is added to a state counts for all tokens that follow, and OpenVINO has no type for a part
    of a graph.

    Raises:
        ProviderError: the device is no processor, or another type was asked for, by whatever
            option.
    """
    if plugin.device != "CPU":
        refuse_states(artifact, f"openvino on a {plugin.device}")
    level, caches = options.matmul_accuracy_level, CACHES["float32"]
    found, allowed = [], []
    if options.dtype not in ("auto", "float32"):
        found.append(f"dtype is {options.dtype!r}")
        allowed.append("dtype float32 or auto")
    if (dtype := LEVEL_DTYPES.get(level or 0, "float32")) != "float32":
        found.append(f"matmul_accuracy_level is {level}, which computes in {dtype}")
        allowed.append("another matmul_accuracy_level, or none")
    if options.kv_cache_dtype not in ("auto", *caches):
        found.append(f"kv_cache_dtype is {options.kv_cache_dtype!r}, which needs the same dtype")
        allowed.append(f"kv_cache_dtype {', '.join(caches)} or auto")
    if found:
        raise OptionError(
            f"{' and '.join(found)}; OpenVINO computes layers that keep states, which "
            f"{artifact.path.name} has, in float32 alone: ask for {', and for '.join(allowed)}"
        )
    return replace(options, dtype="float32")


def _lora(artifact: Artifact, plugin: Plugin, options: LoadOptions) -> OpenVinoLora | None:
    """What adds adapters; None where there are none."""
    if not options.max_adapters:
        return None
    extension = load_extension() if plugin.takes_extensions else None
    return OpenVinoLora(artifact, options, extension)


def _variants(
    artifact: Artifact, lowered: Sequence[PassResult], *, adapted: bool
) -> list[_Variant]:
    """The graphs to compile, of which the last one takes every batch.

    Adapters cost time where none is used, so another graph is without them.
    """
    last = _Variant(lowered[-1].model, adapted)
    if not adapted:
        return [last]
    added = next(at for at, step in enumerate(lowered) if step.name in lora_passes.PASSES)
    *_, without = finish(artifact, lowered[added - 1].model)
    return [_Variant(without.model, adapted=False), last]


def _with_adapters(capabilities: Capabilities, options: LoadOptions) -> Capabilities:
    most, rank = options.max_adapters, options.max_adapter_rank
    return replace(capabilities, max_adapters=most, max_adapter_rank=rank) if most else capabilities


def _find(asked: str, available: Sequence[str]) -> str | None:
    """The device as OpenVINO lists it: GPU alone, or GPU.0, GPU.1 and so on if there are more."""
    names = (asked, f"{asked}.0", asked.removesuffix(".0"))
    return next((name for name in names if name in available), None)


def _plugin(device: str) -> Plugin:
    """What drives a device that `_why_not` does not refuse."""
    return CpuPlugin() if device == "CPU" else GpuPlugin(device)


def _why_not(asked: str, available: Sequence[str]) -> str:
    """Why a device cannot be used, "" where it can."""
    kind = asked.partition(".")[0]
    if kind in REFUSED:
        return f"{asked} is not used: {REFUSED[kind]}"
    if _find(asked, available) is None or kind not in KINDS:
        hint = f"; {DRIVER}" if kind == "GPU" else ""
        return f"openvino finds no {asked} here; it finds {', '.join(available)}{hint}"
    return ""


def _note(name: str, used: str) -> str:
    """What a user should know of a device that is there; "" for nothing."""
    kind = name.partition(".")[0]
    if kind in REFUSED:
        return f"{name} is not used: {REFUSED[kind]}"
    if kind == "GPU" and name == used:
        return NEVER_RUN
    if kind == "GPU":
        return f"{name} is used by name, as openvino:{name.lower()}; {NEVER_RUN}"
    return ""


def _capabilities(
    artifact: Artifact, core: Any, plugin: Plugin, compiled: Any, form: CacheFormat, pool: PoolPlan
) -> Capabilities:
    """What was loaded; `compiled` is the graph that takes any number of tokens."""
    return Capabilities(
        provider=OpenVinoProvider.name,
        device=core.get_property(plugin.device, "FULL_DEVICE_NAME"),
        attention="native",
        compute_dtype=precision(compiled),
        kv_cache_dtype=form.dtype,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        kv_block_bytes=pool.block_bytes,
        kv_format=KVFormat.of(artifact, form.canonical_dtype),
        max_model_len=pool.max_model_len,
        vocab_size=artifact.manifest.model.vocab_size,
        max_batch_rows=None,
        placement=placement(compiled),
        rounds_anew=form.dtype == "int8",
        moves_blocks=artifact.manifest.model.has_even_caches,
    )


def _device(core: Any, name: str) -> Device:
    """A device by its full name; memory where OpenVINO says, and the host's for the CPU."""
    total = memory.total_bytes() if name == "CPU" else None
    kind = KINDS.get(name.partition(".")[0], "npu")  # an accelerator of another make
    try:
        if "GPU_DEVICE_TOTAL_MEM_SIZE" in core.get_property(name, "SUPPORTED_PROPERTIES"):
            total = int(core.get_property(name, "GPU_DEVICE_TOTAL_MEM_SIZE"))
        full_name = core.get_property(name, "FULL_DEVICE_NAME")
    except Exception as error:  # a device that is broken is no reason to have none
        logger.warning("OpenVINO lists %s, which does not say what it is: %s", name, error)
        full_name = "does not say what it is"
    return Device(f"{name}: {full_name}", total, kind)


def _accuracy_level(model: onnx.ModelProto, asked: int | None) -> int:
    """What products may round activations to; see graphs.passes.accuracy.

    Without an answer of the caller it is the most precise level of the artifact's MatMulNBits and
    QMoE. Int8 is a level of these alone: where there are none, it asks for nothing.
    """
    own = [attribute_int(node, "accuracy_level", 0) for node in _products(model)]
    level = min(own, default=0) if asked is None else asked
    return level if own or level in PRECISIONS else 0


def _has_products(model: onnx.ModelProto) -> bool:
    return any(True for _ in _products(model))


def _products(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Those with quantized weights."""
    return (node for node in model.graph.node if node.op_type in (MATMUL_NBITS, QMOE))


def _compile(core: Any, plugin: Plugin, model: Any, build: Build) -> Graph:
    try:
        compiled = core.compile_model(model, plugin.device, build.config)
    except Exception as error:  # OpenVINO's own classes derive from Exception alone
        doing = f"compiling the graph with {dict(build.config)}"
        raise device_error(error, doing, f"OpenVINO's {plugin.device}") from error
    return Graph(compiled, build.most_tokens)
