"""Sampling defaults and chat templates, as a command's options have them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnxport.cli import application, build_parser, chat, generate, main
from onnxport.cli.model_defaults import chat_template, sampling_defaults, template_text
from onnxport.errors import ArtifactError, RequestError
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.params import SamplingParams
from onnxport.serving.repetition import RepetitionDetection

from .conftest import onnxport, write_checkpoint

THINKS = (
    "{% if enable_thinking %}think{% else %}say{% endif %} {{ messages[0].content }}{{ eos_token }}"
)
USER = [{"role": "user", "content": "hi"}]


def parse(*arguments: str | Path) -> argparse.Namespace:
    return build_parser().parse_args([str(each) for each in arguments])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with what a model brings, but no model."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"chat_template": "own {{ mood }}", "eos_token": "<e>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    return folder


def template_of(model: Path, *arguments: str | Path) -> str:
    options = parse(*arguments)
    return chat_template(model, template_text(options), options.template_variables).render(USER)


@pytest.mark.parametrize(
    ("command", "variables"),
    [("serve", "--default-chat-template-kwargs"), ("chat", "--chat-template-kwargs")],
)
def test_a_template_and_its_variables(
    model: Path, tmp_path: Path, command: str, variables: str
) -> None:
    file = tmp_path / "other.jinja"
    file.write_bytes(b"\xef\xbb\xbf" + THINKS.encode() + b"\n")  # as an editor may write it
    assert template_of(model, command, "m") == "own "
    assert template_of(model, command, "m", variables, '{"mood": "calm"}') == "own calm"
    given = (command, "m", "--chat-template", file)
    assert template_of(model, *given) == "say hi<e>"
    assert template_of(model, *given, variables, '{"enable_thinking": true}') == "think hi<e>"
    with pytest.raises(RequestError, match=r"'mood' was given .* which does not speak of it"):
        template_of(model, *given, variables, '{"mood": "calm"}')
    (model / "tokenizer_config.json").unlink()
    assert template_of(model, *given) == "say hi"
    with pytest.raises(RequestError, match=r"'mood' was given .* which is missing"):
        template_of(model, command, "m", variables, '{"mood": "calm"}')


def test_a_file_takes_the_place_of_all_templates(model: Path, tmp_path: Path) -> None:
    both = [{"name": name, "template": name} for name in ("default", "tool_use")]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": both}))
    tool: Any = {"type": "function", "function": {"name": "f"}}
    assert chat_template(model, None, {}).render(USER, [tool]) == "tool_use"
    assert chat_template(model, "mine", {}).render(USER, [tool]) == "mine"


@pytest.mark.parametrize("name", ["", "a(", "mo", "mood x"])
def test_names_that_no_variable_has(model: Path, name: str) -> None:
    with pytest.raises(RequestError, match="which does not speak of it"):
        chat_template(model, None, {name: 1})


@pytest.mark.parametrize("command", ["serve", "chat"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"\xef\xbb\xbf \n", "which is empty"),
        (b"a\n{% if %}", r"not valid Jinja: .*, line 2. Correct \S*bad.jinja"),
        (b"{{ a | nonsense }}", "not valid Jinja: No filter named 'nonsense'"),
    ],
)
def test_a_file_that_is_no_template(
    tmp_path: Path, command: str, content: bytes | None, words: str
) -> None:
    file = tmp_path / "bad.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RequestError, match=words):
        template_text(parse(command, "m", "--chat-template", file))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "m", "--override-generation-config", "{"], "'{' is not valid JSON"),
        (["serve", "m", "--override-generation-config", "[]"], "is no object of JSON"),
        (["serve", "m", "--override-generation-config", '{"a": 1}'], "'a', which is not known"),
        (["serve", "m", "--override-generation-config", '{"top_p": 2}'], "top_p is 2"),
        (["serve", "m", "--override-generation-config", '{"top_k": "5"}'], "top_k is '5'"),
        (["serve", "m", "--override-generation-config", '{"min_p": NaN}'], "not valid JSON"),
        (["serve", "m", "--repetition-detection", "3"], "is no object of JSON"),
        (["serve", "m", "--repetition-detection", '{"min_count": "3"}'], "min_count is '3'"),
        (["serve", "m", "--repetition-detection", '{"max_pattern_size": 4}'], "min_count 0"),
        (["serve", "m", "--repetition-detection", '{"count": 4}'], "'count', which is not known"),
        (["serve", "m", "--default-chat-template-kwargs", '{"a": 1e999}'], "not valid JSON"),
        (["serve", "m", "--default-chat-template-kwargs", '{"tools": []}'], "sets ['tools']"),
        (["chat", "m", "--chat-template-kwargs", '"a"'], "is no object of JSON"),
        (["chat", "m", "--chat-template-kwargs", '{"a": "\\ud800"}'], "not valid JSON"),
        (["chat", "m", "--chat-template-kwargs", '{"a": ' + "[" * 100_000], "not valid JSON"),
        (["chat", "m", "--chat-template-kwargs", '{"messages": 1}'], "sets ['messages']"),
        (["chat", "m", "--generation-config", "vllm"], "invalid choice: 'vllm'"),
    ],
)
def test_what_is_no_value(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(*arguments)
    assert words in capsys.readouterr().err


def test_sampling_defaults(model: Path) -> None:
    assert sampling_defaults(model, parse("chat", "m")) == SamplingDefaults(0.6, top_k=20)
    assert sampling_defaults(model, parse("chat", "m", "--generation-config", "none")) == (
        SamplingDefaults()
    )
    override = ("serve", "m", "--override-generation-config", '{"top_k": 5, "top_p": 0.9}')
    assert sampling_defaults(model, parse(*override)) == SamplingDefaults(0.6, 0.9, 5)
    rule = ("--repetition-detection", '{"max_pattern_size": 4, "min_count": 3}')
    assert sampling_defaults(model, parse(*override, *rule)) == SamplingDefaults(
        0.6, 0.9, 5, repetition_detection=RepetitionDetection(4, 0, 3)
    )
    none = (*override, "--generation-config", "none")
    assert sampling_defaults(model, parse(*none)) == SamplingDefaults(1.0, 0.9, 5)
    (model / "generation_config.json").write_text("[]")
    with pytest.raises(ArtifactError, match="--generation-config none"):
        sampling_defaults(model, parse("chat", "m"))
    assert sampling_defaults(model, parse(*none)) == SamplingDefaults(1.0, 0.9, 5)


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch, artifact: Path) -> Iterator[Any]:
    """What `chat` or `generate` samples with, where the model prefers a temperature of 0.6."""
    config = artifact / "generation_config.json"
    config.write_text('{"temperature": 0.6, "top_k": 20}')
    found: list[SamplingParams] = []

    class Engine(SimpleNamespace):
        def prepare(self, name: str, prompt: object, params: SamplingParams, *_: object) -> object:
            found.append(params)
            raise KeyboardInterrupt

    @contextmanager
    def open_session(*_: object) -> Iterator[Engine]:
        tokenizer = SimpleNamespace(encode=lambda *_, **__: [1])
        yield Engine(tokenizer=tokenizer)

    def run(*arguments: str) -> SamplingParams:
        command, *more = arguments
        prompt = ["hello"] if command == "generate" else []
        assert main([command, str(artifact), *prompt, *more]) == 130
        return found.pop()

    monkeypatch.setattr("builtins.input", lambda *_: "hello")
    for module in (chat, generate):
        monkeypatch.setattr(module, "open_session", open_session)
    yield run
    config.unlink()


def test_chat_samples_as_the_model_prefers(sampled: Any) -> None:
    models = SamplingParams(temperature=0.6, top_k=20, max_tokens=None)
    assert sampled("chat") == models
    assert sampled("chat", "--temperature", "0", "--top-k", "0") == SamplingParams(
        temperature=0.0, max_tokens=None
    )
    assert sampled("chat", "--generation-config", "none") == SamplingParams(max_tokens=None)
    none = ("chat", "--generation-config", "none", "--top-p", "0.5")
    assert sampled(*none) == SamplingParams(top_p=0.5, max_tokens=None)


def test_generate_is_greedy_whatever_the_model_prefers(sampled: Any) -> None:
    assert sampled("generate") == SamplingParams(temperature=0.0, max_tokens=128)
    given = sampled("generate", "--temperature", "0.5")
    assert given == SamplingParams(temperature=0.5, max_tokens=128)


def test_chat_renders_with_what_it_is_given(artifact: Path, tmp_path: Path) -> None:
    """Templates that go through no messages have the same prompt for all of them."""
    file = tmp_path / "own.jinja"
    file.write_text("{{ word }}")
    few = ("--max-tokens", "4", "--temperature", "0", "--no-trial")
    given = ("chat", artifact, *few, "--chat-template", file, "--chat-template-kwargs")
    done = onnxport(*given, '{"word": "hello"}', stdin="some\nother\n")
    assert done.returncode == 0, done.stderr
    text = onnxport("generate", artifact, "hello", *few).stdout
    assert done.stdout == text * 2


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("chat", ["--chat-template", "missing.jinja"], "missing.jinja, which cannot be read"),
        ("chat", ["--temperature", "-1"], "temperature is -1"),
        ("generate", ["hello", "--temperature", "-1"], "temperature is -1"),
        ("serve", ["--port", "0", "--chat-template", "missing.jinja"], "cannot be read"),
    ],
)
def test_mistakes_are_told_before_anything_is_exported(
    command: str,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ONNXPORT_CACHE", str(tmp_path / "cache"))
    checkpoint = write_checkpoint(tmp_path / "model")
    assert main([command, str(checkpoint), *arguments]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_model_without_a_template_may_be_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONNXPORT_CACHE", str(tmp_path / "cache"))
    checkpoint = write_checkpoint(tmp_path / "model")
    (checkpoint / "tokenizer_config.json").write_text("{}")
    assert main(["chat", str(checkpoint)]) == 1
    assert "give one (--chat-template), or use `onnxport generate`" in capsys.readouterr().err
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[-1].content }}")
    monkeypatch.setattr("builtins.input", lambda *_: "/exit")
    assert main(["chat", str(checkpoint), "--no-trial", "--chat-template", str(file)]) == 0


def test_a_server_is_given_them(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template with its variables, the defaults, the seed."""
    from onnxport.serving import worker
    from onnxport.serving.http import app

    file = tmp_path / "own.jinja"
    file.write_text("{{ word }}")
    given: dict[str, Any] = {}

    def load_engine(folder: Path, options: argparse.Namespace, *_: object) -> object:
        given["seed"] = options.seed
        return SimpleNamespace()

    def create_app(_: object, name: str, template: Any, choices: Any) -> object:
        given.update(name=name, prompt=template.render(USER), defaults=choices.defaults)
        given["interval"] = choices.stream_interval
        given["infill"] = (choices.infill_tokens, choices.spm_infill)
        raise KeyboardInterrupt

    class Closing:
        def __init__(self, _: object) -> None: ...

        async def close(self) -> None: ...

    monkeypatch.setattr(application, "load_engine", load_engine)
    monkeypatch.setattr(worker, "AsyncEngine", Closing)
    monkeypatch.setattr(app, "create_app", create_app)
    arguments = ["serve", str(artifact), "--port", "0", "--seed", "7", "--chat-template", str(file)]
    arguments += ["--default-chat-template-kwargs", '{"word": "hello"}']
    arguments += ["--override-generation-config", '{"temperature": 0.5}']
    arguments += ["--repetition-detection", '{"max_pattern_size": 9, "min_count": 2}']
    arguments += ["--stream-interval", "4", "--spm-infill"]
    arguments += ["--infill-tokens", '{"prefix": "<a>", "suffix": "<b>"}']
    assert main(arguments) == 130
    assert given == {
        "seed": 7,
        "name": "tiny",
        "interval": 4,
        "infill": ({"prefix": "<a>", "suffix": "<b>"}, True),
        "prompt": "hello",
        "defaults": SamplingDefaults(0.5, repetition_detection=RepetitionDetection(9, 0, 2)),
    }
