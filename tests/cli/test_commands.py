"""Every command as a process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from onnxport.cli import main
from onnxport.cli.cache import cache_folder, cache_folder_if_any
from onnxport.errors import ExportError
from onnxport.serving.infill import Infill, InfillNames
from tests.tiers import every
from tests.waiting import PATIENCE_S

from .conftest import command, onnxport

COMMANDS = [
    *("export", "generate", "embed", "rerank", "chat"),
    *("serve", "verify", "bench", "devices", "version"),
]


def test_help_lists_the_commands() -> None:
    done = onnxport("--help")
    assert done.returncode == 0
    assert re.findall(r"^    (\w+) ", done.stdout, re.MULTILINE) == COMMANDS


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules);"
        "from onnxport.cli import build_parser; build_parser();"
        "packages = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(packages - sys.stdlib_module_names), 'asyncio' in packages)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['onnxport'] False"


@pytest.mark.parametrize("name", every(4, COMMANDS))
def test_every_command_has_help(name: str) -> None:
    done = onnxport(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    every(
        4,
        [
            [],
            ["bench"],
            ["import"],
            ["generate"],
            ["generate", "a", "b", "--max-tokens", "0"],
            ["export", "a", "b", "--precision", "int3"],
            ["serve", "a", "--port", "70000"],
            ["serve", "a", "--root-path", "llm"],
            ["serve", "a", "--ssl-cert-reqs", "3"],
            ["devices", "a", "extra"],
        ],
    ),
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    done = onnxport(*arguments)
    assert done.returncode == 2
    assert "usage: onnxport" in done.stderr


def test_version() -> None:
    version = onnxport("version").stdout
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", version)
    assert onnxport("--version").stdout == f"onnxport {version}"


def test_errors_are_one_paragraph(
    tmp_path: Path, checkpoint: Path, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: list[list[str | Path]] = [
        ["export", tmp_path / "missing", tmp_path / "out"],
        ["export", checkpoint, artifact],
        ["export", checkpoint, tmp_path / "out", "--revision", "main"],
        ["export", checkpoint, tmp_path / "out", "--token", "abc"],
        ["export", checkpoint, tmp_path / "out", "--token", "abc", "--target", checkpoint],
        ["export", checkpoint, tmp_path / "out", "--precision", "fp16", "--group-size", "64"],
        ["export", checkpoint, tmp_path / "out", "--precision", "int8", "--asymmetric"],
        ["export", checkpoint, tmp_path / "out", "--expert-precision", "mxfp4"],
        ["export", "./missing", tmp_path / "out"],
        ["chat", tmp_path / "missing"],
        ["generate", tmp_path, "x"],
        ["generate", artifact, "x", "--provider", "cuda"],
        ["generate", artifact, "x", "--temperature", "-1"],
        ["generate", artifact, "x" * 200],
        ["generate", artifact, "x", "--json-schema", tmp_path / "missing.json"],
        ["generate", artifact, "x", "--json-schema", '{"type": 5}'],
        ["generate", artifact, "x", "--regex", "("],
        ["generate", artifact],
        ["generate", artifact, "--file", tmp_path / "missing.txt"],
        ["generate", artifact, "x", "--logit-bias", "1+1", "--logit-bias", "1+2"],
        ["generate", artifact, "x", "--precision", "int8"],
        ["generate", checkpoint, "x", "--revision", "main"],
        ["generate", "./missing", "x"],
        ["chat", tmp_path],
        ["chat", artifact, "--context-length", "64"],
        ["chat", artifact, "--chat-template", tmp_path],
        ["chat", artifact, "--chat-template-kwargs", '{"moood": 1}'],
        ["chat", artifact, "--grammar", tmp_path / "missing.gbnf"],
        ["chat", checkpoint, "--grammar", tmp_path / "missing.gbnf"],  # before the export
        ["chat", artifact, "--grammar", "root ::= nothing"],
        ["chat", artifact, "--thinking-token-budget", "3"],
        ["chat", artifact, "--thinking-token-budget", "-3"],
        ["serve", artifact, "--port", "0", "--api-key", ""],
        ["serve", tmp_path, "--port", "0"],
        ["serve", artifact, "--port", "0", "--default-chat-template-kwargs", '{"moood": 1}'],
        ["verify", checkpoint],
        ["serve", tmp_path / "missing", "--port", "0"],
        ["serve", artifact, "--port", "0", "--precision", "int8"],
    ]
    for arguments in cases:
        assert main([str(each) for each in arguments]) == 1, arguments
        out, err = capsys.readouterr()
        assert re.fullmatch(r"error: [^\n]+\n", err), err
        assert out == ""
    assert not (tmp_path / "out").exists()
    done = onnxport("generate", tmp_path, "x")
    assert (done.returncode, done.stderr[:7]) == (1, "error: ")
    assert "neither an artifact nor a checkpoint" in done.stderr


@pytest.mark.slow
def test_generate_in_a_form(artifact: Path, tmp_path: Path) -> None:
    """The model is random: what fits does so by the grammar alone."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["aa", "bb"]}')
    grammar = tmp_path / "form.lark"
    grammar.write_text('start: "<" /[ab]{2}/ ">"')
    for form, expected in (
        (["--json-schema", schema], '"(aa|bb)"'),
        (["--json-schema", '{"enum": [true, null]}'], "true|null"),
        (["--regex", "[a-c]{3}"], "[a-c]{3}"),
        (["--choice", "ab", "--choice", "ba"], "ab|ba"),
        (["--grammar", grammar], "<[ab]{2}>"),
    ):
        done = onnxport("generate", artifact, "hello", "--no-trial", "--max-tokens", "40", *form)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(expected, done.stdout.strip()), done.stdout


