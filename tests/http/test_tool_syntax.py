"""Which format a model has, what of it are tokens, and servers that speak it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.tool_formats.base import ToolFormat
from onnxport.serving.http.tool_formats.glm4 import GLM4
from onnxport.serving.http.tool_formats.granite import GRANITE_TEXT, GRANITE_TOKEN
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.http.tool_formats.kimi_k2 import ARGUMENT as KIMI_ARGUMENT
from onnxport.serving.http.tool_formats.kimi_k2 import CALL as KIMI_CALL
from onnxport.serving.http.tool_formats.kimi_k2 import KIMI_K2
from onnxport.serving.http.tool_formats.kimi_k2 import SECTION as KIMI_SECTION
from onnxport.serving.http.tool_formats.lfm2 import LFM2
from onnxport.serving.http.tool_formats.llama3_json import LLAMA3_JSON
from onnxport.serving.http.tool_formats.mistral import MISTRAL_NAME, MISTRAL_SPACED, new_id
from onnxport.serving.http.tool_formats.phi4_mini import PHI4_MINI_TOKEN, PHI4_MINI_WORD
from onnxport.serving.http.tool_formats.pythonic import PYTHONIC
from onnxport.serving.http.tool_formats.registry import AUTO, FORMATS, named, recognized
from onnxport.serving.http.tool_formats.syntax import ToolSyntax
from onnxport.serving.http.tool_formats.xml_calls import GLM45, QWEN3_CODER, SEED_OSS
from onnxport.serving.tokenizer import Tokenizer
from tests.tiers import every

from . import tool_templates as templates
from .conftest import RunningServer, _servers
from .scripted import MODEL, say, write_tokenizer

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
STRICT: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        (templates.HERMES, HERMES),
        (templates.LLAMA31, LLAMA3_JSON),
        (templates.LLAMA32.replace("\n", " "), LLAMA3_JSON),
        (templates.PYTHONIC, PYTHONIC),
        (templates.MISTRAL, MISTRAL_SPACED),
        (templates.MISTRAL_ARGS, MISTRAL_NAME),
        (templates.GRANITE3, GRANITE_TOKEN),
        (templates.GRANITE31, GRANITE_TEXT),
        (templates.GRANITE4, HERMES),
        (templates.PHI4_MINI, PHI4_MINI_TOKEN),
        (templates.PHI4_MINI_WORD, PHI4_MINI_WORD),
        (templates.LFM2, LFM2),
        (templates.LFM25, LFM2),
        (templates.KIMI_K2, KIMI_K2),
        (templates.GLM4, GLM4),
        (templates.GLM45, GLM45),
        (templates.SEED_OSS, SEED_OSS),
        (templates.QWEN3_CODER, QWEN3_CODER),
        (templates.NO_TOOLS, None),
        ("", None),
    ],
)
def test_a_template_tells_the_format(template: str, syntax: ToolFormat | None) -> None:
    assert recognized(template) is syntax
    if syntax is not None:
        assert named(syntax.name, template) is syntax


def test_a_name_is_final_and_a_wrong_one_refused() -> None:
    assert named("mistral", templates.MISTRAL_ARGS) is MISTRAL_NAME
    assert named("mistral", templates.HERMES).name == "mistral"
    with pytest.raises(RequestError, match=r"'llama4'.*auto.*llama3_json"):
        named("llama4", "")


def test_every_format_is_told_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from onnxport.cli import build_parser

    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    told = capsys.readouterr().out
    assert all(each.name in told for each in FORMATS)
    assert build_parser().parse_args(["serve", "m"]).tool_call_parser == AUTO
    given = ["serve", "m", "--tool-call-parser"]
    assert build_parser().parse_args([*given, "mistral"]).tool_call_parser == "mistral"
    with pytest.raises(SystemExit):
        build_parser().parse_args([*given, "llama4"])
    assert "give auto, or one of apertus," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "template", "words"),
    [
        (AUTO, templates.MISTRAL, "mistral, recognized from"),
        (AUTO, templates.NO_TOOLS, "hermes: the chat template asks for no format"),
        (AUTO, templates.NO_TOOLS, "does not tell the model of tools"),
        (AUTO, templates.PHI4_MINI, "does not tell the model of tools"),
        ("pythonic", templates.HERMES, "pythonic, as --tool-call-parser says"),
    ],
)
def test_what_was_chosen_is_logged(
    name: str, template: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ToolSyntax.of(name, ChatTemplate({"default": template}), None)
    assert words in caplog.text
    assert ("does not tell" in caplog.text) == (
        template not in (templates.MISTRAL, templates.HERMES)
    )


def test_the_template_for_tools_is_the_one_that_counts() -> None:
    sources = {"default": templates.NO_TOOLS, "tool_use": templates.MISTRAL}
    assert ToolSyntax.of(AUTO, ChatTemplate(sources), None).format is MISTRAL_SPACED


def test_markers_are_special_tokens_or_text(tmp_path: Path) -> None:
    template = ChatTemplate({"default": templates.MISTRAL_ARGS})
    write_tokenizer(tmp_path, tags=("[TOOL_CALLS]",))
    tokenizer = Tokenizer.from_folder(tmp_path, frozenset())
    syntax = ToolSyntax.of(AUTO, template, tokenizer)
    assert syntax.special == {"[TOOL_CALLS]": tokenizer.token_to_id("[TOOL_CALLS]")}
    assert syntax.spelled == tuple(syntax.special.values())


def test_our_ids_can_be_sent_back() -> None:
    template = ChatTemplate({"default": templates.MISTRAL})
    told = new_id()
    call = {"id": told, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": told},
    ]
    text = template.render(messages, [TOOL])
    assert f'[{{"name": "add", "arguments": {{"a": 1}}, "id": "{told}"}}]' in text
    with pytest.raises(RequestError, match="length 9"):
        template.render([*messages[:1], {**messages[1], "tool_calls": [{**call, "id": "call_1"}]}])


@pytest.mark.parametrize(
    "way", ["{{ c | tojson }}", "{{ c if c is string else c | tojson }}", "{{ '' + c }}"]
)
def test_arguments_are_objects_or_text_as_the_template_takes_them(way: str) -> None:
    source = f"{{% set c = messages[0].tool_calls[0].function.arguments %}}{way}"
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ChatTemplate({"default": source}).render(messages) == '{"a": "é"}'


def kimi_k2(arguments: str) -> str:
    """Return a call as Kimi K2 writes it."""
    call = f"{KIMI_CALL[0]}functions.add:3{KIMI_ARGUMENT}{arguments}{KIMI_CALL[1]}"
    return call.join(KIMI_SECTION)


# A model that writes one format: its name, special tokens, template, a call, and one not to schema.
SERVED = {
    "mistral": (
        ("[TOOL_CALLS]", "[INST]"),
        templates.MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "x"}}]',
    ),
    "mistral-args": (
        ("[TOOL_CALLS]", "[ARGS]"),
        templates.MISTRAL_ARGS,
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        '[TOOL_CALLS]add[ARGS]{"a": "x"}',
    ),
    "llama3_json": (
        ("<|python_tag|>",),
        templates.LLAMA31,
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        '{"name": "add", "parameters": {"a": "x"}}',
    ),
    "glm4": (
        ("<|assistant|>",),
        templates.GLM4,
        '<|assistant|>add\n{"a": 1}',
        'add\n{"a": "x"}',
    ),
    "gemma4": (
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        templates.GEMMA4,
        "<|tool_call>call:add{a:1}<tool_call|>",
        '<|tool_call>call:add{a:<|"|>x<|"|>}<tool_call|>',
    ),
    "seed_oss": (
        ("<seed:tool_call>", "</seed:tool_call>"),
        templates.SEED_OSS,
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n"
        "</seed:tool_call>",
        "<seed:tool_call>\n<function=add>\n<parameter=a>x</parameter>\n</function>\n"
        "</seed:tool_call>",
    ),
    "kimi_k2": (
        (*KIMI_SECTION, *KIMI_CALL, KIMI_ARGUMENT),
        templates.KIMI_K2,
        kimi_k2('{"a": 1}'),
        kimi_k2('{"a": "x"}'),
    ),
}


PROMPTED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.fixture(scope="module", params=every(4, SERVED))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, RunningServer]]:
    """Give a server of each model in turn, and the model's name."""
    special, template, *_ = SERVED[request.param]
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, template + PROMPTED, special)
    with _servers(folder) as start:
        yield request.param, start()


