"""What providers of the host say they can do, and the options that they refuse."""

from __future__ import annotations

import platform
from itertools import product
from typing import Any

import numpy as np
import openvino as ov
import pytest

from onnxport.errors import ProviderError
from onnxport.providers import memory
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu import library
from onnxport.providers.cpu.library import find_library
from onnxport.providers.features import Features
from onnxport.providers.registry import get_provider, open_model
from tests.providers import models
from tests.providers.conftest import ArtifactMaker

HOSTS = ["cpu", "openvino"]


def features(name: str) -> Features:
    found = get_provider(name).probe().features
    assert found is not None
    return found


@pytest.mark.parametrize("name", HOSTS)
def test_the_processor_is_a_cpu_with_all_of_its_memory(name: str) -> None:
    device = get_provider(name).probe().devices[0]
    assert device.kind == "cpu"
    assert device.memory_bytes == memory.total_bytes()


def test_openvino_s_own_device_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        available_devices = ("AUDIO", "CPU", "GPU.1", "NPU")

        def get_property(self, device: str, name: str) -> str:
            return f"BF16 {device}"

    monkeypatch.setattr(ov, "Core", Core)
    probe = get_provider("openvino").probe()
    assert [(device.name, device.kind) for device in probe.devices] == [
        ("CPU: BF16 CPU", "cpu"),
        ("AUDIO: BF16 AUDIO", "npu"),
        ("GPU.1: BF16 GPU.1", "gpu"),
        ("NPU: BF16 NPU", "npu"),
    ]
    assert probe.features == Features(
        ("native",),
        ("bfloat16",),
        ("int8", "bfloat16"),
        {"bfloat16": ("int8", "bfloat16")},
        {1: "float32", 2: "float32", 3: "bfloat16"},
        has_experts=platform.machine() in ("x86_64", "AMD64"),
        has_states=True,
        has_mixed_layers=True,
    )


@pytest.mark.parametrize("name", HOSTS)
def test_every_feature_can_be_loaded(tiny_artifact: ArtifactMaker, name: str) -> None:
    path, found = tiny_artifact("llama", "fp32"), features(name)
    for dtype in found.dtypes:
        with models.opened(path, None, provider=name, dtype=dtype) as model:
            assert model.capabilities.compute_dtype == dtype
    for kind in found.kv_cache_dtypes:
        # OpenVINO keeps caches of 16 bits only where it computes in that type.
        dtype = kind if kind in found.dtypes else "auto"
        with models.opened(path, None, provider=name, kv_cache_dtype=kind, dtype=dtype) as model:
            assert model.capabilities.kv_cache_dtype == kind
    for attention in found.attention:
        with models.opened(path, attention, provider=name) as model:
            assert model.capabilities.attention == attention


@pytest.mark.parametrize("name", HOSTS)
def test_whether_products_round_to_int8(tiny_artifact: ArtifactMaker, name: str) -> None:
    rows = [(list(range(1, 30)), 0, [0] if name == "openvino" else [0, 1])]
    logits = {}
    for level in (1, 2, 4, None):
        chosen = {"matmul_accuracy_level": level, "kv_cache_dtype": "float32", "dtype": "float32"}
        if name == "openvino" and level == 2:
            continue
        with models.opened(tiny_artifact("llama", "int4"), None, provider=name, **chosen) as model:
            assert model.capabilities.int8_products == (level in (4, None)), level
            logits[level] = models.run_rows(model, rows)
    exact = logits.pop(1)
    errors = {level: np.abs(each - exact).max() / exact.std() for level, each in logits.items()}
    assert errors.pop(2, 0) < 1e-4
    assert all(error > 1e-3 for error in errors.values()), errors
    with models.opened(tiny_artifact("llama", "fp16"), None, provider=name) as model:
        assert not model.capabilities.int8_products


def test_an_attention_may_take_some_types_alone() -> None:
    found = Features.one_type(("native", "decomposed"), ("float16", "float32"), {"float16"})
    assert found.attention_dtypes == {"native": ("float16",)}
    for attention in (None, "decomposed"):
        assert found.go_together("float32", "auto", 1, attention)
        assert found.go_together("auto", "float32", 1, attention)
    assert not found.go_together("float32", "auto", 1, "native")
    assert not found.go_together("auto", "float32", 1, "native")
    assert found.go_together("auto", "auto", 1, "native")
    assert found.go_together("float16", "float16", 1, "native")
    assert found.has_latents
    assert found.has_mixed_layers
    assert found.tells_states
    bare = Features.one_type(("native",), ("float16",), runs_ours=False)
    assert not bare.has_latents
    assert not bare.has_mixed_layers
    assert not bare.tells_states
    every = Features.one_type(("native",), ("float16", "float32"))
    assert every.attention_dtypes == {}
    assert every.go_together("float32", "auto", 1, "native")


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTS)
def test_what_goes_together_is_what_loads(tiny_artifact: ArtifactMaker, name: str) -> None:
    path, found = tiny_artifact("llama", "fp32"), features(name)
    dtypes, caches = (("auto", *has) for has in (found.dtypes, found.kv_cache_dtypes))
    for dtype, cache, level in product(dtypes, caches, (None, *found.level_dtypes)):
        options = {"dtype": dtype, "kv_cache_dtype": cache, "matmul_accuracy_level": level}
        if not found.go_together(dtype, cache, level):
            with pytest.raises(ProviderError, match=r"^(kv_cache_)?dtype is .*(leave|set|ask)"):
                open_model(path, name, LoadOptions(**options))
            continue
        with models.opened(path, None, provider=name, **options) as model:
            limits = model.capabilities
            assert dtype in ("auto", limits.compute_dtype)
            assert cache in ("auto", limits.kv_cache_dtype)
            assert found.level_dtypes.get(level) in (None, limits.compute_dtype), options


