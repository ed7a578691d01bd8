"""What benchmarks/ makes of runs: workloads, figures, pairs, tables, curves. Nothing is timed."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    cold,
    compare,
    curves,
    engine_overhead,
    pairs,
    results,
    run_all,
    runner,
)
from benchmarks.pairs import OURS, Origin, Pair, Run, Store
from benchmarks.peers import vllm_cpu
from benchmarks.peers.registry import PEERS
from benchmarks.workloads import WORKLOADS, Request, Workload, seed_of, summary
from onnxport.serving.verify.machine import this_machine

ROOT = Path(__file__).parents[2]
PAIR = Pair(0, "peer", "core")


def figures(value: float) -> dict[str, float]:
    return dict.fromkeys(results.TITLES, value)


def both(
    number: int, ours: float, theirs: float, workload: str = "W1", group: str = "core"
) -> list[Run]:
    pair = Pair(number, "peer", group)
    return [
        Run(pair, side, (workload,), {workload: figures(value)})
        for side, value in ((OURS, ours), ("peer", theirs))
    ]


# Workloads.


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_as_it_says(name: str) -> None:
    workload = WORKLOADS[name]
    requests = workload.requests(seed_of(name, 0))
    assert len(requests) == workload.streams
    shared = {tuple(request.prompt[: workload.shared_tokens]) for request in requests}
    assert len(shared) == 1
    ends = {tuple(request.prompt[workload.shared_tokens :]) for request in requests}
    assert len(ends) == workload.streams
    for request in requests:
        low, high = (
            workload.prompt_tokens
            if isinstance(workload.prompt_tokens, tuple)
            else (workload.prompt_tokens,) * 2
        )
        assert low <= len(request.prompt) <= high
    assert requests == workload.requests(seed_of(name, 0))
    assert requests[0].prompt != workload.requests(seed_of(name, 1))[0].prompt


def test_ragged_lengths_fill_their_ranges() -> None:
    requests = WORKLOADS["W3"].requests(0)
    lengths = [len(request.prompt) for request in requests]
    answers = [request.new_tokens for request in requests]
    assert min(lengths) < 96 < 448 < max(lengths)
    assert min(answers) < 48 < 224 < max(answers)


def test_ids_below_a_small_vocabulary() -> None:
    [request] = Workload(1, 500, 1).requests(0, highest_id=9)
    assert max(request.prompt) == 9


def test_the_summary() -> None:
    requests = [Request([1] * 10, 3), Request([1] * 20, 2)]
    found = summary(requests, [[1.0, 2.0, 5.0], [2.0, 4.0]])
    assert found["prefill_tok_s"] == 30 / 2.0
    assert found["decode_tok_s"] == 3 / 3.0
    assert found["output_tok_s"] == 5 / 5.0
    assert (found["ttft_s"], found["wall_s"]) == (2.0, 5.0)
    assert found["itl_ms"] == 2000.0
    assert found["itl_p99_ms"] == pytest.approx(2980.0)
    with pytest.raises(AssertionError, match="asked for"):
        summary(requests, [[1.0, 2.0], [2.0, 4.0]])


def test_cache_and_length_suffice() -> None:
    arguments = runner.parser(None).parse_args(["m", "--workloads", "W3,C512", "--repeat", "3"])
    for repetition in range(3):
        requests = WORKLOADS["W3"].requests(seed_of("W3", repetition))
        assert runner.cache_tokens(arguments, 32) >= sum(one.total_tokens for one in requests)
        assert runner.longest(arguments) >= max(one.total_tokens for one in requests)
    assert runner.longest(arguments) == 512 + 256


@pytest.mark.parametrize("name", WORKLOADS)
def test_no_sequence_is_longer_than_a_workload_says(name: str) -> None:
    requests = WORKLOADS[name].requests(seed_of(name, 0))
    assert max(one.total_tokens for one in requests) <= WORKLOADS[name].longest


def test_what_does_not_fit_the_context_is_skipped_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("W1", "C4096", "C512")
    given = [str(tmp_path), "--workloads", ",".join(names), "--settle-s", "0"]
    ran: list[int] = []

    class Runner:
        def run(self, requests: Sequence[Request]) -> runner.Times:
            ran.append(max(request.total_tokens for request in requests))
            return [[0.1 + at for at in range(one.new_tokens)] for one in requests]

    def told(*more: str) -> dict[str, Any]:
        ran.clear()
        arguments = runner.parser(None).parse_args([*given, *more])
        assert runner.cache_tokens(arguments, 16) < (4200 if more or has_config else 5000)
        runner.main(arguments, Runner)
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        return {line["workload"]: line.get("skipped") for line in lines}

    has_config = False
    assert told() == dict.fromkeys(("cold", *names))  # nothing says what fits
    assert max(ran) == 4128
    skipped = {"C4096": "the model's context is 4096 tokens"}
    assert told("--context-tokens", "4096") == dict.fromkeys(("cold", *names)) | skipped
    assert max(ran) == 544
    has_config = True
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    assert told() == dict.fromkeys(("cold", *names)) | skipped
    assert told("--context-tokens", "9999") == dict.fromkeys(("cold", *names))
    assert runner.trained_tokens(tmp_path / "no-folder") is None
    assert runner.trained_tokens(tmp_path / "config.json") is None  # a file, such as a GGUF


def test_every_side_is_told_the_context(tmp_path: Path) -> None:
    arguments = run_all.options().parse_args([str(tmp_path), "--threads", "2"])
    side = run_all.Side("peer", Path("python"), "module", tmp_path)
    assert "--context-tokens" not in side.command(arguments)
    arguments.context_tokens = 4096
    assert side.command(arguments)[-2:] == ["--context-tokens", "4096"]


def test_vllm_s_cache_holds_the_largest_workload(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "hidden_size": 2048,
        "max_position_embeddings": 4096,
    }  # 128 KiB a token, as OLMoE
    assert vllm_cpu.cache_gib(config, 8192) == 1
    assert vllm_cpu.cache_gib(config, 8193) == 2
    assert vllm_cpu.cache_gib(config | {"num_key_value_heads": 4}, 4 * 8192) == 1
    assert vllm_cpu.cache_gib(config | {"head_dim": 64}, 2 * 8192 + 1) == 2
    (tmp_path / "config.json").write_text(json.dumps(config))

    def context(workloads: str) -> int:
        given = [str(tmp_path), "--workloads", workloads]
        return vllm_cpu.context(runner.parser(None).parse_args(given))

    assert [context(each) for each in ("W1", "C2048", "C2048,C8192")] == [2048, 2080, 2080]
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}')
    assert context("W1") == 1024


def test_groups() -> None:
    found = run_all.groups("core,S1,contexts", quick=False)
    assert list(found) == ["W1", "W2", "W3", "W4", "W5", "streams", "contexts"]
    assert found["streams"] == ["S1"]
    assert run_all.groups("streams", quick=True) == {"streams": ["S1", "S8", "S32"]}
    alone = {name: [name] for name in ("W1", "W2", "W3", "W4", "W5", "W6")}
    assert run_all.groups("core,C512,W6,W1", quick=True) == {**alone, "contexts": ["C512"]}
    assert set(run_all.GROUPS["core"]) < set(WORKLOADS)
    with pytest.raises(SystemExit, match="no such workloads: W9"):
        run_all.groups("W9", quick=False)


def test_a_folder_is_for_one_shape_and_number_of_threads(tmp_path: Path) -> None:
    def options(*more: str) -> argparse.Namespace:
        return run_all.options().parse_args([str(tmp_path), "--threads", "2", *more])

    run_all.same_setup(options(), this_machine())
    run_all.same_setup(options("--workloads", "W1"), this_machine())
    with pytest.raises(SystemExit, match="take another folder"):
        run_all.same_setup(options("--threads", "1"), this_machine())
    with pytest.raises(SystemExit, match="'shape': 'tiny'"):
        run_all.same_setup(options("--shape", "tiny"), this_machine())
    with pytest.raises(SystemExit, match="'processor': 'another'"):
        run_all.same_setup(options(), replace(this_machine(), processor="another"))
    path = tmp_path / "setup.json"
    wanted = path.read_text()
    path.write_text('{"shape": "qwen2.5-0.5b", "threads": 2}')  # as older benchmarks did
    run_all.same_setup(options(), this_machine())
    assert path.read_text() == wanted
    with pytest.raises(SystemExit, match="take another folder"):
        run_all.same_setup(options("--kv-cache-dtype", "int8"), this_machine())


def test_results_tell_what_each_run_was_of(tmp_path: Path) -> None:
    arguments = run_all.options().parse_args([str(tmp_path), "--results", str(tmp_path / "R.md")])
    store = Store(tmp_path / "results.jsonl")
    older = {name: Origin("1", "2026-11-24", "--rounds 3") for name in (OURS, "peer")}
    newer = {OURS: Origin("2", "2026-11-29", "--rounds 4"), "peer": older["peer"]}
    run_all.keep(store, both(0, 2.0, 1.0), older)
    run_all.keep(store, both(1, 2.0, 1.0), newer)
    again = Store(tmp_path / "results.jsonl")
    assert again.runs == store.runs
    run_all.report(arguments, again, this_machine(), {})
    text = (tmp_path / "R.md").read_text()
    assert "threads; 2026-11-24 to 2026-11-29. Medians" in text
    command = "    python -m benchmarks.run_all FOLDER --rounds"
    assert f"{command} 3\n{command} 4\n" in text
    assert "- onnxport: 1 (2026-11-24)\n- onnxport: 2 (2026-11-29)\n- peer: 1\n" in text
    again.replace(PAIR, both(0, 2.0, 1.0))  # as older benchmarks kept them
    assert Store(tmp_path / "results.jsonl").runs[-1].origin is None
    assert "- peer: some runs of older benchmarks" in "\n".join(results.sides(again.runs))


def test_an_artifact_is_exported_anew_by_another_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def call(command: Sequence[str], log: Path) -> None:
        made.append(command[2])
        Path(command[-1] if "export" in command else command[3]).mkdir()

    monkeypatch.setattr(run_all, "call", call)
    arguments = run_all.options().parse_args([str(tmp_path)])
    run_all.ours(arguments)
    run_all.ours(arguments)
    assert made == ["benchmarks.make_checkpoint", "onnxport"]
    monkeypatch.setattr(run_all, "revision", lambda folders: "another")
    run_all.ours(arguments)
    assert made == ["benchmarks.make_checkpoint", "onnxport", "onnxport"]


def test_code_has_a_revision(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = run_all.revision([tmp_path])
    (tmp_path / "a.pyc").write_text("2")
    assert run_all.revision([tmp_path]) == first
    (tmp_path / "a.py").write_text("2")
    assert run_all.revision([tmp_path]) != first
    found = run_all.parts(["exporter", "serving"])
    assert [(folder / "__init__.py").is_file() for folder in found] == [True, True]


def test_what_was_not_finished_is_made_again(tmp_path: Path) -> None:
    path, log = tmp_path / "model", tmp_path / "log"

    def command(code: str) -> Callable[[Path], list[str]]:
        return lambda to: script(f"import pathlib; path = pathlib.Path({str(to)!r}); {code}")

    with pytest.raises(subprocess.CalledProcessError):
        run_all.make(path, command("path.mkdir(); (path / 'a').touch(); 1 / 0"), log)
    assert not path.exists()
    assert "ZeroDivisionError" in log.read_text()
    run_all.make(path, command("path.mkdir(); (path / 'b').touch()"), log)
    assert [one.name for one in path.iterdir()] == ["b"]
    run_all.make(path, command("1 / 0"), log)  # it is there


# Pairs.


def test_an_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    store = Store(path)
    assert store.missing(PAIR, ["W1"], retry=False) == ["W1"]
    store.replace(PAIR, both(0, 2.0, 1.0))
    again = Store(path)
    assert again.runs == store.runs
    assert again.missing(PAIR, ["W1"], retry=False) == []
    assert again.missing(PAIR, ["W1", "W2"], retry=False) == ["W2"]
    assert again.missing(Pair(1, "peer", "core"), ["W1"], retry=False) == ["W1"]
    again.replace(PAIR, both(0, 3.0, 1.0))
    assert [run.figures["W1"]["wall_s"] for run in Store(path).runs] == [3.0, 1.0]
    again.replace(PAIR, both(0, 3.0, 1.0)[:1])
    assert again.missing(PAIR, ["W1"], retry=False) == ["W1"]


def test_a_failed_run_counts_unless_it_is_to_be_tried_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    store.replace(PAIR, [both(0, 1, 1)[0], Run(PAIR, "peer", ("W1",), {}, failed="killed")])
    assert store.missing(PAIR, ["W1"], retry=False) == []
    assert store.missing(PAIR, ["W1"], retry=True) == ["W1"]


def test_what_is_asked_for_later_leaves_what_was_measured_before(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    arguments = run_all.options().parse_args([str(tmp_path), "--rounds", "1"])
    calls = path.with_name("calls")
    told = {"workload": "NAME", **figures(2.0)}
    code = f"""import sys
