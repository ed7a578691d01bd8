"""LoRA adapters for tests: folders as PEFT writes them, and engines that take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from onnxport.graphs.lora import PROJECTIONS, LoraAdapter, LoraDelta, projection_shapes
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.adapters.mixes import mixed
from onnxport.serving.adapters.peft import AdapterContent, fingerprint
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.fallback import Fallback, Standby
from onnxport.serving.guesses import Guesses
from onnxport.serving.intake import SEED_STEP
from onnxport.serving.params import SamplingParams
from tests.graphs.artifacts import SPEC
from tests.serving.helpers import GREEDY, run, submit, tokens

Tensors = dict[str, NDArray[Any]]
ATTENTION = PROJECTIONS[:4]


def module_name(layer: int, projection: str) -> str:
    parent = "self_attn" if projection in ATTENTION else "mlp"
    return f"model.layers.{layer}.{parent}.{projection}"


def tensor_name(layer: int, projection: str, part: str) -> str:
    return f"base_model.model.{module_name(layer, projection)}.lora_{part}.weight"


def random_tensors(
    spec: ArchSpec = SPEC,
    *,
    rank: int = 4,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    layers: Sequence[int] | None = None,
    seed: int = 0,
    dtype: Any = np.float32,
) -> Tensors:
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    shapes = projection_shapes(spec, 0)
    for layer in range(spec.num_layers) if layers is None else layers:
        for name in PROJECTIONS:
            if name in targets:
                outputs, inputs = shapes[name]
                a = random.standard_normal((rank, inputs)) / inputs**0.5
                b = random.standard_normal((outputs, rank)) / rank**0.5
                tensors[tensor_name(layer, name, "A")] = a.astype(dtype)
                tensors[tensor_name(layer, name, "B")] = b.astype(dtype)
    return tensors


def write_adapter(folder: Path, tensors: Tensors | None = None, **config: Any) -> Path:
    """Write a folder as PEFT's `save_pretrained` does; `config` overrides its fields."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        random_tensors() if tensors is None else tensors, folder / "adapter_model.safetensors"
    )
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "example/tiny",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "r": 4,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": ["v_proj", "q_proj"],
        "use_dora": False,
        "use_rslora": False,
    }
    fields |= config
    kept = {name: value for name, value in fields.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    return folder


@cache
def content(seed: int, rank: int = 2) -> AdapterContent:
    """An adapter of one projection, as if it had been read."""
    random = np.random.default_rng(seed)
    a = random.standard_normal((rank, 3)).astype(np.float32)
    b = random.standard_normal((3, rank)).astype(np.float32)
    adapter = LoraAdapter({(0, "q_proj"): LoraDelta(a, b)})
    return AdapterContent(adapter, fingerprint(adapter), Path(f"adapter-{seed}"), None)


def null_options(**options: Any) -> NullOptions:
    return NullOptions(**{"block_size": 4, "max_model_len": 512, "max_adapters": 4, **options})


def adapter_engine(
    *,
    adapters: Sequence[int] = (),
    fallbacks: Sequence[NullModel] = (),
    model_type: type[NullModel] = NullModel,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    config: dict[str, Any] | None = None,
    speculator: Guesses | None = None,
    **options: Any,
) -> Engine:
    """Return an engine whose adapters are named by the seeds of their contents."""
    standby = Standby(tuple(Fallback("null", lambda model=one: model) for one in fallbacks))
    engine = Engine(
        model_type(null_options(**options)),
        config=EngineConfig(max_num_seqs, max_num_batched_tokens, 0, **config or {}),
        standby=standby,
        speculator=speculator,
        base=SPEC,
    )
    for seed in adapters:
        engine.adapters.load(str(seed), content(seed))
    return engine


def alone_with(
    adapter: int | None,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    index: int = 0,
    windows: tuple[int | None, ...] = (None,),
) -> list[int]:
    """The tokens of completion `index` with an adapter, by seed of its content, that is all alone.

    See `helpers.alone`.
    """
    seed = None if params.seed is None else params.seed + index * SEED_STEP
    return list(_alone_with(adapter, tuple(prompt), replace(params, n=1, seed=seed), windows))


@cache
def _alone_with(
    adapter: int | None,
    prompt: tuple[int, ...],
    params: SamplingParams,
    windows: tuple[int | None, ...],
) -> tuple[int, ...]:
    engine = adapter_engine(
        adapters=() if adapter is None else (adapter,),
        num_blocks=512,
        max_num_batched_tokens=512,
        windows=windows,
        one_table=True,
        config={"enable_prefix_caching": False},
    )
    submit(engine, "alone", prompt, params, adapter=None if adapter is None else str(adapter))
    return tuple(tokens(run(engine)["alone"]))


@cache
def mixed_with(
    scales: tuple[tuple[int, float], ...], prompt: tuple[int, ...], params: SamplingParams = GREEDY
) -> list[int]:
    """The tokens with a sum of adapters, by seeds of their contents, that is loaded as one."""
    one = mixed("sum", [(content(seed).adapter, scale) for seed, scale in scales])
    engine = adapter_engine(
        num_blocks=512, max_num_batched_tokens=512, config={"enable_prefix_caching": False}
    )
    engine.adapters.load("sum", AdapterContent(one, fingerprint(one), Path(), None))
    submit(engine, "alone", prompt, params, adapter="sum")
    return tokens(run(engine)["alone"])


BFLOAT16 = ml_dtypes.bfloat16
