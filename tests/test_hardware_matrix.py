"""The hardware matrix says what the evidence says, of every provider, and the evidence is fresh."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from onnxport.graphs.manifest import FORMAT_VERSION, PRECISIONS
from onnxport.providers.registry import PROVIDERS
from scripts import hardware_matrix as matrix
from scripts.hardware_matrix import Evidence, EvidenceError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "hardware_matrix.md").read_text(encoding="utf-8")
EVIDENCE = Evidence(
    schema=matrix.SCHEMA,
    provider="cuda",
    device="A GPU",
    architecture="x86_64",
    attention="native",
    precision="fp16",
    emulated=False,
    date="2026-01-02",
    command="onnxport verify model",
    onnxport="0.1.0",
    versions={"onnxruntime": "1.31.1"},
    artifact="model",
    family="llama",
    format_version=FORMAT_VERSION,
    arithmetics=["16-bit arithmetic"],
    checks=dict.fromkeys(matrix.CHECKS, "passed"),
    speed=[1000.4, 50, 300],
)
PINS = matrix.read_pins(ROOT / "pyproject.toml")


def rows(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_is_what_the_evidence_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--check"]) == 0, capsys.readouterr().err


def test_every_provider_has_a_row_for_every_precision() -> None:
    for name in PROVIDERS:
        own = [row for row in rows(PAGE) if row[0] == f"`{name}`" and len(row) == 13]
        assert {part for row in own for part in row[3].split(", ")} == set(PRECISIONS), name


def test_a_provider_without_evidence_is_untested() -> None:
    page = matrix.render([], [])
    assert [row[0].strip("`") for row in rows(page)] == sorted(PROVIDERS)
    assert all(row[5:12] == ["*untested*"] * 7 for row in rows(page))


def test_what_was_measured_is_told_from_what_was_emulated() -> None:
    checks = {**EVIDENCE.checks, "cached": "failed", "preempted": "skipped"}
    found = [
        replace(EVIDENCE, checks=checks),
        replace(EVIDENCE, emulated=True, precision="int4", speed=None),
    ]
    measured, emulated, rest = (row for row in rows(matrix.render(found, [])) if row[0] == "`cuda`")
    assert measured[5:11] == [
        *["*measured*"] * 3,
        "**failed**",
        "*untested*",
        "*measured*",
    ]
    assert measured[11] == "1,000 / 50 / 300"
    assert "2026-01-02" in measured[12]
    assert "onnxruntime 1.31.1; `onnxport verify model`" in measured[12]
    assert emulated[5:12] == [*["*emulated*"] * 6, "*untested*"]
    # An emulated graph says nothing of the hardware.
    assert rest[1:5] == ["any", "", "int4, int8, fp32", ""]


@pytest.mark.parametrize(
    ("arithmetics", "moved_in", "cell"),
    [
        (["x"], None, "*measured*"),
        (["float32", "16-bit"], None, "*measured* in float32"),
        (["float32", "16-bit"], ["float32"], "*measured* in float32"),
        (["float32", "16-bit"], ["float32", "16-bit"], "*measured*"),
    ],
)
def test_the_page_says_in_which_arithmetic_blocks_were_moved(
    arithmetics: list[str], moved_in: list[str] | None, cell: str
) -> None:
    found = replace(EVIDENCE, arithmetics=arithmetics, moved_in=moved_in)
    row = next(row for row in rows(matrix.render([found], [])) if row[0] == "`cuda`")
    assert row[4] == ", then ".join(arithmetics)
    assert row[10] == cell
    failed = replace(found, checks={**found.checks, "transfers": "failed"})
    row = next(row for row in rows(matrix.render([failed], [])) if row[0] == "`cuda`")
    assert row[10] == "**failed**"


def test_the_page_claims_no_native_transfers_on_cuda() -> None:
    """Those of the H100 were in float32, which is decomposed there."""
    own = [
        row for row in rows(PAGE) if row[0] == "`cuda`" and row[2] == "native" and len(row) == 13
    ]
    measured = [row[10] for row in own if "emulated" not in row[1]]
    assert set(measured) == {"*measured* in float32 arithmetic"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"onnxruntime": "1.30.0"}}, "is of onnxruntime 1.30.0, pyproject.toml says"),
        ({"versions": {"onnxruntime-gpu": "1.32.0"}}, "is of onnxruntime-gpu 1.32.0"),
        ({"versions": {"numpy": "2.0"}}, "does not say the version of nvidia-ml-py"),
        ({"format_version": FORMAT_VERSION + 1}, "artifact format"),
        ({"provider": "abacus"}, "there is no provider 'abacus'"),
        ({"schema": 0}, "has schema 0"),
        ({"provider": "openvino", "versions": {"openvino": "2026.3.0"}}, "openvino 2026.3.0"),
        ({"emulated": True, "versions": {"onnxruntime": "1.33.0"}}, "onnxruntime 1.33.0"),
    ],
)
def test_stale_evidence(changes: dict[str, Any], message: str) -> None:
    assert list(matrix.problems([EVIDENCE], PINS)) == []
    (problem,) = matrix.problems([replace(EVIDENCE, **changes)], PINS)
    assert message in problem
    assert EVIDENCE.provider in problem or "provider" in changes


def test_processors_of_one_name_are_told_apart_by_their_kernels() -> None:
    versions = [{"onnxruntime": "1.31.1", "attention kernel": name} for name in ("avx2", "avx512")]
    older, newer = (replace(EVIDENCE, versions=one) for one in versions)
    assert older.file_name != newer.file_name
    assert "avx2" in older.where
    assert replace(older, emulated=True).where == replace(newer, emulated=True).where
    page = matrix.render([older, newer], [])
    assert page.count(f"| {older.where} |") == page.count(f"| {newer.where} |") == 1


def test_a_provider_may_be_installed_in_two_ways() -> None:
    text = {"cuda": ["onnxruntime-gpu==1"], "cuda-plugin": ["onnxruntime==2", "gpu-ep==0.4"]}
    pins = {name: [Requirement(line) for line in lines] for name, lines in text.items()}
    for versions, fresh in (
        ({"onnxruntime": "1"}, True),
        ({"onnxruntime": "2", "gpu-ep": "0.4"}, True),
        ({"onnxruntime": "2", "gpu-ep": "0.5"}, False),
        ({"onnxruntime": "3"}, False),
    ):
        found = list(matrix.problems([replace(EVIDENCE, versions=versions)], pins))
        assert (not found) == fresh, versions


def mode(**changes: Any) -> dict[str, Any]:
    """One arithmetic as `onnxport verify --json` prints it."""
    fine = {"max_diff": 0.5, "max_kl": 0.5}
    return {
        "tolerance": {"name": "exact", "max_diff": 1, "max_kl": 1},
        "capabilities": {"device": "A GPU", "attention": "native"},
        **dict.fromkeys(("whole", "stepwise", "consistency"), fine),
        "variants": [{"name": name, "state": "passed"} for name in matrix.VARIANTS],
        "agreement": {"tokens": {"state": "passed"}},
        **changes,
    }


def provider(**changes: Any) -> dict[str, Any]:
    return {
        "provider": "cuda",
        "emulated": False,
        "reason": "",
        "versions": {"onnxruntime": "1.31.1"},
        "modes": [mode(), mode()],
        "transfers": [{"arithmetic": "exact", "tokens": {"state": "passed"}}],
        "speed": {
            "prefill_tokens_per_s": 1000.4,
            "decode": [{"tokens_per_s": 50}, {"tokens_per_s": 300}],
        },
        **changes,
    }


def report(*providers: dict[str, Any]) -> dict[str, Any]:
    return {
        "date_utc": "2026-01-02T03:04:05+00:00",
        "command": "onnxport verify model",
        "onnxport": "0.1.0",
        "machine": {"architecture": "x86_64"},
        "artifact": {
            "name": "model",
            "family": "llama",
            "precision": "fp16",
            "format_version": FORMAT_VERSION,
        },
        "providers": list(providers),
    }


def test_experts_of_another_precision_are_no_evidence() -> None:
    found = report()
    found["artifact"] |= {"name": "model", "precision": "int4", "expert_precision": "mxfp4"}
    with pytest.raises(EvidenceError, match="model has experts in mxfp4 and the rest in int4"):
        matrix.reduce_report(found)


def test_matrices_of_another_precision_are_no_evidence() -> None:
    found = report()
    found["artifact"] |= {"name": "model", "precision": "int4", "int8_matrices": 3}
    with pytest.raises(EvidenceError, match="model has 3 matrices in int8 and the rest in int4"):
        matrix.reduce_report(found)


def test_a_report_is_reduced() -> None:
    missing = provider(modes=[], provider="webgpu")
    (found,) = matrix.reduce_report(report(provider(), missing))
    assert replace(found, arithmetics=EVIDENCE.arithmetics, moved_in=None) == EVIDENCE
    assert found.moved_in == ["exact"]
    moved = [
        {"arithmetic": name, "tokens": {"state": state}}
        for name, state in (("a", "passed"), ("b", "skipped"), ("a", "passed"), ("c", "failed"))
    ]
    (found,) = matrix.reduce_report(report(provider(transfers=moved)))
    assert found.moved_in == ["a", "c"]
    (emulated,) = matrix.reduce_report(report(provider(emulated=True)))
    assert emulated.speed is None  # that of another device
    with pytest.raises(EvidenceError, match="no provider that computed logits"):
        matrix.reduce_report(report(missing))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"modes": [mode(), mode(whole={"max_diff": 2, "max_kl": 0})]}, "logits"),
        ({"modes": [mode(consistency={"max_diff": None, "max_kl": None})]}, "logits"),
        ({"modes": [mode(), mode(agreement={"tokens": {"state": "failed"}})]}, "logits"),
        ({"reason": "the device was lost"}, "logits"),
        (
            {
                "modes": [
                    mode(variants=[{"name": n, "state": "failed"} for n in ("cached",)]),
                    mode(),
                ]
            },
            "cached",
        ),
        (
            {
                "transfers": [
                    {"arithmetic": "exact", "tokens": {"state": s}} for s in ("passed", "failed")
                ]
            },
            "transfers",
        ),
    ],
)
def test_one_failure_fails_the_check(changes: dict[str, Any], name: str) -> None:
    (found,) = matrix.reduce_report(report(provider(**changes)))
    assert found.checks[name] == "failed"
    others = {state for other, state in found.checks.items() if other != name}
    assert others <= {"passed", "skipped"}


def test_what_was_not_run_is_skipped() -> None:
    bare = provider(modes=[mode(variants=[], agreement=None)], transfers=[], speed=None)
    (found,) = matrix.reduce_report(report(bare))
    assert found.checks == dict.fromkeys(matrix.CHECKS, "skipped") | {"logits": "passed"}
    assert found.speed is None


def test_what_was_skipped_in_one_arithmetic_is_not_claimed_for_all() -> None:
    states = [("batched", "passed"), ("chunked", "skipped")]
    partly = mode(variants=[{"name": name, "state": state} for name, state in states])
    (found,) = matrix.reduce_report(report(provider(modes=[mode(), partly])))
    assert found.checks == dict.fromkeys(matrix.CHECKS, "passed") | {"chunked": "skipped"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of what the script reads and writes."""
    shutil.copytree(ROOT / "evidence", tmp_path / "evidence")
    for name in ("hardware_matrix.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_recording_writes_evidence_and_the_page(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "report.json").write_text(json.dumps(report(provider())))
    assert matrix.main(["record", str(root / "report.json")], root) == 0
    assert "wrote evidence/cuda-native-a_gpu_x86_64-fp16.json" in capsys.readouterr().out
    assert "A GPU, x86_64" in (root / "hardware_matrix.md").read_text(encoding="utf-8")
    assert matrix.main(["--check"], root) == 0
    (root / "evidence" / EVIDENCE.file_name).unlink()
    assert matrix.main(["--check"], root) == 1
    assert "is not what the evidence says" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("other.json", json.dumps(asdict(EVIDENCE)), f"should be called {EVIDENCE.file_name}"),
        (EVIDENCE.file_name, "{", "cannot read"),
        (EVIDENCE.file_name, '{"provider": "cuda"}', "the fields must be"),
        (EVIDENCE.file_name, json.dumps({**asdict(EVIDENCE), "checks": {}}), "checks are {}"),
        ("notes.json", '[{"provider": "cuda"}]', "the fields must be"),
        (
            "notes.json",
            json.dumps([dict.fromkeys(("provider", "device", "what", "state", "how"), "x")]),
            "state 'x' is not one of measured, emulated, untested",
        ),
    ],
)
def test_evidence_that_is_none(
    root: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, message: str
) -> None:
    (root / "evidence" / name).write_text(text)
    assert matrix.main(["--check"], root) == 1
    assert message in capsys.readouterr().err


def test_stale_evidence_fails_the_check(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text(project.replace("openvino==", "openvino==1"))
    assert matrix.main(["--check"], root) == 1
    assert "record it again" in capsys.readouterr().err


def test_a_library_has_one_name_however_it_is_spelled() -> None:
    versions = {"onnxruntime": "1.31.1", "onnxruntime_ep_webgpu": "0.4.0"}
    pins = {
        "webgpu": [*map(Requirement, ("onnxruntime>=1.31.1,<1.32", "onnxruntime-ep-webgpu==0.4.0"))]
    }
    one = replace(EVIDENCE, provider="webgpu", versions=versions)
    assert list(matrix.problems([one], pins)) == []
    older = replace(one, versions={**versions, "onnxruntime_ep_webgpu": "0.3.0"})
    [problem] = matrix.problems([older], pins)
    assert "is of onnxruntime_ep_webgpu 0.3.0" in problem