names = sys.argv[-1].split(",")
open({str(calls)!r}, "a").write(sys.argv[-1] + " ")
for name in ("cold", *names):
    print({json.dumps(told)!r}.replace("NAME", name))"""

    def side(name: str) -> run_all.Side:
        return run_all.Side(name, Path(name), "", tmp_path)

    def command(self: run_all.Side, arguments: argparse.Namespace) -> list[str]:
        return script(code)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_all.Side, "command", command)
        for workloads in ("S1", "W2,S1,S2,S4", "S2"):
            arguments.workloads = workloads
            store = Store(path)
            noted = run_all.origins(arguments, {side("peer"): "1"})
            run_all.measure(arguments, store, side(OURS), [side("peer")], noted)
    starts = 2 * (1 + cold.STARTS)
    assert calls.read_text().split() == (["W1"] * starts + ["S1"] * 2 + ["W2"] * 2 + ["S2,S4"] * 2)
    found = {one.workload: one for one in results.compare(Store(path).runs)}
    assert found.keys() == {cold.COLD, "S1", "W2", "S2", "S4"}
    assert all(one.ratios == (1.0,) for one in found.values())


def test_what_is_measured_anew_replaces_what_was_before(tmp_path: Path) -> None:
    store = Store(tmp_path / "results.jsonl")
    older = Run(PAIR, OURS, ("W1", "W2", "W3"), {"W1": figures(1)}, {"W2": "large"}, "killed")
    store.replace(PAIR, [older])
    store.replace(PAIR, [Run(PAIR, OURS, ("W3",), {"W3": figures(2)})])
    assert store.runs == [
        Run(PAIR, OURS, ("W1", "W2"), {"W1": figures(1)}, {"W2": "large"}),
        Run(PAIR, OURS, ("W3",), {"W3": figures(2)}),
    ]
    other = Run(Pair(1, "peer", "core"), OURS, ("W3",), {"W3": figures(2)})
    store.replace(other.pair, [other])
    store.replace(PAIR, [replace(older, workloads=("W1", "W2", "W3"))])
    assert store.runs == [other, older]


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_run_that_fails_keeps_what_it_printed() -> None:
    line = json.dumps({"workload": "W1", "wall_s": 1.0})
    skip = json.dumps({"workload": "W3", "skipped": "no"})
    code = f"print({line!r}); print('noise'); print({skip!r}); open('/no/such/folder/file')"
    found = pairs.run(PAIR, "peer", script(code), ["W1", "W2", "W3"], 60)
    assert found.figures == {"W1": {"wall_s": 1.0}}
    assert found.skipped == {"W3": "no"}
    assert found.failed is not None
    assert found.failed.startswith("exit code 1: ")
    assert "'file'" in found.failed
    assert "/no/such" not in found.failed


@pytest.mark.parametrize("executable", [False, True])
def test_a_program_that_is_missing_or_no_program_is_a_failure_of_its_side(
    tmp_path: Path, executable: bool
) -> None:
    path = tmp_path / "python"
    if executable:
        path.touch()  # without the permission
    found = pairs.run(PAIR, "peer", [str(path)], ["W1"], 60)
    assert found.failed is not None
    assert found.failed.startswith("it did not start: ")
    assert str(tmp_path) not in found.failed
    ours, theirs = cold.by_turns(PAIR, {OURS: script(told(1)), "peer": [str(path)]}, 1, 60)
    assert (ours.failed, theirs.failed) == (None, found.failed)


def test_a_run_may_use_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = "dict(workload='W1', refused=int(sys.dont_write_bytecode))"
    code = f"import json, sys; print(json.dumps({found}))"
    run = pairs.run(PAIR, "peer", script(code), ["W1"], 60)
    assert run.figures == {"W1": {"refused": 0}}


def told(seconds: float | str) -> str:
    """Code that tells a cold start, whatever `seconds` is when it runs, and then goes on."""
    figures = f"workload='cold', first_token_s={seconds}, peak_rss_mib=7"
    return f"import json, time; print(json.dumps(dict({figures})), flush=True); time.sleep(60)"


def test_cold_starts_take_turns_and_the_first_of_each_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "turns"

    def side(name: str, seconds: Sequence[int]) -> list[str]:
        write = f"import pathlib, sys; p = pathlib.Path({str(path)!r}); f = p.open('a'); "
        write += f"f.write({name!r}); f.close(); assert sys.argv[1:] == ['--workloads', 'W1']; "
        which = f"{list(seconds)!r}[p.read_text().count({name!r}) - 1]"
        return script(write + told(which))

    sides = {OURS: side("a", [90, 1, 5, 2]), "peer": side("b", [0, 4, 3, 30])}
    pair = Pair(0, "peer", cold.COLD)
    ours, theirs = cold.by_turns(pair, sides, 3, 60)
    assert path.read_text() == "abababab"
    assert ours.figures == {"cold": {"first_token_s": 2, "peak_rss_mib": 7}}
    assert theirs.figures["cold"]["first_token_s"] == 4
    assert ours.failed is theirs.failed is None
    store = Store(tmp_path / "results.jsonl")
    store.replace(pair, [ours, theirs])
    assert not Store(tmp_path / "results.jsonl").missing(pair, [cold.COLD], retry=True)


def test_who_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    fails = script(f"open({str(path)!r}, 'a').write('x'); open('/no/such/folder/file')")
    pair = Pair(0, "peer", cold.COLD)
    ours, theirs = cold.by_turns(pair, {OURS: script(told(1)), "peer": fails}, 2, 60)
    assert ours.figures["cold"]["first_token_s"] == 1
    assert theirs.figures == {}
    assert theirs.failed is not None
    assert theirs.failed.startswith("exit code 1: ")
    assert "/no/such" not in theirs.failed
    assert path.read_text() == "x"


def test_a_start_has_bytecode_and_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import sys; " + told("int(sys.dont_write_bytecode)")
    assert cold.start(script(code))["first_token_s"] == 0
    with pytest.raises(cold.StartError, match=r"^not done within 0.1 s$"):
        cold.start(script("import time; time.sleep(60)"), 0.1)


def test_what_is_compared_is_started_once_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "turns"

    def side(name: str) -> str:
        code = f"p = open({str(path)!r}, 'a'); p.write({name!r}); p.close(); {told(1)}"
        return shlex.join(script(code))

    arguments = ["compare", "--a", side("a"), "--b", side("b"), "--rounds", "2", "--cold"]
    monkeypatch.setattr(sys, "argv", arguments)
    compare.main()
    assert path.read_text() == "ababab"
    assert "| cold | first_token_s | 1 (1–1) | 1 (1–1) | 1.00 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no model')", "printed no figures: exit code 1: no model"),
        ("TOLD; raise SystemExit('too long')", "failed: exit code 1: too long"),
    ],
)
def test_a_side_that_fails_ends_a_comparison_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    line = """print('{"workload": "cold", "first_token_s": 1}', flush=True)"""
    commands = [shlex.join(script(each.replace("TOLD", line))) for each in ("TOLD", code)]
    arguments = ["compare", "--a", commands[0], "--b", commands[1], "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=why):
        compare.main()


def test_a_side_that_is_not_there_ends_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["compare", "--a", "no-such-runner", "--b", "no-such-runner"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="no-such-runner printed no figures"):
        compare.main()


@pytest.mark.slow
def test_a_run_that_does_not_end() -> None:
    line = json.dumps({"workload": "W1", "wall_s": 1.0})
    command = ["sh", "-c", f"echo '{line}'; exec sleep 3600"]  # tells it long before the end
    found = pairs.run(PAIR, "peer", command, ["W1"], 2)
    assert found.failed == "not done within 2 s"
    assert found.figures == {"W1": {"wall_s": 1.0}}


# Tables and curves.


def test_ratios_are_of_pairs_and_above_1_where_onnxport_is_better() -> None:
    found = results.compare([*both(0, 2.0, 1.0), *both(1, 9.0, 3.0), *both(2, 4.0, 4.0)])
    by_figure = {one.figure: one for one in found}
    assert set(by_figure) == set(results.HEADLINES["W1"])
    decode = by_figure["decode_tok_s"]
    assert (decode.ours, decode.theirs) == ((2.0, 9.0, 4.0), (1.0, 3.0, 4.0))
    assert decode.ratios == (2.0, 3.0, 1.0)
    assert by_figure["peak_rss_mib"].ratios == (0.5, 1 / 3, 1.0)
    text = "\n".join(results.table(found))
    assert "| W1 | decode tok/s | 4 | 3: 2.00× (1.00–3.00) |" in text
    assert "| W1 | peak resident MiB | 4 | 3: 0.50× (0.33–1.00) |" in text


def test_what_one_side_lacks_is_not_compared() -> None:
    ours, theirs = both(0, 2.0, 1.0)
    assert results.compare([ours]) == results.compare([theirs]) == []
    other = Run(PAIR, "peer", ("W1",), {"W2": figures(1.0)})
    assert results.compare([ours, other]) == []


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_told(name: str) -> None:
    assert results.compare(both(0, 1, 1, name))


def test_tables_are_in_order() -> None:
    names = ["C128", "S64", "W2", "S8", "W1", "C16384"]
    runs = [run for n, name in enumerate(names) for run in both(n, 1.0, 1.0, name)]
    runs += both(0, 1.0, 1.0, "cold", group="cold")
    found = list(dict.fromkeys(one.workload for one in results.compare(runs)))
    assert found == ["cold", "W1", "W2", "S8", "S64", "C128", "C16384"]


def test_starts_before_workloads_are_no_cold_starts() -> None:
    assert results.compare(both(0, 1.0, 1.0, "cold")) == []
    [first, *_] = results.compare(both(0, 1.0, 2.0, "cold", group="cold"))
    assert (first.figure, first.ratios) == ("first_token_s", (2.0,))


def test_a_column_a_peer() -> None:
    other = Pair(0, "other", "core")
    more = [Run(other, side, ("W2",), {"W2": figures(3.0)}) for side in (OURS, "other")]
    lines = list(results.table(results.compare([*both(0, 2.0, 1.0), *more])))
    assert lines[0] == "| workload | figure | onnxport | other | peer |"
    assert lines[1] == "|---|---|---|---|---|"
    assert "| W1 | decode tok/s | 2 | – | 1: 2.00× |" in lines
    assert "| W2 | decode tok/s | 3 | 3: 1.00× | – |" in lines


def test_gaps_are_told_once() -> None:
    failed = Run(PAIR, "peer", ("W1", "W2"), {}, {"W3": "ragged"}, "killed")
    assert list(results.gaps([failed, failed, *both(0, 1, 1)])) == [
        "- peer skips W3: ragged",
        "- peer on W1, W2: killed",
    ]


def test_the_section_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    path.write_text("# Results\n\nBy hand.\n")
    results.write_section(path, "small", ["first"])
    results.write_section(path, "large", ["another"])
    path.write_text(path.read_text() + "\nAfter.\n")
    results.write_section(path, "small", ["second"])
    text = path.read_text()
    assert "first" not in text
    places = [text.index(word) for word in ("By hand.", "second", "another", "After.")]
    assert places == sorted(places)
    for name in ("small", "large"):
        assert text.count(results.BEGIN.format(name)) == text.count(results.END.format(name)) == 1
    begin, end = results.BEGIN.format("small"), results.END.format("small")
    for damaged in (text.replace(begin, ""), text.replace(end, ""), f"{end}\n{begin}\n", text * 2):
        path.write_text(damaged)
        with pytest.raises(SystemExit, match="mend it"):
            results.write_section(path, "small", ["third"])
        assert path.read_text() == damaged


@pytest.mark.slow
def test_curves(tmp_path: Path) -> None:
    runs = [*both(0, 2.0, 1.0, "S8"), *both(1, 4.0, 1.0, "S8"), *both(2, 5.0, 1.0, "S1")]
    streams = curves.FIGURES[0]
    found = curves.points(runs, streams, "output_tok_s")
    assert found == {OURS: {1: 5.0, 8: 3.0}, "peer": {1: 1.0, 8: 1.0}}
    assert list(found[OURS]) == [1, 8]
    [path] = curves.draw(runs, tmp_path, "small")
    assert path.name == "small-streams.svg"
    assert path.read_text().count("inter-token ms") == 1
    assert curves.draw(both(0, 1, 1, "W1"), tmp_path, "small") == []


# Peers, and the runner of our own.


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_has_a_runner_and_a_line_why_it_is_missing(name: str, tmp_path: Path) -> None:
    peer = PEERS[name]
    assert (ROOT / (peer.runner.replace(".", "/") + ".py")).is_file()
    assert peer.why_missing(tmp_path / "bin" / "python") == "no environment for it"


@pytest.mark.parametrize("name", PEERS)
def test_what_a_peer_does_not_need_is_removed_after_it_is_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(run_all, "call", lambda command, *_: ran.append(tuple(command[1:])))
    peer, python = PEERS[name], tmp_path / "bin" / "python"
    run_all.install(peer, python, tmp_path / "log")
    made, installed, *removed = ran
    assert made == ("-m", "venv", str(tmp_path))
    assert installed[:3] == ("-m", "pip", "install")
    assert set(peer.requirements) <= set(installed)
    assert [one[:3] for one in removed] == [("-m", "pip", "uninstall")] * bool(peer.unneeded)
    assert all(set(peer.unneeded) <= set(one) for one in removed)


def test_who_cannot_run_is_left_out_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("onnxruntime-genai", "openvino-genai", "llama.cpp", "transformers", "vllm")
    for name in names[:4]:
        path = tmp_path / "venvs" / name / "bin" / "python"
        path.parent.mkdir(parents=True)
        path.symlink_to(sys.executable)
    (tmp_path / "venvs" / names[0] / "bin" / "python").unlink()
    (tmp_path / "venvs" / names[0] / "bin" / "python").touch()  # no program
    (tmp_path / "logs").mkdir()
    there = replace(PEERS["transformers"], package="json")
    no_model = replace(PEERS["llama.cpp"], package="json", make=lambda *_: script("1 / 0"))
    monkeypatch.setattr(
        run_all,
        "PEERS",
        {
            **PEERS,
            "openvino-genai": replace(PEERS["openvino-genai"], package="json"),
            "llama.cpp": no_model,
            "transformers": there,
        },
    )
    arguments = run_all.options().parse_args([str(tmp_path), "--peers", ",".join(names)])
    found, left = run_all.peers(arguments)
    assert [side.name for side in found] == ["transformers"]
    assert list(left) == [name for name in names if name != "transformers"]
    assert "Permission denied" in left["onnxruntime-genai"]
    assert "optimum-cli" in left["openvino-genai"]  # which is not beside that Python
    assert "exit status 1" in left["llama.cpp"]
    assert left["vllm"] == "no environment for it"
    printed = capsys.readouterr().out
    assert all(f"{name} is left out: {why}\n" in printed for name, why in left.items())


def test_who_was_left_out_is_written_into_the_results(tmp_path: Path) -> None:
    path = tmp_path / "left_out.json"
    why = f"[Errno 2] No such file or directory: '{tmp_path}/venvs/a/bin/optimum-cli'"
    left = run_all.left_out(path, {"a": why, "b": "no environment for it"}, ["c"])
    assert left == {
        "a": "[Errno 2] No such file or directory: 'optimum-cli'",
        "b": "no environment for it",
    }
    assert run_all.left_out(path, {"c": "gone"}, ["a"]) == {"b": left["b"], "c": "gone"}
    arguments = run_all.options().parse_args([str(tmp_path), "--results", str(tmp_path / "R.md")])
    store = Store(tmp_path / "results.jsonl")
    store.replace(PAIR, [both(0, 1, 1)[0], Run(PAIR, "peer", ("W1",), {}, failed="killed")])
    run_all.report(arguments, store, this_machine(), left)
    text = (tmp_path / "R.md").read_text()
    assert "What did not run:\n\n- a was left out: [Errno 2]" in text
    assert "- b was left out: no environment for it\n- peer on W1: killed\n" in text


@pytest.mark.slow
def test_our_runner(tmp_path: Path) -> None:
    checkpoint, artifact = tmp_path / "checkpoint", tmp_path / "artifact"
    for command in (
        ["benchmarks.make_checkpoint", str(checkpoint), "--shape", "tiny"],
        ["onnxport", "export", str(checkpoint), str(artifact), "--context-length", "8192"],
    ):
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, capture_output=True)
    command = [sys.executable, "-m", "benchmarks.run_onnxport", str(artifact)]
    options = ["--threads", "1", "--highest-id", "500", "--repeat", "2", "--settle-s", "0"]
    short = subprocess.run(
        [*command, *options, "--context-tokens", "600", "--workloads", "S1,W5"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    told = {line["workload"]: line for line in map(json.loads, short.stdout.splitlines())}
    assert told["W5"]["skipped"] == "the model's context is 600 tokens"
    assert "wall_s" in told["S1"]
    found = pairs.run(PAIR, OURS, [*command, *options], ["S2", "W5", "C16384"], 120)
    assert found.failed is None
    # What the model was not exported for is left out, and nothing else.
    assert set(found.figures) == {"cold", "S2", "W5"}
    assert found.skipped == {"C16384": "the model's context is 8192 tokens"}
    assert set(found.figures["cold"]) == {"first_token_s", "peak_rss_mib"}
    assert set(results.headlines("S2")) < set(found.figures["S2"])
    assert found.figures["W5"]["peak_rss_mib"] > 10
    into: compare.Figures = defaultdict(list)
    compare.collect(" ".join([*command, *options, "--workloads", "S1"]), into)
    assert len(into["S1", "wall_s"]) == 2
    starts: compare.Figures = defaultdict(list)
    compare.collect(" ".join([*command, *options, "--workloads", "S1"]), starts, is_cold=True)
    assert set(starts) == {("cold", "first_token_s"), ("cold", "peak_rss_mib")}
    with pytest.raises(SystemExit, match="printed no figures"):
        compare.collect(f"{sys.executable} -c pass", starts, is_cold=True)


def test_the_engine_s_own_parts_are_timed() -> None:
    for params in engine_overhead.MODES.values():
        spent = engine_overhead.measure(2, params, vocab=512, steps=2)
        assert {"plan", "reserve", "pack", "sample", "commit", "deliver", "total"} == set(spent)
