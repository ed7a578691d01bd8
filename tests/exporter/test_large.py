"""Exports of larger random checkpoints as real processes: memory, interruption, the benchmark's."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks import make_checkpoint
from onnxport.exporter.config import Config
from onnxport.exporter.export import export_model
from onnxport.exporter.families import find_family
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.artifact import Artifact
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
MEASURE = """
import resource, sys
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
export_model(sys.argv[1], sys.argv[2], ExportOptions(precision=sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def make(folder: Path, **changes: Any) -> Path:
    config = {**make_checkpoint.SHAPES["tiny"], **changes}
    folder.mkdir(parents=True)
    make_checkpoint.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    make_checkpoint.write_weights(config, folder / "model.safetensors", seed=0)
    return folder


@pytest.mark.parametrize("shape", make_checkpoint.SHAPES)
def test_published_shapes_are_understood(shape: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_checkpoint.SHAPES[shape]))
    config = Config.read(tmp_path)
    family = find_family(config)
    spec = family.spec(config, None)
    config.check_all_used(family.name)
    stored = dict(make_checkpoint.tensor_shapes(make_checkpoint.SHAPES[shape]))
    shapes = {
        name: (*dims[:-2], 32 * dims[-2]) if name.endswith("_blocks") else dims
        for name, dims in stored.items()
        if not name.endswith("_scales")
    }
    assert plan_weights(spec, family.tensors).shapes() == shapes
    billions = sum(int(np.prod(dims)) for dims in shapes.values()) / 1e9
    if shape != "tiny":
        told = re.findall(r"-(\d[\d.]*)(b|m)", shape)
        largest = max(float(size) / {"b": 1, "m": 1000}[unit] for size, unit in told)
        assert billions == pytest.approx(largest, rel=0.5)  # names are rounded, or say less


@pytest.mark.parametrize(
    ("count", "attention"), [(1, [0]), (3, [2]), (6, [5]), (15, [5]), (82, [5, 15, 25, 35, 45])]
)
def test_any_number_of_layers_has_some_with_attention(
    count: int, attention: list[int], tmp_path: Path
) -> None:
    shape = make_checkpoint.SHAPES["granite-4.0-h-micro-3b"]
    config = shape | make_checkpoint.with_layers(shape, count)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = Config.read(tmp_path)
    family = find_family(read)
    spec = family.spec(read, None)
    assert (spec.num_layers, list(spec.cached_layers)[:5]) == (count, attention)
    stored = dict(make_checkpoint.tensor_shapes(config))
    assert plan_weights(spec, family.tensors).shapes() == stored
    windows = make_checkpoint.SHAPES["gemma-3-1b"]
    assert make_checkpoint.with_layers(windows, 2)["num_hidden_layers"] == 2


def test_the_benchmarks_checkpoint_exports(tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", "--layers", "3", str(tmp_path / "checkpoint")]
    command = [sys.executable, "-m", "benchmarks.make_checkpoint", *arguments]
    subprocess.run(command, check=True, timeout=PATIENCE_S, cwd=ROOT)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact")
    assert Artifact.read(path).manifest.model.num_layers == 3
    with np.load(path / "golden.npz") as golden:
        assert np.isfinite(golden["logits"]).all()
        assert np.ptp(golden["logits"]) > 1
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "Grüße, 世界!\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int4", "fp16"])
def test_memory_does_not_grow_with_the_model(precision: str, tmp_path: Path) -> None:
    sizes_kib = []
    for layers in (2, 24):
        changes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers}
        folder = make(tmp_path / f"checkpoint{layers}", **changes)
        arguments = [str(folder), str(tmp_path / f"artifact{layers}"), precision]
        result = subprocess.run(
            [sys.executable, "-c", MEASURE, *arguments],
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        sizes_kib.append(int(result.stdout))
    assert (tmp_path / "checkpoint24" / "model.safetensors").stat().st_size > 600 << 20
    assert sizes_kib[1] - sizes_kib[0] < 32 << 10  # the 22 more layers are 640 MiB


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    folder = make(tmp_path / "checkpoint", hidden_size=1024, intermediate_size=8192)
    arguments = [sys.executable, "-m", "onnxport", "export", str(folder), str(tmp_path / "out")]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list(tmp_path.glob(".out.*.partial")) or process.poll() is not None)
    assert process.poll() is None
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode not in (0, None)
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
