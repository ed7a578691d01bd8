"""`onnxport bench` as a process: what it reports, never how fast it was."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnxport.cli import build_parser, main
from onnxport.cli.bench import _unlike
from onnxport.cli.bench_arguments import command_line, without_credentials
from onnxport.providers.base import Probe
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.bench.load import Ask
from onnxport.serving.bench.online import Target
from onnxport.serving.bench.records import RequestRecord
from onnxport.serving.engine import Engine

from ..serving.helpers import null_engine
from .conftest import SMALL, onnxport, serving

FEW = (*SMALL[2:], "--provider", "cpu")
SUMMARY = {"num_requests", "num_completed", "num_failed", "errors", "output_tokens", "ttft_s"}


def bench(kind: str, *arguments: str | Path, **environment: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark that ends well; return its report and what it printed."""
    path = Path(str(arguments[-1]))
    done = onnxport("bench", kind, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["kind"] == kind
    assert report["schema"] == 1
    assert report["summary"].keys() > SUMMARY
    assert report["machine"]["processor"]
    assert done.stdout.startswith(f"$ onnxport bench {kind}")
    return report, done.stdout


@pytest.mark.slow
def test_latency(artifact: Path, tmp_path: Path) -> None:
    path, plot = tmp_path / "out.json", tmp_path / "out.png"
    load = ("--batch-size", "2", "--input-len", "9", "--output-len", "5", "--num-iters", "3")
    report, printed = bench("latency", artifact, *load, *FEW, "--plot", plot, "--json", path)
    summary = report["summary"]
    assert (summary["num_completed"], summary["num_failed"]) == (6, 0)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (6 * 9, 6 * 5)
    assert summary["cached_tokens"] == 0  # every iteration has prompts of its own
    assert summary["most_at_once"] == 2
    counts = [summary[name]["count"] for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s")]
    assert counts == [6, 24, 6, 6]
    assert report["batch_s"]["count"] == 3
    assert report["setup"]["capabilities"]["provider"] == "cpu"
    assert report["setup"]["threads"] == 1
    assert report["setup"]["artifact"]["precision"] == "int4"
    assert report["setup"]["versions"]["onnxruntime"]
    assert report["setup"]["peak_memory_bytes"] > 2**20
    assert report["command"].startswith("onnxport bench latency tiny --batch-size 2 --input-len 9")
    assert "--json out.json" in report["command"]
    assert str(tmp_path) not in json.dumps(report)
    assert all(word in printed for word in ("whole batch", "inter-token latency", "p99"))
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_throughput_of_random_prompts_and_of_a_dataset(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    load = ("--num-prompts", "5", "--input-len", "3:8", "--output-len", "2:4", "--prefix-len", "32")
    report, printed = bench("throughput", artifact, *load, *FEW, "--json", path)
    summary = report["summary"]
    assert summary["num_completed"] == 5
    assert summary["cached_tokens"] == 4 * 32
    assert summary["prompt_tokens"] == sum(one["num_prompt_tokens"] for one in report["requests"])
    rate = summary["output_tokens"] / summary["duration_s"]
    assert summary["output_tokens_per_s"] == pytest.approx(rate)
    assert "output tokens/s" in printed
    again, _ = bench("throughput", artifact, *load, *FEW, "--json", path)
    lengths = [(one["num_prompt_tokens"], one["num_output_tokens"]) for one in report["requests"]]
    assert len(set(lengths)) > 1
    assert lengths == [
        (one["num_prompt_tokens"], one["num_output_tokens"]) for one in again["requests"]
    ]
    dataset = tmp_path / "set.jsonl"
    dataset.write_text('{"prompt": "abc", "max_tokens": 3}\n{"prompt": [5, 6]}\n')
    load = ("--dataset-path", str(dataset), "--output-len", "4")
    report, _ = bench("throughput", artifact, *load, *FEW, "--json", path)
    assert [one["num_output_tokens"] for one in report["requests"]] == [3, 4]
    assert [one["num_prompt_tokens"] for one in report["requests"]] == [3, 2]


@pytest.mark.slow
def test_serve(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    load = ("--num-prompts", "6", "--input-len", "4:9", "--output-len", "5", "--seed", "3")
    with serving(artifact, "--provider", "cpu", ONNXPORT_API_KEY="sesame") as (address, _):
        to = ("--base-url", f"{address}/v1", "--api-key", "sesame")
        goals = ("--goodput", "ttft:60000", "itl:60000")
        report, printed = bench("serve", *to, *load, "--request-rate", "50", *goals, "--json", path)
        chats = ("--endpoint", "/v1/chat/completions", "--max-concurrency", "1", *load)
        chat, _ = bench("serve", *to[:2], *chats, "--json", path, ONNXPORT_API_KEY="sesame")
        closed = onnxport("bench", "serve", *to[:2], "--model", "tiny", *load)
        long = ("--num-prompts", "3", "--input-len", "4", "--output-len", "900")
        refused = onnxport("bench", "serve", *to, *long, "--json", path)
    summary = report["summary"]
    assert (summary["num_completed"], summary["output_tokens"]) == (6, 30)
    assert (summary["num_good"], summary["num_requests"]) == (6, 6)
    assert 4 * 6 <= summary["prompt_tokens"] <= 9 * 6
    assert summary["delay_s"]["count"] == 6
    assert report["setup"]["request_rate_per_s"] == 50
    assert report["setup"]["model"] == "tiny"
    arrivals = [one["arrival_s"] for one in report["requests"]]
    assert arrivals[0] == 0
    assert len(set(arrivals)) == 6
    assert "6 of 6 kept the goals" in printed
    assert "sesame" not in json.dumps(report) + printed
    assert chat["summary"]["most_at_once"] == 1
    assert chat["setup"]["request_rate_per_s"] is None
    assert closed.returncode == 1
    assert "HTTP 401" in closed.stderr
    assert refused.returncode == 1
    assert "failed, 3 times: HTTP 400" in refused.stdout
    found = json.loads(path.read_text())["summary"]
    assert (found["num_completed"], found["num_failed"]) == (0, 3)
    assert found["ttft_s"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["throughput", "ARTIFACT", "--input-len", "9:3"], "--input-len: '9:3' is no length"),
        (["throughput", "ARTIFACT", "--prefix-len", "-1"], "--prefix-len is -1"),
        (["throughput", "ARTIFACT", "--plot", "out.doc"], "end it in .png"),
        (["throughput", "ARTIFACT", "--json", "missing/out.json"], "is no folder"),
        (["throughput", "ARTIFACT", "--json", "/"], "/ cannot be written: "),
        (["throughput", "ARTIFACT", "--input-len", "900"], "shorten the prompt"),
        (
            ["throughput", "ARTIFACT", "--prefix-len", "9", "--dataset-path", "set"],
            "give one of them",
        ),
        (["latency", "ARTIFACT", "--num-iters-warmup", "-1"], "--num-iters-warmup is -1"),
        (["serve", "--request-rate", "0"], "--request-rate is 0"),
        (["serve", "--goodput", "p99:3"], "a goal is 'p99:3'"),
        (["serve", "--base-url", "http://127.0.0.1:9"], "did not answer"),
    ],
)
def test_errors_say_what_to_do(
    artifact: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    from onnxport.cli import main

    few = FEW if "ARTIFACT" in arguments else ()
    given = [str(artifact) if one == "ARTIFACT" else one for one in arguments]
    assert main(["bench", *given, *few]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert says in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["latency", "."], "latency model"),
        (["latency", "../model/", "--kv-disk", "."], "latency model --kv-disk model"),
        (["latency", "/"], "latency /"),
        (
            ["serve", "--base-url", "https://me:secret@host:1/v1", "--api-key", "secret"],
            "serve --base-url https://host:1/v1",
        ),
        (
            ["latency", "a", "--speculative-config", '{"model": "/home/me/draft"}'],
            """latency a --speculative-config '{"model": "draft"}'""",
        ),
        (
            ["latency", "a", "--speculative-config", '{"method": "ngram"}'],
            """latency a --speculative-config '{"method": "ngram"}'""",
        ),
    ],
)
def test_the_command_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    options = build_parser().parse_args(["bench", *arguments])
    assert command_line(arguments[0], options) == f"onnxport bench {told}"


@pytest.mark.parametrize("prompt", ["Tell me of the sea.", tuple(range(40)), "x", (7,)])
def test_warm_ups_leave_nothing_in_a_cache(prompt: str | tuple[int, ...]) -> None:
    """They are as long as what is measured, and begin otherwise."""
    warm = _unlike(prompt, 3)
    assert type(warm) is type(prompt)
    if len(prompt) > 3:
        assert len(warm) == len(prompt)
        assert warm[:1] != prompt[:1]


def test_a_url_is_told_without_its_password() -> None:
    assert without_credentials("http://me:p@ss@host/v1") == "http://host/v1"
    assert without_credentials("http://host/a@b") == "http://host/a@b"


def measured(
    monkeypatch: pytest.MonkeyPatch, artifact: Path, path: Path, engine: Engine, *arguments: str
) -> tuple[int, dict[str, Any]]:
    """Run a benchmark of a null engine; return how it ended and its report."""

    @contextmanager
    def open_session(*_: object) -> Iterator[Engine]:
        yield engine
        engine.close()

    monkeypatch.setattr("onnxport.cli.session.open_session", open_session)
    monkeypatch.setattr(
        "onnxport.serving.bench.report.get_provider",
        lambda name: SimpleNamespace(probe=lambda: Probe(True, "", (), {name: "1.0"})),
    )
    kind, *more = arguments
    code = main(["bench", kind, str(artifact), *more, "--json", str(path)])
    return code, json.loads(path.read_text())


def test_what_an_engine_got_over_is_told(
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ("--num-prompts", "4", "--input-len", "9", "--output-len", "6")

    def tell(engine: Engine) -> tuple[int, dict[str, Any], str]:
        path = tmp_path / "out.json"
        code, report = measured(monkeypatch, artifact, path, engine, "throughput", *load)
        assert report["summary"]["num_completed"] == 4
        return code, report["setup"], capsys.readouterr().out

    code, setup, printed = tell(null_engine())
    nothing = {"num_failed_steps": 0, "num_preemptions": 0, "losses": []}
    assert (code, setup["incidents"]) == (0, nothing)
    assert not any(word in printed for word in ("failed and", "preempted", "took over"))
    code, setup, printed = tell(null_engine(fails=lambda run: run == 8, num_blocks=9))
    assert code == 0
    assert setup["incidents"]["num_failed_steps"] == 1
    assert setup["incidents"]["num_preemptions"] > 0
    assert "steps that failed and were tried again: 1\n" in printed
    assert f"requests that were preempted: {setup['incidents']['num_preemptions']}\n" in printed
    spare = NullModel(NullOptions(block_size=8, num_blocks=50))
    engine = null_engine(lost_at=lambda operation: operation == 9, fallbacks=[spare])
    code, setup, printed = tell(engine)
    assert code == 0
    [loss] = setup["incidents"]["losses"]
    assert (loss["provider"], loss["replaced_by"]) == ("null", "null")
    assert "null on none was lost, and null took over: " in printed
    # What was loaded, and not what has taken over.
    assert setup["capabilities"]["block_size"] == 4
    assert setup["versions"] == {"null": "1.0"}
    assert setup["peak_memory_bytes"] > 2**20


def test_batches_with_a_request_that_failed_are_not_timed(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ("latency", "--batch-size", "2", "--input-len", "9", "--output-len", "6")
    load = (*load, "--num-iters", "3", "--num-iters-warmup", "0")
    path = tmp_path / "out.json"
    for first_failing, count in ((7, 1), (13, 2), (99, 3)):  # six steps an iteration
        engine = null_engine(fails=lambda run, first=first_failing: run >= first)
        code, report = measured(monkeypatch, artifact, path, engine, *load)
        assert code == (0 if count == 3 else 1)
        assert report["summary"]["num_completed"] == 2 * count
        assert report["batch_s"]["count"] == count
    engine = null_engine(fails=lambda run: True)
    _, report = measured(monkeypatch, artifact, path, engine, *load)
    assert report["batch_s"] is None


def test_each_run_on_a_server_has_prompts_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else later ones would find those of the first in the server's prefix cache."""
    sent: list[list[Ask]] = []

    async def run_online(target: Target, asks: list[Ask], *_: object) -> list[RequestRecord]:
        sent.append(asks)
        return [RequestRecord(0, 0, (1,), 1, 2, 1)] * len(asks)

    monkeypatch.setattr("onnxport.serving.bench.online.run_online", run_online)
    path = tmp_path / "out.json"
    fixed = ["bench", "serve", "--model", "m", "--num-warmups", "0", "--json", str(path)]

    def run(*more: str) -> list[str]:
        assert main([*fixed, *more]) == 0
        command = json.loads(path.read_text())["command"]
        return shlex.split(command)[2:]

    first, second = run(), run()
    assert sent[0] != sent[1]
    assert first != second
    seed = first[first.index("--seed") + 1]
    assert 0 <= int(seed) < 2**31
    assert run("--seed", seed) == first
    assert sent[2] == sent[0]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        pytest.param("httpx", ["serve"], marks=pytest.mark.slow),
        ("matplotlib", ["latency", "nothing", "--plot", "out.png"]),
    ],
)
def test_without_the_extra(module: str, arguments: list[str]) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from onnxport.cli import main; "
    code += f"sys.exit(main(['bench', *{arguments!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{module} is not installed" in done.stderr
    assert 'pip install "onnxport[bench]"' in done.stderr
