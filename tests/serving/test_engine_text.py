"""Text through the engine: tokenized prompts, streamed text, stop strings, logprobs."""

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import processors

from onnxport.errors import RequestError
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.helpers import null_engine, run, submit, text, tokens
from tests.serving.tokenizers_for_tests import EOS, byte_level

TOKENIZER = Tokenizer(byte_level(), frozenset({0}))
SCRIPT = "naïve café: the sea is deep 🙂\n\nHuman: hello"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose greedy tokens spell SCRIPT, whatever the prompt, and then end."""
    script = [*TOKENIZER.encode(SCRIPT), 0]
    plain = NullModel.run

    def spell(self: NullModel, inputs: StepInputs) -> NDArray[np.float32]:
        logits = plain(self, inputs)
        rows = np.searchsorted(
            inputs.cumulative_sequence_lengths[1:], inputs.logits_indices, "right"
        )
        total = inputs.past_sequence_lengths + np.diff(inputs.cumulative_sequence_lengths)
        for index, row in enumerate(rows):
            place = total[row] - len(TOKENIZER.encode("the sea"))
            logits[index, script[max(0, place) % len(script)]] = 50.0
        return logits

    monkeypatch.setattr(NullModel, "run", spell)
    return null_engine(vocab_size=TOKENIZER.vocab_size, tokenizer=TOKENIZER)


def generate(engine: Engine, **params: object) -> list[CompletionDelta]:
    merged = {"temperature": 0.0, "max_tokens": 200} | params
    submit(engine, "a", "the sea", SamplingParams(**merged))  # type: ignore[arg-type]
    return run(engine)["a"]


def test_text_is_streamed_whole_and_eos_is_silent(engine: Engine) -> None:
    deltas = generate(engine)
    assert text(deltas) == SCRIPT
    assert tokens(deltas)[-1] == 0
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert all("\N{REPLACEMENT CHARACTER}" not in delta.text for delta in deltas)


def test_a_stop_string_is_cut_off_and_never_shown(engine: Engine) -> None:
    deltas = generate(engine, stop=("\n\nHuman:", "never"))
    assert text(deltas) == SCRIPT.split("\n\nHuman:")[0]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "\n\nHuman:")
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert "\n" not in shown


def test_text_that_only_begins_like_a_stop_string_is_released(engine: Engine) -> None:
    deltas = generate(engine, stop=("sea is dry",))
    assert text(deltas) == SCRIPT
    deltas = generate(engine, stop=("hello there",))
    assert text(deltas) == SCRIPT


def test_held_text_is_released_at_a_stop_token(engine: Engine) -> None:
    last = TOKENIZER.encode(SCRIPT)[-1]
    ends = SCRIPT[: -len(TOKENIZER.token_text(last))]
    held = ends[-2:]
    deltas = generate(engine, stop=(held + "~",), stop_token_ids=(last,))
    assert text(deltas) == ends
    assert deltas[-1].stop_reason == last


def test_an_incomplete_character_at_max_tokens_becomes_a_replacement(engine: Engine) -> None:
    ids = TOKENIZER.encode(SCRIPT)
    cut = next(n for n in range(len(ids)) if TOKENIZER.decode(ids[:n]).endswith("\ufffd"))
    deltas = generate(engine, max_tokens=cut)
    assert text(deltas) == TOKENIZER.decode(ids[:cut])
    assert deltas[-1].finish_reason == "length"


def test_logprobs_name_their_tokens(engine: Engine) -> None:
    deltas = generate(engine, logprobs=1, ignore_eos=True, max_tokens=len(SCRIPT))
    for delta in deltas:
        assert delta.logprobs is not None
        (entry,) = delta.logprobs
        (token_id,) = delta.token_ids
        assert entry[token_id].decoded_token == TOKENIZER.token_text(token_id)
        assert entry[token_id].rank == 1
        assert entry[token_id].logprob == pytest.approx(0.0, abs=1e-6)
    names = [entry[i].decoded_token for d in deltas for entry in d.logprobs or () for i in entry]
    assert EOS in names


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_token_s_text_is_kept_if_asked_for(engine: Engine, includes: bool) -> None:
    newline = TOKENIZER.encode("\n")[0]
    deltas = generate(engine, stop_token_ids=(newline,), include_stop_str_in_output=includes)
    assert text(deltas) == SCRIPT.split("\n")[0] + "\n" * includes
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", newline)


def test_a_stop_string_is_kept_if_asked_for_and_an_end_token_has_no_text(engine: Engine) -> None:
    deltas = generate(engine, stop=("is deep",), include_stop_str_in_output=True)
    assert text(deltas) == SCRIPT.split(" 🙂")[0]
    assert deltas[-1].stop_reason == "is deep"
    deltas = generate(engine, include_stop_str_in_output=True)
    assert text(deltas) == SCRIPT
    assert tokens(deltas)[-1] == 0


def test_nothing_ends_a_text_before_min_tokens(engine: Engine) -> None:
    first, second = SCRIPT.index("e"), SCRIPT.rindex("e", 0, SCRIPT.index("deep"))
    shown = TOKENIZER.encode(SCRIPT[: second - 3])
    deltas = generate(engine, stop=("e",), min_tokens=len(shown))
    assert text(deltas).startswith(SCRIPT[: first + 1])
    assert SCRIPT.startswith(text(deltas))
    assert len(tokens(deltas)) > len(shown)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "e")
    number = len(TOKENIZER.encode(SCRIPT)) + 5
    for ignore_eos in (False, True):  # as in vLLM, the end token does not even come
        deltas = generate(engine, min_tokens=number, max_tokens=number, ignore_eos=ignore_eos)
        assert 0 not in tokens(deltas)
        assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("word", ["sea", " sea", "the", "deep 🙂", "é"])
def test_bad_words_do_not_come(engine: Engine, word: str) -> None:
    assert word in text(generate(engine))
    assert word.strip() not in text(generate(engine, bad_words=(word,)))


def test_what_a_tokenizer_puts_around_texts_is_no_part_of_a_bad_word() -> None:
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing(f"{EOS} $A", None, [(EOS, 0)])
    tokenizer = Tokenizer(fast, frozenset({0}))
    engine = null_engine(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    request = engine.prepare("a", "the sea", SamplingParams(bad_words=("z",)))
    assert request.tokens[0] == 0
    assert request.rules is not None
    assert request.rules.edits(request.tokens).banned.tolist() == TOKENIZER.encode("z")


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        submit(null_engine(), "a", [1], SamplingParams(bad_words=("x",)))


def test_a_request_that_runs_out_of_tokens_fails_alone(engine: Engine) -> None:
    """Its one token may not come twice in a row."""
    [letter] = TOKENIZER.encode("z")
    params = SamplingParams(allowed_token_ids=(letter,), bad_words=("zz",), temperature=0.0)
    submit(engine, "stuck", "the sea", params)
    submit(engine, "free", "the sea", SamplingParams(temperature=0.0, max_tokens=200))
    deltas = run(engine)
    assert text(deltas["free"]) == SCRIPT
    assert text(deltas["stuck"]) == "z"
    assert deltas["stuck"][-1].finish_reason == "error"
    assert "no token is left to draw" in (deltas["stuck"][-1].error or "")
