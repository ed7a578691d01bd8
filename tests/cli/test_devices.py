"""`onnxport devices`, as a process and with stand-ins for what this machine lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from onnxport.cli import main
from onnxport.errors import ArtifactError, CapacityError, ProviderError
from onnxport.providers import ort_devices, registry
from onnxport.providers.base import Device, LoadOptions, Probe
from onnxport.providers.features import Features
from onnxport.providers.null import NullModel
from onnxport.providers.ort_devices import ExecutionDevice, OnnxRuntime

from .conftest import onnxport

GPU = Probe(
    True,
    "",
    (Device("a GPU", 16 << 30, "gpu"), Device("another", None, "npu")),
    {"driver": "580.1", "library": "2"},
    ("mind the gap",),
    Features(("native", "decomposed"), ("float16",), ("float16", "int8")),
)
MISSING = Probe(False, "no driver: pip install 'onnxport[cuda]'")
RUNTIME = OnnxRuntime(
    "1.31.1",
    {"onnxruntime": "1.31.1"},
    ("GpuProvider", "OtherProvider"),
    (ExecutionDevice("GpuProvider", "We", {"version": "3"}, "gpu", "They", 0x10DE, 7, {"a": "b"}),),
    ("two of them are installed",),
)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[NullModel]:
    """A machine with three providers, one of which cannot load; returns what was loaded."""
    opened = []

    def open_model(path: Path, provider: str, options: LoadOptions) -> NullModel:
        assert options == LoadOptions(kv_cache_tokens=1024)
        if provider == "npu":
            raise CapacityError("the NPU is too small")
        opened.append(NullModel())
        return opened[-1]

    probes = [("gpu", GPU), ("npu", GPU), ("cuda", MISSING)]
    monkeypatch.setattr(registry, "probe_all", lambda: probes)
    monkeypatch.setattr(registry, "open_model", open_model)
    monkeypatch.setattr(ort_devices, "find_onnxruntime", lambda: RUNTIME)
    monkeypatch.setattr("onnxport.graphs.artifact.Artifact.read", lambda path: None)
    return opened


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["devices", *arguments]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_every_provider_is_shown(
    stand_ins: list[NullModel], capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys).splitlines() == [
        "gpu        yes  driver 580.1, library 2",
        "                a GPU (gpu, 16.0 GiB)",
        "                another (npu)",
        "                attention native, decomposed; activations float16; KV cache float16, int8",
        "                note: mind the gap",
        "npu        yes  driver 580.1, library 2",
        "                a GPU (gpu, 16.0 GiB)",
        "                another (npu)",
        "                attention native, decomposed; activations float16; KV cache float16, int8",
        "                note: mind the gap",
        "cuda       no   no driver: pip install 'onnxport[cuda]'",
        "",
        "ONNX Runtime 1.31.1 (onnxruntime) finds",
        "  GpuProvider                They gpu (vendor 0x10de, device 0x0007)",
        "                             by We, version 3",
        "  and, without saying for which devices: OtherProvider",
        "problem: two of them are installed",
    ]


def test_the_json_has_it_all(
    stand_ins: list[NullModel], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(printed(capsys, "--json"))
    gpu: dict[str, Any] = {
        "available": True,
        "reason": "",
        "devices": [
            {"name": "a GPU", "memory_bytes": 16 << 30, "kind": "gpu"},
            {"name": "another", "memory_bytes": None, "kind": "npu"},
        ],
        "versions": {"driver": "580.1", "library": "2"},
        "notes": ["mind the gap"],
        "features": {
            "attention": ["native", "decomposed"],
            "dtypes": ["float16"],
            "kv_cache_dtypes": ["float16", "int8"],
            "caches_beside": {},
            "level_dtypes": {},
            "has_experts": False,
            "has_other_experts": False,
            "has_states": False,
            "has_latents": False,
            "has_mixed_layers": False,
            "tells_states": False,
            "attention_dtypes": {},
        },
    }
    missing = {
        "available": False,
        "reason": MISSING.reason,
        "devices": [],
        "versions": {},
        "notes": [],
        "features": None,
    }
    assert found == {
        "format": 1,
        "providers": [
            {"provider": "gpu", **gpu},
            {"provider": "npu", **gpu},
            {"provider": "cuda", **missing},
        ],
        "onnxruntime": {
            "version": "1.31.1",
            "wheels": {"onnxruntime": "1.31.1"},
            "execution_providers": ["GpuProvider", "OtherProvider"],
            "devices": [
                {
                    "execution_provider": "GpuProvider",
                    "vendor": "We",
                    "metadata": {"version": "3"},
                    "hardware": "gpu",
                    "hardware_vendor": "They",
                    "vendor_id": 0x10DE,
                    "device_id": 7,
                    "hardware_metadata": {"a": "b"},
                }
            ],
        },
        "problems": ["two of them are installed"],
    }


def test_an_artifact_is_loaded_on_each_provider(
    stand_ins: list[NullModel], capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "model").splitlines() == [
        "null       yes  none",
        "                attention native, activations float32, KV cache int64 in blocks of 16 "
        "tokens",
        "                nodes: null 1",
        "npu        no   the NPU is too small",
        "cuda       no   no driver: pip install 'onnxport[cuda]'",
    ]
    assert [model.closed for model in stand_ins] == [True]
    found = json.loads(printed(capsys, "model", "--json"))
    loaded, refused, missing = found.pop("providers")
    assert found == {"format": 1, "artifact": "model"}
    assert loaded == {
        "provider": "null",
        "loaded": True,
        "reason": "",
        "device": "none",
        "emulated": False,
        "attention": "native",
        "compute_dtype": "float32",
        "kv_cache_dtype": "int64",
        "block_size": 16,
        "max_batch_rows": None,
        "max_batch_tokens": None,
        "placement": {"null": 1},
        "on_host": {},
    }
    assert refused.keys() == missing.keys() == loaded.keys()
    assert (refused["loaded"], refused["reason"]) == (False, "the NPU is too small")
    assert (missing["placement"], missing["reason"]) == (None, MISSING.reason)


def test_a_provider_that_is_named_is_final(
    stand_ins: list[NullModel], capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "model", "--provider", "gpu").startswith("null       yes  none\n")
    assert main(["devices", "model", "--provider", "npu"]) == 1
    assert capsys.readouterr() == ("", "error: the NPU is too small\n")
    assert main(["devices", "--provider", "gpu"]) == 1
    assert "--provider gpu says where to load an artifact" in capsys.readouterr().err


def test_nothing_loaded_is_a_failure(
    stand_ins: list[NullModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path, provider: str, options: LoadOptions) -> NullModel:
        raise ProviderError("no")

    monkeypatch.setattr(registry, "open_model", refuse)
    assert printed(capsys, "model", code=1).startswith("gpu        no   no\n")

    def damaged(path: Path) -> None:
        raise ArtifactError("not an artifact")

    monkeypatch.setattr("onnxport.graphs.artifact.Artifact.read", damaged)
    assert main(["devices", "model"]) == 1
    assert capsys.readouterr() == ("", "error: not an artifact\n")


def test_what_the_host_runs_for_a_device_is_shown(
    stand_ins: list[NullModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from dataclasses import replace

    loaded = replace(NullModel().capabilities, on_host={"Gather": 2, "Add": 1}, emulated=True)
    monkeypatch.setattr(NullModel, "capabilities", loaded)
    lines = printed(capsys, "model", "--provider", "gpu").splitlines()
    assert lines[0] == "null       yes  none, emulated"
    assert lines[3].strip() == "on the host, although they work with activations: Gather 2, Add 1"


def test_without_onnxruntime(
    stand_ins: list[NullModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ort_devices, "find_onnxruntime", OnnxRuntime)
    assert printed(capsys).endswith("\nONNX Runtime cannot be imported\n")
    found = json.loads(printed(capsys, "--json"))
    assert found["onnxruntime"]["version"] is None
    assert found["onnxruntime"]["devices"] == []


@pytest.mark.slow
def test_this_machine() -> None:
    assert re.search(r"^cpu +yes  onnxruntime ", onnxport("devices").stdout, re.MULTILINE)
    found = json.loads(onnxport("devices", "--json").stdout)
    providers = {one["provider"]: one for one in found["providers"]}
    assert providers.keys() == registry.PROVIDERS.keys()
    assert providers["cpu"]["available"]
    assert providers["cpu"]["devices"][0]["kind"] == "cpu"
    assert providers["cpu"]["features"]["dtypes"] == ["float32"]
    assert providers["directml"]["reason"]
    (processor,) = [
        device
        for device in found["onnxruntime"]["devices"]
        if device["execution_provider"] == "CPUExecutionProvider"
    ]
    assert processor["hardware"] == "cpu"
    assert found["problems"] == []


@pytest.mark.slow
def test_an_artifact_on_this_machine(artifact: Path) -> None:
    done = onnxport("devices", artifact, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = {one["provider"]: one for one in json.loads(done.stdout)["providers"]}
    assert found["cpu"]["loaded"]
    assert found["cpu"]["placement"]["CPUExecutionProvider"] > 10
    assert found["cpu"]["on_host"] == {}
    assert all(one["loaded"] or one["reason"] for one in found.values())
    text = onnxport("devices", artifact, "--provider", "cpu").stdout
    assert re.search(r"nodes: CPUExecutionProvider \d+", text)
