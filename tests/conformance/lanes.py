"""The lanes: ways to run an artifact that must all agree.

A provider that is registered has a lane by that alone; one that can be emulated has a second.
Only what is particular about a provider is said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from onnxport.graphs.artifact import Artifact
from onnxport.providers import registry
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library
from tests.conformance.make import AWQ, CHUNKS, HYBRID, LATENT, MIXED, MXFP4, PRECISIONS, Q4_1
from tests.conformance.rules import Rule

POOL_TOKENS = 1024
BLOCK_SIZE = 16  # small, so that short prompts have blocks to share
LATENT_FAMILIES = tuple(family for family, _ in LATENT)
MIXED_FAMILIES = tuple(family for family, _ in MIXED)
CHUNKED_FAMILIES = tuple(family for family, _ in CHUNKS)
HYBRID_FAMILIES = tuple(family for family, _ in HYBRID)
QUANTIZED = ("int8", "int4", AWQ, MXFP4, Q4_1)
# An int8 cache whose scales each token has to itself: coarse, and the same in any batch. Attention
# of random weights is steep; measured: 0.41, and mostly below 0.2; of latents with experts 1.4.
INT8_CACHE = Rule("int8 cache", 0.6, identical=True, with_experts=2.5)
# An int4 cache is sixteen times as coarse, which such attention turns into other logits: measured
# 3.3. What this lane shows is that they are the same however they are computed.
INT4_CACHE = Rule("int4 cache", 6.0, identical=True)
# Products in float32, so that a near miss is a mistake and not rounding.
FLOAT32_PRODUCTS: Mapping[str, Any] = {"matmul_accuracy_level": 1}
# As they are served: int8 activations, which are coarse on purpose. Measured: 0.36.
COARSE = Rule("8-bit activations", 0.6, identical=True)
# By ONNX Runtime's products a token of a near tie is given to another expert: that one is off by
# 1.9, all others of its prompt by 0.14 or less. Ours part nowhere.
COARSE_APART = replace(COARSE, with_experts=3.5)
# Besides, an int8 cache whose blocks are rounded anew as they fill. Measured: 0.47; with experts
# 1.8, where a processor has AMX and it computes in bfloat16.
OPENVINO_COARSE = Rule("what OpenVINO chooses", 0.8, identical=False, with_experts=2.5)


@dataclass(frozen=True, slots=True)
class Found:
    """What a machine has for a lane."""

    missing: str  # why it cannot run, "" if it can
    is_software: bool = False  # software plays the device, hundreds of times slower than one


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to run an artifact."""

    name: str
    provider: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of LoadOptions
    rule: Rule | None = None  # None: by the types that the model computes and stores
    emulated: bool = False
    precisions: tuple[str, ...] = (*PRECISIONS, AWQ, MXFP4, Q4_1)
    refused: tuple[str, ...] = ()  # families that the lane's attention does not take

    def look(self) -> Found:
        """What this machine has for it. This may start a device."""
        replays = self.emulated and self.options.get("capture_graphs")
        if (self.options.get("attention") == "custom" or replays) and find_library() is None:
            return Found("the C++ kernel was not built: no C++17 compiler on this machine")
        if self.emulated:
            return Found(registry.get_provider("cpu").probe().reason)
        probe = registry.get_provider(self.provider).probe()
        kinds = {device.kind for device in probe.devices}
        return Found(probe.reason, self.provider not in registry.HOSTS and kinds == {"cpu"})

    def open(self, path: Path, **changes: Any) -> Model:
        """Load an artifact; `changes` go before the lane's own options."""
        options = {"threads": 2, "kv_cache_tokens": POOL_TOKENS, **self.options, **changes}
        provider = registry.get_provider(self.provider, emulate=self.emulated)
        return provider.load(Artifact.read(path), LoadOptions(**options))


def _cpu_lanes() -> list[Lane]:
    small = {"block_size": BLOCK_SIZE}
    custom, decomposed = ({"attention": kind, **small} for kind in ("custom", "decomposed"))
    large = {**custom, "block_size": 32}
    return [
        Lane("cpu-custom", "cpu", {**custom, **FLOAT32_PRODUCTS}),
        Lane("cpu-decomposed", "cpu", {**decomposed, **FLOAT32_PRODUCTS}),
        Lane("cpu-custom-served", "cpu", large, COARSE, precisions=QUANTIZED),
        Lane("cpu-decomposed-served", "cpu", decomposed, COARSE_APART, precisions=QUANTIZED),
        *(
            Lane(
                f"cpu-{kind}-cache",
                "cpu",
                {**large, "kv_cache_dtype": kind},
                precisions=("fp32",),
                refused=HYBRID_FAMILIES,  # they would run, and few of their layers have a cache
            )
            for kind in ("float16", "bfloat16")
        ),
        Lane(
            "cpu-int8-cache",
            "cpu",
            {**custom, "kv_cache_dtype": "int8"},
            INT8_CACHE,
            precisions=("fp32",),
        ),
        Lane(
            "cpu-int4-cache",
            "cpu",
            {**custom, "kv_cache_dtype": "int4"},
            INT4_CACHE,
            precisions=("fp32",),
            refused=(*LATENT_FAMILIES, *HYBRID_FAMILIES),
        ),
    ]


def _openvino_lanes() -> list[Lane]:
    exact = {"kv_cache_dtype": "float32", **FLOAT32_PRODUCTS}
    # Its attention caps no scores, and has no latents or chunks.
    refused = ("gemma2", *LATENT_FAMILIES, *CHUNKED_FAMILIES)
    return [
        Lane("openvino", "openvino", exact, refused=refused),
        Lane("openvino-served", "openvino", {}, OPENVINO_COARSE, refused=refused),
    ]


def _device_lanes() -> list[Lane]:
    """Providers that share their lowering, as they choose; where emulated, int4 in float32 too."""
    options = {"block_size": BLOCK_SIZE, **FLOAT32_PRODUCTS}
    devices = [name for name in registry.PROVIDERS if name not in registry.HOSTS]
    lanes = [Lane(name, name, options) for name in devices]
    # Decode steps are replayed on cuda if nothing is said, and are not where it is emulated.
    step_by_step = {**options, "capture_graphs": False}
    halves = ("fp16", "int4")
    lanes.append(Lane("cuda-step-by-step", "cuda", step_by_step, precisions=halves))
    replayed = {**options, "capture_graphs": True}
    lanes.append(
        Lane(
            "cuda-emulated-replayed",
            "cuda",
            replayed,
            emulated=True,
            precisions=halves,
            # Steps of decomposed attention are not replayed, nor those of layers with a state.
            refused=(*LATENT_FAMILIES, *MIXED_FAMILIES, *HYBRID_FAMILIES, *CHUNKED_FAMILIES),
        )
    )
    for name in registry.EMULATED:
        emulated = Lane(f"{name}-emulated", name, options, emulated=True)
        wide = {**options, "dtype": "float32"}
        exact = replace(emulated, name=f"{name}-emulated-float32", options=wide)
        lanes += [emulated, replace(exact, precisions=("int4",))]
    return lanes


def all_lanes() -> list[Lane]:
    """Every lane, whether this machine can run it or not."""
    return [*_cpu_lanes(), *_openvino_lanes(), *_device_lanes()]


def partner_of(lane: Lane) -> Lane:
    """The lane with which sequences are exchanged.

    It is the decomposed graph, which takes blocks of any size; for that one, our kernel if built.
    """
    custom, decomposed, *_ = _cpu_lanes()
    return custom if lane.name == decomposed.name and find_library() else decomposed
