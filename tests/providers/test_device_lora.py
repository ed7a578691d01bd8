"""Adapters on devices by a kernel of ours: what is chosen, what it reads, and that it is right."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import AdapterError, DeviceLostError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import LoraAdapter, LoraDelta
from onnxport.providers import cuda, device_lora
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library
from onnxport.providers.device import load_on_device
from onnxport.providers.nvidia import memory
from onnxport.providers.ort import CPU
from onnxport.providers.recipe import LoraKernel
from tests.conformance.adapting import make_adapter
from tests.conformance.models import step
from tests.exporter import checkpoints
from tests.kernels.stand_in import missing, stand_in
from tests.providers.conftest import ArtifactMaker

KERNEL = pytest.mark.skipif(find_library() is None, reason="the C++ kernel was not built")
OPTIONS = LoadOptions(max_adapters=3, max_adapter_rank=16, kv_cache_tokens=1024, block_size=16)
SLOTS = (0, 2, 1, 3, 1)  # of rows


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for the kernel."""
    monkeypatch.setenv(cuda.LORA_VARIABLE, "1")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraKernel]:
    if reason := missing():
        pytest.skip(reason)
    with stand_in(tmp_path_factory.mktemp("cuda")) as found:
        yield found


def emulated(path: Path, **options: Any) -> Model:
    chosen = replace(OPTIONS, **options)
    return cuda.CudaProvider(emulate=True).load(Artifact.read(path), chosen)


def fill(model: Model, path: Path) -> None:
    for slot in (1, 2, 3):
        model.set_adapter(slot, make_adapter(Artifact.read(path).manifest.model, slot))


def logits(model: Model, slots: tuple[int, ...] = SLOTS, length: int = 7) -> NDArray[np.float32]:
    tokens = checkpoints.tokens(3, length).tolist()
    rows = [(tokens, 0, [row]) for row in range(len(slots))]
    given = np.array(slots, np.int32)
    return model.run(step(rows, model.capabilities, adapter_slots=given)).copy()


def has_kernel(model: Model) -> bool:
    inputs = {given.name for given in model._session.get_inputs()}  # type: ignore[attr-defined]
    assert ("lora.weights" in inputs) != ("lora.qkv.owners" in inputs)
    return "lora.weights" in inputs


@KERNEL
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("attention", ["auto", "decomposed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_it_does_what_standard_operators_do(
    tiny_artifact: ArtifactMaker,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    attention: Any,
    dtype: Any,
) -> None:
    path = tiny_artifact(family, "fp16")
    found = []
    for value in ("0", "1"):
        monkeypatch.setenv(cuda.LORA_VARIABLE, value)
        model = emulated(path, attention=attention, dtype=dtype)
        assert has_kernel(model) == (value == "1")
        fill(model, path)
        found.append(logits(model))
        model.close()
    off = 2e-4 if dtype == "float32" else 0.06
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=off)
    assert np.abs(found[0][7:14] - found[0][:7]).max() > 0.5


def test_it_is_there_for_those_who_ask(tiny_artifact: ArtifactMaker) -> None:
    model = emulated(tiny_artifact("llama", "fp16"))
    assert not has_kernel(model)
    model.close()


def test_a_wish_that_is_not_understood(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cuda.LORA_VARIABLE, "false")
    with pytest.raises(ProviderError, match="ONNXPORT_CUDA_LORA is 'false'; set it to 0 or 1"):
        emulated(tiny_artifact("llama", "fp16"))


@KERNEL
def test_replayed_steps_read_the_adapters_of_today(
    tiny_artifact: ArtifactMaker, asked: None
) -> None:
    """They lie where the last ones did, of any rank: no step is recorded anew."""
    path = tiny_artifact("llama", "fp16")
    plain, replayed = (emulated(path, capture_graphs=each) for each in (False, True))
    spec = Artifact.read(path).manifest.model
    assert has_kernel(replayed)

    def put(slot: int, seed: int | None) -> None:
        for model in (plain, replayed):
            model.set_adapter(slot, None if seed is None else make_adapter(spec, seed))

    def decode(*slots: int) -> NDArray[np.float32]:
        wanted, found = (logits(model, slots, 1) for model in (plain, replayed))
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
        return found

    before = decode(0, 0)
    put(1, 3)
    of_three = decode(1, 0)
    put(1, 2)
    of_two = decode(1, 0)
    assert np.abs(of_two[0] - of_three[0]).max() > 0.1
    put(2, 3)
    np.testing.assert_array_equal(decode(2, 1), np.stack([of_three[0], of_two[0]]))
    put(1, None)
    with pytest.raises(ProviderError, match="slots 1, and there is none"):
        logits(replayed, (1, 0), 1)
    np.testing.assert_array_equal(decode(0, 0), before)
    assert replayed._replay._num_recorded == 1  # type: ignore[attr-defined]
    for model in (plain, replayed):
        model.close()


@KERNEL
def test_what_is_refused_leaves_the_slot_as_it_was(
    tiny_artifact: ArtifactMaker, asked: None
) -> None:
    path = tiny_artifact("llama", "fp16")
    model = emulated(path)
    fill(model, path)
    before = logits(model)
    delta = LoraDelta(np.ones((1, 64), np.float32), np.full((64, 1), 1e5, np.float32))
    with pytest.raises(AdapterError, match="too large for float16; keep adapters in another type"):
        model.set_adapter(1, LoraAdapter({(0, "q_proj"): delta}))
    np.testing.assert_array_equal(logits(model), before)
    model.close()


