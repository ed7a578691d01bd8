"""Ctrl-C stops an answer, not the conversation."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from onnxport.cli.chat import Conversation
from onnxport.cli.session import interruptible
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

from ..http.scripted import write_tokenizer


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_is_noted_and_the_second_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as state:
        assert not state.asked
        press_ctrl_c()
        assert state.asked
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_is_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(run: int) -> bool:
        if run == 9:
            press_ctrl_c()
        return False

    write_tokenizer(tmp_path)
    model = NullModel(NullOptions(vocab_size=94, num_blocks=512, fails=fails))
    engine = Engine(model, Tokenizer.from_folder(tmp_path, frozenset()))
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    params = SamplingParams(temperature=0, max_tokens=None)
    conversation = Conversation(engine, template, params, "Hi.")
    conversation.answer("talk")
    assert len(capsys.readouterr().out) == len("0123456789\n")
    assert model.num_runs == 10
    assert not engine.has_work
    stats = engine.stats()
    assert stats.finished["abort"] == 1
    assert stats.num_free_blocks == stats.num_blocks
    engine.close()
