"""Options that a command lacks: what other servers call so is told by its name here."""

from __future__ import annotations

import pytest

from onnxport.cli import build_parser, main
from onnxport.cli.unknown_options import INSTEAD, OPTION, instead_of, options_of


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what is told of wrong usage, without the usage."""
    with pytest.raises(SystemExit) as caught:
        main([*arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err.split("error: ", 1)[1]


def test_each_hint_names_options_that_there_are() -> None:
    known = options_of(build_parser(), ["serve", "m"])
    for name, told in INSTEAD.items():
        assert OPTION.fullmatch(name)
        assert name not in known
        assert instead_of(name, known) == told
        assert OPTION.search(told) or told.startswith(("leave it out; ", "give the model "))


def test_what_others_call_so(capsys: pytest.CaptureFixture[str]) -> None:
    moved = "--gpu-memory-utilization 0.9 -tp 2 --enable-auto-tool-choice --max_model_len=8"
    told = refusal(capsys, "serve", "m", *moved.split(), "--port", "8")
    first, *lines = told.splitlines()
    assert first == f"unrecognized arguments: {moved}"
    assert [line.split(":")[0].strip() for line in lines] == [
        *("--gpu-memory-utilization", "-tp", "--enable-auto-tool-choice", "--max_model_len")
    ]
    assert "--kv-memory" in lines[0]
    assert lines[3].endswith("give --max-model-len")


def test_what_is_written_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --max-num-seqs?" in refusal(capsys, "serve", "m", "--max-num-sequ", "3")
    assert "did you mean --num-prompts?" in refusal(
        capsys, "bench", "throughput", "m", "--num-prompt-s", "3"
    )
    told = refusal(capsys, "serve", "m", "--frobnicate", "-1", "x")
    assert told == "unrecognized arguments: --frobnicate -1 x\n"


def test_a_hint_is_for_commands_that_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--kv-memory" not in refusal(capsys, "export", "m", "d", "--gpu-memory-utilization=1")
    assert "give --precision" in refusal(capsys, "export", "m", "d", "--quantization", "awq")


def test_numbers_with_letters(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "serve", "m", "--max-model-len", "8k")
    assert "'8k' is no whole number" in told
