"""`onnxport verify`: what it prints and how it ends."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.cache_rows import row_bytes
from onnxport.cli import build_parser, main
from onnxport.cli.verify import command_line
from onnxport.cli.verify_table import lines
from onnxport.errors import ArtifactError, CapacityError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import Device, Probe
from onnxport.providers.registry import EMULATED, PROVIDERS
from onnxport.serving.verify.golden import read_golden
from onnxport.serving.verify.machine import Machine
from onnxport.serving.verify.report import SCHEMA, ProviderReport, Report, describe
from onnxport.serving.verify.verifier import Checks

from ..serving.verifying import (
    AloneModel,
    FakeProvider,
    WrongModel,
    fail,
    fake_artifact,
    fake_verifier,
    late,
)
from .conftest import onnxport

MACHINE = Machine("Linux", "x86_64", "A Processor With a Name", 2, 16 << 30, "3.11.7")


def change_golden(artifact: Path, folder: Path, **changes: np.ndarray) -> Path:
    """Return a copy of an artifact with another golden file, which its manifest vouches for."""
    shutil.copytree(artifact, folder)
    with np.load(folder / "golden.npz") as file:
        arrays = dict(file)
    buffer = io.BytesIO()
    np.savez(buffer, **(arrays | changes))
    (folder / "golden.npz").write_bytes(buffer.getvalue())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["golden.npz"] = {
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        "size": len(buffer.getvalue()),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.slow  # it loads the artifact twice on each
def test_every_provider_here_gives_the_same_answers(artifact: Path) -> None:
    done = onnxport("verify", artifact, "--no-speed")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.startswith("tiny: llama, int4, ")
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    for name in PROVIDERS:
        assert f"\n{name}: ok on " in done.stdout or f"\n{name}: missing. " in done.stdout


@pytest.mark.slow
def test_json(artifact: Path) -> None:
    done = onnxport("verify", artifact, "--json", "--provider", "cpu", "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["command"] == "onnxport verify tiny --provider cpu --threads 1"
    assert report["artifact"]["precision"] == "int4"
    (cpu,) = report["providers"]
    assert (cpu["provider"], cpu["state"], cpu["emulated"]) == ("cpu", "passed", False)
    assert cpu["versions"]["onnxruntime"]
    exact, served = cpu["modes"]
    assert exact["tolerance"]["name"] == "float32 arithmetic"
    assert served["tolerance"]["name"] == "8-bit activations"
    assert exact["whole"]["max_diff"] < 1e-4
    assert exact["capabilities"]["placement"]
    for mode in (exact, served):
        assert [one["state"] for one in mode["variants"]] == ["passed"] * 4
    assert served["agreement"]["reference"] == "cpu"
    moved = [(one["source"], one["arithmetic"]) for one in cpu["transfers"]]
    assert moved[0] == ("cpu", "float32 arithmetic")
    # Served the cache has 16 bits where the processor has them, and K/V are moved once more.
    assert moved[1:] in ([], [("cpu", "8-bit activations")] * 2)
    assert cpu["speed"]["prefill_tokens_per_s"] > 0
    assert [one["rows"] for one in cpu["speed"]["decode"]] == [1, 8]


def test_what_was_not_asked_for_is_not_done(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(artifact), "--provider", "cpu", "--json", "--no-variants"]
    assert main([*arguments, "--no-speed", "--attention", "decomposed"]) == 0
    report = json.loads(capsys.readouterr().out)
    (cpu,) = report["providers"]
    assert cpu["modes"][0]["capabilities"]["attention"] == "decomposed"
    assert [cpu["modes"][0]["variants"], cpu["transfers"], cpu["speed"]] == [[], [], None]
    # the decomposed graph has no other cache than float32, and says so
    first, *others = cpu["caches"]
    assert (first["dtype"], first["reason"]) == ("float32", "")
    assert all("stores float32 or auto" in one["reason"] for one in others)
    assert {one["state"] for one in others} == {"skipped"}
    assert report["command"].endswith("--attention decomposed --no-variants --no-speed")


def test_what_each_type_of_cache_costs(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", str(artifact), "--provider", "cpu", "--no-variants", "--no-speed"]
    assert main([*arguments, "--json"]) == 0
    (cpu,) = json.loads(capsys.readouterr().out)["providers"]
    found = {one["dtype"]: one for one in cpu["caches"]}
    if found["int8"]["reason"]:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    assert list(found) == ["float32", "float16", "bfloat16", "int8", "int4"]
    form = cpu["modes"][0]["capabilities"]["kv_format"]
    rows = 2 * form["num_layers"] * form["num_kv_heads"]
    assert [one["bytes_per_token"] for one in found.values()] == [
        rows * form["head_size"] * 4,
        rows * form["head_size"] * 2,
        rows * form["head_size"] * 2,
        rows * row_bytes("int8", form["head_size"]),
        rows * row_bytes("int4", form["head_size"]),
    ]
    errors = [one["error"]["max_diff"] for one in found.values()]
    assert 0 == errors[0] < errors[1] < errors[2] < errors[3] < 0.6
    assert errors[3] < errors[4]
    assert main([*arguments, "--no-caches", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["providers"][0]["caches"] == []
    assert report["command"].endswith(" --no-caches")


def test_a_missing_provider_verifies_nothing(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = FakeProvider(reason="there is no such device here")
    monkeypatch.setattr(
        "onnxport.serving.verify.verifier.get_provider", lambda name, emulate: provider
    )
    assert main(["verify", str(artifact), "--provider", "fake"]) == 1
    assert "fake: missing. there is no such device here" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", EMULATED)
def test_emulation_is_said_everywhere(
    artifact: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments = ["verify", str(artifact), "--provider", name, "--emulate", "--no-speed"]
    assert main(arguments) == 0, capsys.readouterr().out
    text = capsys.readouterr().out
    assert f"\n{name} (emulated): ok on " in text
    assert main([*arguments, "--json", "--no-variants"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["emulated"] for one in report["providers"]] == [True]
    assert all(one["capabilities"]["emulated"] for one in report["providers"][0]["modes"])


def test_processors_go_first_and_what_is_missing_is_emulated_if_asked(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, cpu = (Probe(True, "", (Device("x", None, kind),)) for kind in ("gpu", "cpu"))
    probes = [
        ("a", gpu),
        ("b", Probe(False, "b is gone")),
        ("c", cpu),
    ]
    monkeypatch.setattr("onnxport.providers.registry.probe_all", lambda: probes)
    monkeypatch.setattr("onnxport.providers.registry.EMULATED", ("a", "b"))

    def verify(verifier: object, name: str, *, emulate: bool = False) -> ProviderReport:
        return ProviderReport(name, "passed", "", emulate)

    monkeypatch.setattr("onnxport.serving.verify.verifier.Verifier.verify", verify)
    for flags, emulated in ((["--json"], False), (["--json", "--emulate"], True)):
        assert main(["verify", str(artifact), *flags]) == 0
        found = json.loads(capsys.readouterr().out)["providers"]
        assert [(one["provider"], one["state"], one["emulated"]) for one in found] == [
            ("c", "passed", False),
            ("a", "passed", False),
            ("b", "passed", emulated),
        ]


def test_an_unknown_provider_is_an_error(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(artifact), "--provider", "abacus"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no provider 'abacus'" in err


def test_the_command_is_recorded_without_folders() -> None:
    def recorded(*arguments: str) -> str:
        return command_line(build_parser().parse_args(["verify", *arguments]), "model")

    assert recorded("/a/b/model", "--json") == "onnxport verify model"
    given = ["--provider", "cuda", "--emulate", "--no-coarse-head", "--kv-cache-dtype", "float16"]
    assert recorded("x", *given) == (
        "onnxport verify model --provider cuda --kv-cache-dtype float16 --emulate --no-coarse-head"
    )
    for flag in ("--capture-graphs", "--no-capture-graphs"):
        assert recorded("x", flag) == f"onnxport verify model {flag}"
    assert recorded("x", "--no-hybrid-kv-cache") == "onnxport verify model --no-hybrid-kv-cache"


def test_other_logits_fail(artifact: Path, tmp_path: Path) -> None:
    logits = read_golden(Artifact.read(artifact)).logits
    logits[:, 0] += 0.1
    done = onnxport(
        "verify",
        change_golden(artifact, tmp_path / "changed", logits=logits),
        "--provider",
        "cpu",
        "--no-speed",
    )
    assert done.returncode == 1
    assert "\ncpu: FAILED on " in done.stdout
    assert "float32 arithmetic, golden logits in one step: max diff" in done.stdout


@pytest.mark.parametrize(
    "changes",
    [
        {"logits": np.zeros((3, 5), np.float32)},
        {"logits": np.zeros((4, 5), np.float32)},
        {"logits_indices": np.array([0, 1, 2, 99], np.int32)},
        {"token_ids": np.array([None])},
    ],
)
def test_a_golden_file_that_is_none(
    artifact: Path, tmp_path: Path, changes: dict[str, np.ndarray]
) -> None:
    with pytest.raises(ArtifactError, match=r"golden\.npz"):
        read_golden(Artifact.read(change_golden(artifact, tmp_path / "changed", **changes)))


def many(inputs: Any) -> bool:
    return len(inputs.past_sequence_lengths) > 1


def test_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    providers = {
        "cpu": FakeProvider(lambda: WrongModel()),
        "directml": FakeProvider(lambda: WrongModel(block_size=32)),
        "late": FakeProvider(lambda: WrongModel(late)),
        "many": FakeProvider(lambda: WrongModel(many)),
        "alone": FakeProvider(lambda: AloneModel()),
        "full": FakeProvider(fail(CapacityError("the KV cache does not fit: " + "so much " * 30))),
        "gone": FakeProvider(reason="fake is missing: pip install 'onnxport[fake]'"),
    }
    verifier = fake_verifier(monkeypatch, tmp_path, providers, checks=Checks())
    found = [verifier.verify(name, emulate=name == "directml") for name in providers]
    report = Report(
        SCHEMA, "1.0", "now", "verify", MACHINE, describe(fake_artifact(tmp_path)), tuple(found)
    )
    text = list(lines(report))
    assert all(len(line) <= 100 for line in text)
    first, rest = text.index(""), [line.split() for line in text]
    answers = text[first + 1 : text.index("", first + 1)]
    assert answers[0].split()[-4:] == ["batched", "chunked", "cached", "preempted"]
    marks = {line.split()[0]: line.split()[-4:] for line in answers[1:]}
    assert marks["cpu"] == ["ok"] * 4
    assert marks["many"] == ["FAILED"] * 4
    assert marks["alone"] == ["FAILED"] * 4
    assert answers[2].startswith("directml (emulated)")
    titles = text[text.index("", first + 1) + 1]
    own, moved = titles.index("own K/V"), titles.index("K/V of cpu")
    line = next(line for line in text if line.startswith("directml (emulated)") and "," in line)
    assert line[own:].split()[0] == "ok"
    assert line[moved:].split()[0] == "ok"
    assert len(line.split()) == 2 + 3 + 3  # the name, three marks, three speeds
    assert any(words[:2] == ["late:", "FAILED"] for words in rest)
    joined = "\n".join(text)
    assert "float32 arithmetic, against cpu: " in joined
    assert "answers differ; token " in joined
    failed = r"batched: \d+ steps failed and were tried again:\s+ProviderError: no batches here"
    assert re.search(failed, joined)
    assert "full: FAILED\n  the KV cache does not fit: so much" in joined
    assert "gone: missing. fake is missing: pip install 'onnxport[fake]'" in joined
    assert not report.passed