def test_openvino_computes_in_the_type_that_was_asked_for(tiny_artifact: ArtifactMaker) -> None:
    path, rows = tiny_artifact("llama", "fp32"), [(list(range(1, 30)), 0, [0])]
    with models.opened(path, "decomposed", block_size=32) as exact:
        expected = models.run_rows(exact, rows)
    worst = {}
    for dtype in features("openvino").dtypes:
        chosen = {"dtype": dtype, "kv_cache_dtype": dtype}
        with models.opened(path, None, provider="openvino", **chosen) as model:
            assert model.capabilities.kv_cache_dtype == dtype
            worst[dtype] = np.abs(models.run_rows(model, rows) - expected).max() / expected.std()
    assert worst.pop("float32") < 1e-5
    assert all(1e-3 < error < 0.1 for error in worst.values()), worst  # 8 bits of each number


def test_openvino_computes_nothing_in_float16(tiny_artifact: ArtifactMaker) -> None:
    path = tiny_artifact("llama", "fp16")
    with pytest.raises(ProviderError, match=r"^dtype is 'float16'; .* in float16 wrongly"):
        open_model(path, "openvino", LoadOptions(dtype="float16"))
    with models.opened(path, None, provider="openvino", matmul_accuracy_level=2) as model:
        assert model.capabilities.compute_dtype == "float32"  # no less than was asked for
    with models.opened(path, None, provider="openvino", kv_cache_dtype="float16") as model:
        found = model.capabilities
        assert (found.compute_dtype, found.kv_cache_dtype) == ("float32", "float16")


def test_without_the_kernel_there_is_one_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_library() is None or features("cpu").attention == ("custom", "decomposed")
    monkeypatch.setattr(library, "find_library", lambda: None)
    names = ("experts", "other_experts", "states", "latents", "mixed_layers")
    able = {f"has_{name}": True for name in names} | {"tells_states": True}
    expected = Features(("decomposed",), ("float32",), ("float32",), **able)
    assert features("cpu") == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cpu", {"dtype": "float16"}, "^dtype is 'float16'; .*computes in float32 only"),
        ("cpu", {"allowed_on_host": ("Gather", "Add")}, "^allowed_on_host is Gather, Add; "),
        ("openvino", {"dtype": "int8"}, "^dtype is 'int8'; .*computes in float32, bfloat16,"),
        ("openvino", {"allowed_on_host": ("Gather",)}, "^allowed_on_host is Gather; "),
        (
            "openvino",
            {"dtype": "bfloat16", "matmul_accuracy_level": 1},
            "level is 1, which computes in float32; .*leave one out",
        ),
        (
            "openvino",
            {"dtype": "bfloat16", "kv_cache_dtype": "float32"},
            "kv_cache_dtype is 'float32' and dtype is 'bfloat16'; .*stores int8, bfloat16",
        ),
        (
            "openvino",
            {"kv_cache_dtype": "float16", "matmul_accuracy_level": 3},
            "kv_cache_dtype is 'float16' and matmul_accuracy_level is 3",
        ),
        (
            "openvino",
            {"kv_cache_dtype": "bfloat16", "matmul_accuracy_level": 1},
            "level is 1, which computes in float32; .* stores int8, float16, float32: ask for",
        ),
    ],
)
def test_what_a_host_cannot_honour_is_refused(
    tiny_artifact: ArtifactMaker, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProviderError, match=message):
        open_model(tiny_artifact("llama", "fp32"), name, LoadOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "matmul_accuracy_level": 1, "kv_cache_dtype": "float32"},
        {"dtype": "float32", "matmul_accuracy_level": 4},
    ],
)
@pytest.mark.parametrize("name", HOSTS)
def test_options_that_agree_are_taken(
    tiny_artifact: ArtifactMaker, name: str, options: dict[str, Any]
) -> None:
    with models.opened(tiny_artifact("llama", "int4"), None, provider=name, **options) as model:
        assert model.capabilities.compute_dtype == "float32"


def test_another_type_than_asked_for_is_no_fallback(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxport.providers.openvino import cpu as openvino

    monkeypatch.setitem(openvino.HINTS, "bfloat16", "f32")  # as where the processor has no bfloat16
    with pytest.raises(ProviderError, match=r"dtype is 'bfloat16', but .* a graph in float32"):
        open_model(tiny_artifact("llama", "fp32"), "openvino", LoadOptions(dtype="bfloat16"))