def test_chat_in_a_form(artifact: Path) -> None:
    """The model is random: what fits does so by the grammar alone."""
    given = ("--max-tokens", "40", "--grammar", 'root ::= "<" [ab]{2} ">"')
    done = onnxport("chat", artifact, *given, stdin="hello\nyou\n")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch("(<[ab]{2}>\n){2}", done.stdout)


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="pipes have no paths here")
def test_the_form_of_a_chat_may_come_from_a_pipe(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of `--grammar-file <(…)`: it can be read once."""
    reader, writer = os.pipe()
    os.write(writer, b'root ::= "<" [ab]{2} ">"')
    os.close(writer)
    lines = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    given = ("--max-tokens", "40", "--no-trial", "--grammar-file", f"/dev/fd/{reader}")
    assert main(["chat", str(artifact), *given]) == 0
    os.close(reader)
    assert re.fullmatch("<[ab]{2}>\n", capsys.readouterr().out)


def test_verify_finds_a_changed_file(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(artifact, changed)
    data = bytearray((changed / "model.onnx.data").read_bytes())
    data[len(data) // 2] ^= 1
    (changed / "model.onnx.data").write_bytes(data)
    assert main(["verify", str(changed)]) == 1
    assert "model.onnx.data" in capsys.readouterr().err


def test_generate(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--max-tokens", "8", "--no-trial")
    one = onnxport("generate", artifact, "hello", *few)
    assert (one.returncode, one.stderr) == (0, "")
    asked = ["generate", str(artifact), "hello", "you", *few, "--ignore-eos"]
    assert main([*asked, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [result["prompt"] for result in results] == ["hello", "you"]
    assert [result["completion_tokens"] for result in results] == [8, 8]
    assert [result["finish_reason"] for result in results] == ["length", "length"]
    assert one.stdout == results[0]["text"] + "\n"
    verbose = onnxport("generate", artifact, "hello", *few, "--verbose")
    assert "provider cpu was chosen" in verbose.stderr
    assert verbose.stdout == one.stdout
    assert main(asked) == 0
    assert capsys.readouterr().out.startswith(f"> hello\n{results[0]['text']}\n\n> you\n")


def test_generate_what_stands_between(
    artifact: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--max-tokens", "8", "--no-trial", "--ignore-eos", "--json")
    assert main(["generate", str(artifact), "hello", "--suffix", "you", *few]) == 1
    assert "no tokens to fill in by" in capsys.readouterr().err
    names = InfillNames("<|say|>", "<|over|>", "<|im_start|>")
    monkeypatch.setattr(Infill, "find", classmethod(lambda cls, own: cls(own, names)))
    assert main(["generate", str(artifact), "hello", "--suffix", "you", *few]) == 0
    [found] = json.loads(capsys.readouterr().out)
    spelled = "<|say|>hello<|over|>you<|im_start|>"
    assert main(["generate", str(artifact), spelled, *few]) == 0
    [wanted] = json.loads(capsys.readouterr().out)
    assert found == {**wanted, "prompt": "hello"}


@pytest.mark.slow
def test_providers_are_tried_once(artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="a trial needs two providers")
    ask = ("generate", artifact, "hello", "--max-tokens", "8")
    first, second = (onnxport(*ask, "--verbose", ONNXPORT_CACHE=str(tmp_path)) for _ in range(2))
    assert "provider cpu was tried: " in first.stderr
    assert "was tried" not in second.stderr
    for done in (first, second):
        assert re.search(r"provider \w+ was chosen for .*, its trial took", done.stderr)
    assert len(list((tmp_path / "trials").glob("*.json"))) == 1
    quiet = onnxport(*ask, ONNXPORT_CACHE=str(tmp_path))
    assert (quiet.stdout, quiet.stderr) == (first.stdout, "")


@pytest.mark.slow
def test_the_cache_may_be_sized_in_memory(artifact: Path) -> None:
    ask = ("generate", artifact, "hello", "--max-tokens", "8", "--no-trial")
    by_tokens = onnxport(*ask, "--kv-cache-tokens", "1024")
    by_memory = onnxport(*ask, "--kv-memory", "8MiB")
    assert (by_memory.returncode, by_memory.stdout) == (0, by_tokens.stdout)
    too_small = onnxport(*ask, "--kv-memory", "1K")
    assert too_small.returncode == 1
    assert "1024" in too_small.stderr


def test_chat_through_a_pipe(artifact: Path) -> None:
    lines = "hello\n/nonsense\n\n/reset\nhello\n/exit\nnever read\n"
    given = ("--max-tokens", "5", "--temperature", "0", "--system", "Be brief.")
    done = onnxport("chat", artifact, *given, stdin=lines)
    assert done.returncode == 0
    assert "There is no command /nonsense" in done.stderr
    assert len(done.stdout) > 2
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:]  # the second began anew


def test_a_checkpoint_is_exported_once_by_whoever_comes_first(
    checkpoint: Path,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("ONNXPORT_CACHE", str(cache))
    few = ("--max-tokens", "8", "--no-trial", "--group-size", "32")
    assert main(["generate", str(checkpoint), "hello", *few]) == 0
    out, err = capsys.readouterr()
    assert "is exported first, once, to" in err
    assert main(["generate", str(artifact), "hello", *few[:-2]]) == 0
    assert capsys.readouterr().out == out
    lines = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    assert main(["chat", str(checkpoint), *few]) == 0
    assert "is exported first" not in capsys.readouterr().err
    assert len(list(cache.glob("tiny-*/manifest.json"))) == 1


@pytest.mark.slow
def test_chat_says_when_the_conversation_is_too_long(artifact: Path) -> None:
    lines = "x" * 300 + "\nhi\n"
    done = onnxport("chat", artifact, "--max-tokens", "5", stdin=lines)
    assert done.returncode == 0
    assert "/reset starts a new conversation" in done.stderr
    assert done.stdout  # the second line was answered


@pytest.mark.slow
def test_chat_in_a_terminal(artifact: Path) -> None:
    leader, follower = pty.openpty()
    chat = subprocess.Popen(
        command("chat", artifact, "--max-tokens", "3"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "dumb"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
    )
    os.close(follower)

    def read_prompt() -> str:
        text = b""
        while not text.endswith(b"> "):
            text += os.read(leader, 1000)
        return text.decode(errors="replace")

    assert "/exit" in read_prompt()
    os.write(leader, b"hello\n")
    assert "hello" in read_prompt()
    os.write(leader, b"\x03")
    # A signal between readline's prompt and its wait is seen when the line ends (CPython's
    # readline module checks for signals when the wait is interrupted), so press Enter then.
    for _ in range(60):
        with contextlib.suppress(subprocess.TimeoutExpired):
            chat.wait(timeout=5)
            break
        os.write(leader, b"\n")
    assert chat.poll() == 130
    os.close(leader)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals(artifact: Path, number: int, code: int) -> None:
    chat = subprocess.Popen(
        command("chat", artifact),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert chat.stderr is not None
    chat.stderr.readline()  # it is ready
    chat.send_signal(number)
    _, err = chat.communicate(timeout=PATIENCE_S)
    assert (chat.returncode, err.strip()) == (code, "")


@pytest.mark.slow
def test_output_into_a_closed_pipe_is_quiet() -> None:
    shell = f"{sys.executable} -m onnxport devices --json | head -c 1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.slow
def test_what_is_no_text_is_refused_and_what_a_terminal_cannot_show_is_replaced(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", str(artifact), "--max-tokens", "4"]
    done = subprocess.run(
        [*command(*arguments), b"caf\xe9"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch("error: [^\\n]*half of a character[^\\n]*\n", done.stderr)
    lines = b"hello\ncaf\xe9\nhello\n/exit\n"
    chat = subprocess.run(
        command("chat", artifact, "--max-tokens", "4", "--temperature", "0"),
        input=lines,
        capture_output=True,
        check=False,
    )
    assert chat.returncode == 0
    assert b"half of a character" in chat.stderr
    assert chat.stdout.count(b"\n") == 2
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = onnxport("generate", artifact, "x", "--choice", "日本", "--max-tokens", "20")
    assert (done.returncode, done.stdout, done.stderr) == (0, "??\n", "")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
def test_a_full_disk_is_an_error(artifact: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("generate", artifact, "x", "--max-tokens", "4"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode != 0
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_no_error(name: str) -> None:
    """As daemons have them."""
    number = {"stdin": 0, "stdout": 1, "stderr": 2}[name]
    command = f'exec "$0" -m onnxport version {number}>&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_home_is_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ONNXPORT_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder_if_any() is None
    with pytest.raises(ExportError, match="ONNXPORT_CACHE"):
        cache_folder()
    monkeypatch.setenv("ONNXPORT_CACHE", "~/kept")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kept"