@KERNEL
def test_a_copy_that_fails_leaves_an_empty_slot(
    tiny_artifact: ArtifactMaker, asked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for the slot is told so, and gets no other adapter, nor half of one."""
    path = tiny_artifact("llama", "fp16")
    model = emulated(path)
    fill(model, path)
    before = logits(model, (0, 2, 3))

    def fail(address: int, numbers: NDArray[Any]) -> None:
        if numbers.dtype != np.int32:
            raise DeviceLostError("it is gone")
        copy(address, numbers)

    memory = model._adapters._storage._write.__self__  # type: ignore[attr-defined]
    copy = memory._copy
    monkeypatch.setattr(memory, "_copy", fail)
    with pytest.raises(DeviceLostError, match="it is gone"):
        model.set_adapter(1, make_adapter(Artifact.read(path).manifest.model, 2))
    with pytest.raises(ProviderError, match="slots 1, and there is none"):
        logits(model, (0, 1))
    np.testing.assert_array_equal(logits(model, (0, 2, 3)), before)
    model.close()


@KERNEL
def test_a_rank_that_the_kernel_has_no_room_for(tiny_artifact: ArtifactMaker, asked: None) -> None:
    model = emulated(tiny_artifact("llama", "fp16"), max_adapter_rank=cuda.MOST_RANK + 1)
    assert not has_kernel(model)
    model.close()


def on_stand_in(path: Path, kernel: LoraKernel, **options: Any) -> Model:
    """A model as a GPU would run it, but that its standard operators are the CPU's."""
    recipe = cuda.CudaProvider(emulate=True)._recipe("a stand-in", (9, 0))
    recipe = replace(recipe, native=None, capture_options=None, lora_kernel=kernel)
    chosen = replace(OPTIONS, **options)
    return load_on_device(Artifact.read(path), chosen, recipe, CPU, emulate=False)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_whole_model_on_the_kernel_itself(
    tiny_artifact: ArtifactMaker, kernel: LoraKernel, dtype: Any
) -> None:
    path = tiny_artifact("qwen3", "fp16")
    given = on_stand_in(path, kernel, dtype=dtype)
    wanted = on_stand_in(path, replace(kernel, library=None), dtype=dtype)
    assert (has_kernel(given), has_kernel(wanted)) == (True, False)
    for model in (given, wanted):
        fill(model, path)
    found, expected = (logits(model, length=2) for model in (given, wanted))
    off = 2e-4 if dtype == "float32" else 0.06
    np.testing.assert_allclose(found, expected, rtol=0, atol=off)
    for model in (given, wanted):
        model.close()


@pytest.mark.parametrize("problem", ["compiler", "image", "answer"])
def test_a_kernel_that_cannot_be_trusted_is_not_used(
    tiny_artifact: ArtifactMaker,
    kernel: LoraKernel,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_compiler(dtype: str) -> bytes:
        raise ProviderError("there is no compiler")

    if problem == "compiler":
        kernel = replace(kernel, compile=no_compiler)
    elif problem == "image":
        kernel = replace(kernel, compile=lambda dtype: b"nothing\0")
    else:
        monkeypatch.setattr(device_lora, "distrust_lora", lambda *_: "it computes wrongly here")
    path = tiny_artifact("llama", "fp16")
    with caplog.at_level(logging.WARNING):
        model = on_stand_in(path, kernel)
    said = {"compiler": "no compiler", "image": "image is invalid", "answer": "wrongly"}[problem]
    assert "cuda: adapters in standard operators: " in caplog.text
    assert said in caplog.text
    assert not has_kernel(model)
    fill(model, path)
    assert np.isfinite(logits(model)).all()
    model.close()


class FakeRuntime:
    """CUDA's runtime, whose device memory is the host's."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.device: int | None = None
        self.is_there = False

    def cudaSetDevice(self, device: Any) -> int:  # noqa: N802
        self.device = device.value
        return 0

    def cudaStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        assert stream.value is None
        self.is_there = True
        return 0

    def cudaMemcpy(self, to: Any, source: Any, size: Any, kind: Any) -> int:  # noqa: N802
        assert kind.value == 1
        if not self.status:
            ctypes.memmove(to, source, size.value)
        return self.status


def test_numbers_are_copied_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRuntime(0)
    monkeypatch.setattr(memory, "runtime", lambda: fake)
    place = np.zeros(5, np.int32)
    memory.copy_to_device(2, place.ctypes.data + 4, np.array([7, 8], np.int32))
    assert (place.tolist(), fake.device, fake.is_there) == ([0, 7, 8, 0, 0], 2, True)
    fake.status = 1
    with pytest.raises(ProviderError, match="device 2 failed while copying 8 bytes to it: "):
        memory.copy_to_device(2, place.ctypes.data, np.array([7, 8], np.int32))
    fake.status = 700
    with pytest.raises(DeviceLostError, match="CUDA device 2 was lost while copying 8 bytes"):
        memory.copy_to_device(2, place.ctypes.data, np.array([7, 8], np.int32))
    monkeypatch.setattr(memory, "runtime", lambda: None)
    with pytest.raises(ProviderError, match=r"runtime library, .*cudart.*, cannot be loaded"):
        memory.copy_to_device(0, place.ctypes.data, place)
