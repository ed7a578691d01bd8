"""A conversation in the terminal with a model that thinks before it answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onnxport.cli.chat import Conversation
from onnxport.errors import RequestError
from onnxport.providers.null import NullOptions
from onnxport.serving.channels import ChannelFormat
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.reasoning import ReasoningFormat
from onnxport.serving.reasoning_formats import FORMATS, reasoning_format
from onnxport.serving.repetition import RepetitionDetection
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.tokenizer import Tokenizer

from ..http.harmony import MARKS, RETURN, answer, message
from ..http.harmony import TEMPLATE as OSS_TEMPLATE
from ..http.scripted import CHAT_TEMPLATE, SPECIAL, ScriptedModel, say, write_tokenizer

THINK = FORMATS["qwen3"]
TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}({{ m.reasoning }}){% endif %}{{ m.content }}",
)
ANSWER = "<think>\nhm, é\n\nso\n</think>\n\nyes\n"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    write_tokenizer(tmp_path, TEMPLATE, THINK.tags)
    tokenizer = Tokenizer.from_folder(tmp_path, frozenset(), THINK.tags)
    end = SPECIAL.index("<|im_end|>") - len(SPECIAL)
    tokenizer.eos_token_ids = frozenset({tokenizer.vocab_size + end})
    options = NullOptions(vocab_size=tokenizer.vocab_size, num_blocks=64)
    engine = Engine(ScriptedModel(options, tokenizer), tokenizer, EngineConfig(seed=1))
    yield engine
    engine.close()


def talk(
    engine: Engine,
    *texts: str,
    reasoning: ReasoningFormat | ChannelFormat | None = THINK,
    max_tokens: int | None = None,
    source: str = TEMPLATE,
    budget: int | None = None,
    form: StructuredOutputs | None = None,
    stuck: RepetitionDetection | None = None,
) -> list[str]:
    """Say something, several times; returns what the model is given each time."""
    template = ChatTemplate({"default": source})
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        thinking_token_budget=budget,
        structured_outputs=form,
        repetition_detection=stuck,
    )
    conversation = Conversation(engine, template, params, None, reasoning=reasoning)
    prompts = []
    prepare = engine.prepare

    def noted(name: str, ids: Any, *more: Any) -> Any:
        assert engine.tokenizer is not None
        prompts.append(engine.tokenizer.decode(ids, skip_special_tokens=False))
        return prepare(name, ids, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "prepare", noted)
        for text in texts:
            conversation.answer(text)
    return prompts


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_thoughts_are_marked_and_no_part_of_what_was_said(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = talk(engine, say(ANSWER), "and?")
    assert capsys.readouterr().out == "<think>\nhm, é\n\nso\n</think>\n\nyes\n\n\n"
    asked = turn("user", say(ANSWER)) + turn("assistant", "(hm, é\n\nso)yes\n")
    assert prompts[1] == f"{asked}{turn('user', 'and?')}<|im_start|>assistant\n"


def test_thoughts_are_dimmed_in_a_terminal(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    talk(engine, say(ANSWER))
    assert capsys.readouterr().out == "\x1b[2mhm, é\n\nso\x1b[0m\n\nyes\n\n"
    monkeypatch.setenv("TERM", "dumb")
    talk(engine, say("<think>hm</think>yes"))
    assert capsys.readouterr().out == "<think>\nhm\n</think>\n\nyes\n"


def test_an_answer_that_ends_within_the_thoughts(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = talk(engine, say(ANSWER), "and?", max_tokens=4)
    assert capsys.readouterr().out.startswith("<think>\nhm\n</think>\n\n\n")
    assert turn("assistant", "(hm)") in prompts[1]


def test_thoughts_have_a_budget(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    talk(engine, say("<think>abcdef</think>yes"), budget=2)
    assert capsys.readouterr().out == "<think>\nab\n</think>\n\ndef</think>yes\n"
    with pytest.raises(RequestError, match="not known how this model writes"):
        talk(engine, say("yes"), budget=2, reasoning=None)


def test_an_answer_that_is_stuck_is_ended_and_that_is_told(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = RepetitionDetection(max_pattern_size=2, min_count=3)
    talk(engine, say("so xyxyxyxyxy"), stuck=rule)
    out, err = capsys.readouterr()
    assert out == "so xyxyxy\n"
    assert "repeating itself" in err
    talk(engine, say("so xyxyxyxyxy"))
    assert capsys.readouterr() == ("so xyxyxyxyxy\n", "")


@pytest.mark.parametrize("budget", [None, 2])
def test_a_form_is_that_of_the_answer(
    engine: Engine, capsys: pytest.CaptureFixture[str], budget: int | None
) -> None:
    form = StructuredOutputs(regex="(yes|no)!")
    talk(engine, say("<think>abcdef</think>yes, of course"), form=form, budget=budget)
    thought = f"<think>\n{'abcdef'[:budget]}\n</think>\n\n"
    answer = "yes!" if budget is None else "no!"  # the script is out of step behind a budget
    assert capsys.readouterr().out == f"{thought}{answer}\n"
    talk(engine, say("no way"), form=form, budget=budget)
    assert capsys.readouterr().out == "no!\n"


@pytest.mark.parametrize(
    ("text", "reasoning"), [(ANSWER, None), ("yes", THINK), ("say <think>", THINK)]
)
def test_what_is_no_reasoning_is_the_answer(
    engine: Engine,
    capsys: pytest.CaptureFixture[str],
    text: str,
    reasoning: ReasoningFormat | None,
) -> None:
    prompts = talk(engine, say(text), "and?", reasoning=reasoning)
    assert capsys.readouterr().out == f"{text}\n\n"
    assert turn("assistant", text) in prompts[1]


def test_messages_that_have_channels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Marks are special tokens, and tell what was thought; the template gets it as its own."""
    write_tokenizer(tmp_path, OSS_TEMPLATE, MARKS)
    tokenizer = Tokenizer.from_folder(tmp_path, frozenset())
    end = tokenizer.token_to_id(RETURN)
    assert end is not None
    tokenizer.eos_token_ids = frozenset({end})
    options = NullOptions(vocab_size=tokenizer.vocab_size, num_blocks=64)
    model = ScriptedModel(options, tokenizer, ("<|start|>", "assistant"), RETURN)
    format_ = reasoning_format("openai_gptoss", ())
    told = answer(message("analysis", "hm, é"), message("final", "yes"))
    with closing(Engine(model, tokenizer, EngineConfig(seed=1))) as engine:
        _, prompt = talk(engine, say(told), "and?", reasoning=format_, source=OSS_TEMPLATE)
    assert capsys.readouterr().out.startswith("<think>\nhm, é\n</think>\n\nyes\n")
    assert prompt.endswith(
        "<|start|>assistant<|channel|>final<|message|>yes<|end|>"
        "<|start|>user<|message|>and?<|end|><|start|>assistant"
    )