def ask(server: RunningServer, said: str, **more: Any) -> dict[str, Any]:
    """Return the message of an answer, and why it ended."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": say(said)}],
        "max_tokens": 200,
        "temperature": 0,
        "tools": [TOOL],
        **more,
    }
    if not more.get("stream"):
        response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        found: dict[str, Any] = {"content": "", "tool_calls": []}
        for chunk in client.chat.completions.create(**body):
            [choice] = chunk.choices
            found["content"] += choice.delta.content or ""
            found["tool_calls"] += [one.model_dump() for one in choice.delta.tool_calls or ()]
            found["finish_reason"] = choice.finish_reason
        return found


def arguments(message: dict[str, Any]) -> list[Any]:
    return [json.loads(one["function"]["arguments"]) for one in message.get("tool_calls") or ()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_calls_in_its_own_format(served: tuple[str, RunningServer], stream: bool) -> None:
    name, server = served
    call, wrong = SERVED[name][2:]
    for more in ({}, {"skip_special_tokens": False} if not stream else {}):
        told = ask(server, f"See: {call}", stream=stream, **more)
        assert (told["content"], arguments(told)) == ("See:", [{"a": 1}])
        assert told["finish_reason"] == "tool_calls"
        [one] = told["tool_calls"]
        assert len(one["id"]) == {"mistral": 9, "kimi_k2": 15}.get(name.partition("-")[0], 29)
    once: Any = {"stream": stream, "parallel_tool_calls": False}
    told = ask(server, wrong, tools=[STRICT], **once)
    assert told["content"] in (None, "")
    assert isinstance(arguments(told)[0]["a"], int)


@pytest.mark.slow
def test_a_call_ends_a_thought_that_is_open(tmp_path: Path) -> None:
    """As Kimi K2 may write it; behind a form a thought has to be closed."""
    special, template, call, _ = SERVED["kimi_k2"]
    write_tokenizer(tmp_path, f"{{# <think> #}}{template}{PROMPTED}", special)
    with _servers(tmp_path) as start:
        server = start()
        told = ask(server, f"<think>Hm.{call}")
        assert (told["reasoning_content"], told["content"]) == ("Hm.", None)
        assert (arguments(told), told["finish_reason"]) == ([{"a": 1}], "tool_calls")
        told = ask(server, f"<think>Hm.{call}</think>{call}", parallel_tool_calls=False)
        assert "functions.add:3" in told["reasoning_content"]
        assert arguments(told) == [{"a": 1}]


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls(served: tuple[str, RunningServer], stream: bool) -> None:
    name, server = served
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("required", named):
        once: Any = {"stream": stream, "parallel_tool_calls": False}
        told = ask(server, SERVED[name][3], tool_choice=choice, **once)
        assert told["content"] in (None, "")
        assert isinstance(arguments(told)[0]["a"], int)
        assert told["finish_reason"] == ("stop" if choice is named else "tool_calls")
    told = ask(server, SERVED[name][2], **once)
    assert arguments(told) == [{"a": 1}]


def test_special_tokens_are_not_in_content(served: tuple[str, RunningServer]) -> None:
    name, server = served
    marker = SERVED[name][0][0]
    for stream in (False, True):
        told = ask(server, f"a{marker} b", stream=stream)
        assert (told["content"], told.get("tool_calls") or []) == ("a b", [])
    told = ask(server, f"a{marker} b", skip_special_tokens=False)
    assert told["content"] == f"a{marker} b"
    told = ask(server, f"a{marker} b", tool_choice="none")
    assert told["content"] == "a b"


def test_several_choices(served: tuple[str, RunningServer]) -> None:
    name, server = served
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": say(SERVED[name][2])}],
        "max_tokens": 200,
        "temperature": 0,
        "tools": [TOOL],
        "n": 2,
    }
    choices = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"]
    assert [arguments(one["message"]) for one in choices] == [[{"a": 1}]] * 2
    ids = [one["message"]["tool_calls"][0]["id"] for one in choices]
    assert len(set(ids)) == (1 if name == "kimi_k2" else 2)  # whose ids the model writes


def test_responses(served: tuple[str, RunningServer]) -> None:
    name, server = served
    tool = {"type": "function", **TOOL["function"]}
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        create: Any = client.responses.create
        given = {"model": MODEL, "temperature": 0, "tools": [tool], "max_output_tokens": 200}
        said = say(f"See: {SERVED[name][2]}")
        message, call = create(input=said, **given).output
        assert message.content[0].text == "See:"
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        events = list(create(input=said, stream=True, **given))
        assert events[-1].response.output[1].arguments == call.arguments
        back = [{"role": "user", "content": "x"}, call.model_dump()]
        back += [{"type": "function_call_output", "call_id": call.call_id, "output": "2"}]
        assert create(input=back, **given).status in ("completed", "incomplete")
        forced = create(input=said, tool_choice="required", parallel_tool_calls=False, **given)
        assert isinstance(json.loads(forced.output[0].arguments)["a"], int)
