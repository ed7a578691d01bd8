"""A budget of thinking: which token has to come, exactly, and what the engine makes of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from onnxport.errors import RequestError
from onnxport.serving.channels import Channels
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.engine import Engine
from onnxport.serving.llm import LLM
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.reasoning_formats import FORMATS
from onnxport.serving.request import Request
from onnxport.serving.row_params import RowParams
from onnxport.serving.rules import logit_rules
from onnxport.serving.sampler import sample
from onnxport.serving.sampling import Position, row_params, sample_positions
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.ngram import NgramDrafter
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.thought_budget import SequenceBudget, thought_budget, with_thought
from onnxport.serving.thoughts import ReasoningSplitter, Thought
from onnxport.serving.tokenizer import Tokenizer
from tests.tiers import examples

from .helpers import null_engine, reasons, run, submit, text, tokens
from .prophet import Prophet
from .speculating import Eager
from .structured import tokenizer, vocabulary
from .tokenizers_for_tests import byte_fallback, byte_level

PROMPT = [20, 21, 22]
THINK = Thought(("<think>",), ("</think>",))
OPEN = replace(THINK, is_open=True)
GRANITE = replace(FORMATS["granite"].thought("") or THINK, is_open=True)
SHORT = Thought(("#", "<"), ("e}", "é"), is_open=True)  # closed now and then by chance


def encoded(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def params(most: int, thought: Thought = OPEN, **more: Any) -> SamplingParams:
    return SamplingParams(thinking_token_budget=most, thought=thought, **more)


def request(
    asked: SamplingParams, output: Sequence[int] = (), words: Tokenizer | None = None
) -> Request:
    words = words or tokenizer()

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return words.encode_all(texts, add_special_tokens=False)

    size = words.vocab_size
    budget = thought_budget(asked, words, size)
    ends = words.eos_token_ids | {*asked.stop_token_ids}
    rules = logit_rules(asked, ends, size, encode, budget)
    prompt = array("q", PROMPT)
    one = Request("r", prompt, asked, max_total_tokens=999, rules=rules)
    one.tokens.extend(output)
    return one


def forced(one: Request, assumed: Sequence[int] = ()) -> int | None:
    """The only token that may come next; None: others may."""
    edits = row_params(Position(one, tuple(assumed))).edits
    assert edits is not None
    if edits.allowed is None or len(edits.allowed) > 1:
        return None
    return int(edits.allowed.item())


def closed_by(one: Request) -> list[int]:
    """Append what is forced, until nothing is; returns it."""
    found: list[int] = []
    while (token_id := forced(one)) is not None:
        found.append(token_id)
        one.tokens.append(token_id)
        assert len(found) < 99
    return found


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_thought_that_the_prompt_has_opened(most: int) -> None:
    one = request(params(most))
    for token_id in encoded("xyzxyz")[:most]:
        assert forced(one) is None
        one.tokens.append(token_id)
    assert closed_by(one) == encoded("</think>")
    for token_id in encoded(" so <think>" + "x" * 9):  # what stands in the answer is text
        one.tokens.append(token_id)
        assert forced(one) is None


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_thought_that_the_model_opens_is_counted_behind_its_tag(most: int) -> None:
    one = request(params(most, THINK))
    for token_id in (*encoded("\n<think>"), *encoded("xyzxyz")[:most]):
        assert forced(one) is None
        one.tokens.append(token_id)
    assert closed_by(one) == encoded("</think>")


@pytest.mark.parametrize("answer", ["x" * 20, " x <think>" + "x" * 20, "<thin>" + "x" * 20, ""])
def test_an_answer_without_a_thought_is_free(answer: str) -> None:
    one = request(params(2, THINK))
    for token_id in encoded(answer):
        assert forced(one) is None
        one.tokens.append(token_id)
    assert forced(one) is None


def test_a_thought_that_ends_in_time_is_left_alone() -> None:
    one = request(params(12))
    for token_id in encoded("xx</think>" + "x" * 20):
        assert forced(one) is None
        one.tokens.append(token_id)
    assert forced(one) is None


@pytest.mark.parametrize(
    ("thought", "before", "rest"),
    [
        (OPEN, "x</thi", "nk>"),
        (OPEN, "x<", "/think>"),
        (OPEN, "x</</", "think>"),
        (GRANITE, "so. Here is", " my response:"),
        (GRANITE, "so. Here's my", " response:"),
        (GRANITE, "so. Here", " is my response:"),
        (GRANITE, "so. Here was", "Here is my response:"),
    ],
)
def test_a_tag_that_is_begun_is_gone_on_with(thought: Thought, before: str, rest: str) -> None:
    most = len(encoded(before))
    one = request(params(most, thought), encoded(before))
    assert tokenizer().decode(closed_by(one)) == rest
    assert ReasoningSplitter(thought).take(before + rest + "yes", is_last=True).content == "yes"


def with_tags(*, special: bool) -> Tokenizer:
    fast = byte_level()
    fast.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")])
    return Tokenizer(fast, tokenizer().eos_token_ids)


@pytest.mark.parametrize("special", [False, True])
def test_a_tag_that_is_a_token_is_never_spelled_out(special: bool) -> None:
    words = with_tags(special=special)
    opens, closes = (words.token_to_id(tag) for tag in ("<think>", "</think>"))
    assert opens is not None
    for before in ("xx", "x<", "</thi"):
        output = [opens, *encoded(before)]
        one = request(params(len(output) - 1, THINK), output, words)
        assert closed_by(one) == [closes]
        assert forced(request(params(len(output), THINK), output, words)) is None


def metaspace() -> Tokenizer:
    """Words that begin with a space, which the tokenizer also puts before a text."""
    pieces = ["▁", *"</>thinkx", "▁</", "think"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "<"), ("▁<", "/"), ("t", "h"), ("th", "i"), ("thi", "n"), ("thin", "k")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    fast = FastTokenizer(models.BPE(vocab, merges))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    return Tokenizer(fast)


def test_a_tag_may_have_the_space_that_a_tokenizer_puts_before_it() -> None:
    words = metaspace()
    one = request(params(1), words.encode("x"), words)
    assert [words.token_text(each) for each in closed_by(one)] == [" </", "think", ">"]
    one = request(params(4), [*words.encode("x"), words.token_to_id("</") or 0], words)
    assert forced(one) is None


@pytest.mark.parametrize("text", ["é", "日", "👩"])
@pytest.mark.parametrize("fast", [byte_level, byte_fallback])
def test_a_character_that_is_begun_may_be_ended(text: str, fast: Any) -> None:
    words = Tokenizer(fast())
    parts = [words.byte_token(byte) for byte in text.encode()]
    assert None not in parts
    thought = Thought(("#",), ("dip",), is_open=True)
    for most in range(1, len(parts)):
        one = request(params(most, thought), words=words)
        for token_id in parts:
            assert forced(one) is None
            assert token_id is not None
            one.tokens.append(token_id)
        spelled = words.decode([token for token in (*parts, *closed_by(one)) if token is not None])
        assert spelled == f"{text}dip"


@pytest.mark.parametrize(
    ("begun", "ended"),
    [
        (b"\xc3", "\xc0"),
        (b"\xe0", "\u0800"),
        (b"\xed", "\ud000"),
        (b"\xf0", "\U00010000"),
        (b"\xf0\x9f", "\U0001f000"),
        (b"\xf4\x80\x81", "\U00100040"),
    ],
)
def test_a_character_that_is_begun_again_and_again_is_ended(begun: bytes, ended: str) -> None:
    """With its least bytes; no grammar takes anything else then."""
    words = tokenizer()
    parts = [words.byte_token(byte) for byte in begun]
    again = parts[:1] * (4 - len(parts)) + parts  # three tokens behind the budget, all incomplete
    one = request(params(1), [token for token in again if token is not None])
    written = closed_by(one)
    raw = b"".join(words.token_bytes(each) for each in written)
    assert (begun + raw).decode() == f"{ended}</think>"


def test_a_character_stays_open_where_no_byte_may_end_it() -> None:
    """Rather than that a token comes which is not allowed."""
    begins = tokenizer().byte_token(0xC3)
    assert begins is not None
    closing = encoded("</think>")
    one = request(params(1, allowed_token_ids=(begins, *closing)), [begins] * 3)
    assert forced(one) is None
    one.tokens.append(begins)
    assert closed_by(one) == closing


thoughts = st.sampled_from([THINK, OPEN, SHORT, replace(SHORT, is_open=False), GRANITE])
pieces = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "</", "think", ">", "#", "e", "}", "é", "日", "Here", " is", " my"]
    ),
    max_size=8,
)


@settings(max_examples=examples(80), deadline=None)
@given(thoughts, st.integers(0, 9), pieces, st.lists(st.integers(0, 329), max_size=3), st.data())
def test_what_is_forced_depends_on_the_tokens_alone(
    thought: Thought, most: int, texts: list[str], more: list[int], data: Any
) -> None:
    """Read one by one, at once, or assumed; and as the text split anew for each token has it."""
    output = [*encoded("".join(texts)), *more]
    step_by_step, wanted = request(params(most, thought)), []
    is_open, num_open = [], 0
    for count in range(len(output) + 1):
        splitting = ReasoningSplitter(thought)
        splitting.feed("".join(map(tokenizer().token_text, output[:count])))
        is_open.append(splitting.is_thinking)
        num_open = sum(is_open[:-1])
        token_id = forced(step_by_step)
        pending = tokenizer().pending(reversed(output[:count]))
        is_due = splitting.is_thinking and num_open >= most
        assert (token_id is not None) == (is_due and (not pending or num_open >= most + 3))
        wanted.append(token_id)
        step_by_step.tokens.extend(output[count : count + 1])
    split = data.draw(st.integers(0, len(output)))
    ahead = request(params(most, thought), output[:split])
    for count in range(split, len(output) + 1):
        assert forced(ahead, output[split:count]) == wanted[count]
    assert forced(ahead) == wanted[split]  # what was assumed left no trace
    fork = request(params(most, thought), output[:split])
    fork.rules = ahead.rules.fork() if ahead.rules is not None else None
    fork.tokens.extend(output[split:])
    assert forced(fork) == wanted[-1]
    assert forced(ahead) == wanted[split]  # nor what a fork reads
    if wanted[-1] is not None:
        one = request(params(most, thought), output)
        splitting = ReasoningSplitter(thought)
        written = tokenizer().decode([*output, *closed_by(one)], skip_special_tokens=False)
        splitting.feed(written)
        assert splitting.has_thought
        assert not splitting.is_thinking


def test_one_token_is_drawn_whatever_else_is_asked() -> None:
    """Penalties, biases and what thins out have nothing to say where one token may come."""
    closing = encoded("</think>")
    asked = params(
        1,
        logit_bias={closing[0]: -100.0},
        repetition_penalty=100.0,
        presence_penalty=2.0,
        bad_words=("zy",),
        min_tokens=9,
        top_p=0.1,
        seed=4,
        logprobs=1,
    )
    logits = np.random.default_rng(1).normal(0, 3, (1, tokenizer().vocab_size)).astype(np.float32)
    logits[0, closing] = -3e38
    before = logits.copy()
    for temperature in (0.0, 1.0):
        one = request(replace(asked, temperature=temperature), encoded("x"))
        for token_id in closing:
            drawn = sample_positions([Position(one)], logits)
            assert (drawn.token_ids, drawn.invalid) == ([token_id], ())
            assert drawn.logprobs is not None
            assert drawn.logprobs[0] is not None
            assert drawn.logprobs[0].token_id == token_id
            one.tokens.append(token_id)
        edits = row_params(Position(one)).edits
        assert edits is not None
        assert set(closing) <= {*edits.seen.tolist()}  # they are counted when it is closed
    assert (logits == before).all()
    one = request(replace(asked, temperature=0.0, logprobs=None), encoded("x"))
    edits = row_params(Position(one)).edits
    assert edits is not None
    assert edits.addresses is not None
    for edit in (edits, edits._replace(addresses=None)):
        assert sample(logits, [RowParams(edits=edit)]).token_ids == closing[:1]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"allowed_token_ids": encoded("</think")}, "allowed_token_ids"),
        ({"bad_words": [">"]}, "bad_words"),
        ({"bad_words": ["k>"]}, "bad_words"),
        ({"bad_words": ["</think>"]}, "bad_words"),
        ({"stop_token_ids": encoded(">"), "min_tokens": 4}, "min_tokens"),
    ],
)
def test_what_forbids_the_tag_is_refused(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match="behind which a thought is closed") as caught:
        request(params(3, **more))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "more",
    [
        {"allowed_token_ids": encoded("</think>x")},
        {"bad_words": ["x>", "thing", "</think>x"]},
        {"stop_token_ids": encoded(">"), "min_tokens": 3},
        {"stop_token_ids": encoded(">")},
    ],
)
def test_what_may_forbid_other_things_is_not(more: dict[str, Any]) -> None:
    assert closed_by(request(params(3, **more), encoded("xxx"))) == encoded("</think>")


def test_what_is_refused() -> None:
    assert SamplingParams(thinking_token_budget=-1) == SamplingParams()  # no limit, as in vLLM
    for most, words in ((-2, "must be in"), (1.5, "integer"), (True, "number"), ("4", "integer")):
        with pytest.raises(RequestError, match=words) as caught:
            SamplingParams(thinking_token_budget=most)  # type: ignore[arg-type]
        assert caught.value.param == "thinking_token_budget"
    unclosed = (Thought((), ("x",)), Thought(("x",), ()), Thought(("x",), ("",)))
    for thought in ("x", Channels(), *unclosed):
        with pytest.raises(RequestError) as caught:
            SamplingParams(thought=thought)  # type: ignore[arg-type]
        assert caught.value.param == "thought"
    size = tokenizer().vocab_size
    with pytest.raises(RequestError, match="nothing says what a thought is here"):
        thought_budget(SamplingParams(thinking_token_budget=1), tokenizer(), size)
    with pytest.raises(RequestError, match="this engine has none"):
        thought_budget(params(1), None, size)
    with pytest.raises(RequestError, match="no tokens that spell '</think>'"):
        thought_budget(params(1), Tokenizer(byte_level()), 20)
    with pytest.raises(RequestError, match="no tokens that spell '<é>'"):
        thought_budget(params(1, Thought(("x",), ("<é>",))), metaspace(), size)
    fast = FastTokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "aab": 3}, [("a", "b"), ("a", "ab")]))
    fast.decoder = decoders.Fuse()
    with pytest.raises(RequestError, match="no tokens that spell 'aaab'"):  # but "a", again
        thought_budget(params(1, Thought(("b",), ("aaab",))), Tokenizer(fast), size)
    form = StructuredOutputs(choice=("yes",), thought=THINK)
    with pytest.raises(RequestError, match="another thought"):
        thought_budget(params(1, structured_outputs=form), tokenizer(), size)


def test_whose_reasoning_it_is() -> None:
    asked = SamplingParams(thinking_token_budget=4)
    assert with_thought(asked, OPEN, is_known=True) == params(4)
    assert with_thought(asked, None, is_known=True) == SamplingParams()  # the prompt has closed it
    assert with_thought(SamplingParams(), OPEN, is_known=True) == SamplingParams()
    with pytest.raises(RequestError, match="not known how this model writes"):
        with_thought(asked, None, is_known=False)
    with pytest.raises(RequestError, match="reasoning in messages"):
        with_thought(asked, Channels(), is_known=True)


def engine(**options: Any) -> Engine:
    size = vocabulary().vocab_size
    return null_engine(tokenizer=tokenizer(), vocab_size=size, max_model_len=400, **options)


def check_thought(asked: SamplingParams, output: list[int]) -> bool:
    """Assert that a thought is closed when it has to be; returns whether it had to be."""
    most, thought = asked.thinking_token_budget, asked.thought
    assert most is not None
    assert thought is not None
    one = request(asked)
    was_forced = False
    for token_id in output:
        wanted = forced(one)
        assert wanted in (None, token_id)
        was_forced = was_forced or wanted is not None
        one.tokens.append(token_id)
    splitting = ReasoningSplitter(thought)
    num_open = 0
    for token_id in output:
        num_open += splitting.is_thinking
        splitting.feed(tokenizer().token_text(token_id))
    assert num_open <= most + 6 + max(map(len, thought.closes))
    return was_forced


FORMS = [
    None,
    StructuredOutputs(regex="[a-f0-9]{4}x"),
    StructuredOutputs(choice=("the sea", "日本語", "no")),
    StructuredOutputs(json={"type": "object", "properties": {"x": {"type": "boolean"}}}),
]
asks = st.lists(
    st.tuples(
        st.sampled_from([OPEN, SHORT, THINK, GRANITE]),
        st.integers(0, 12),
        st.sampled_from(FORMS),
        st.integers(0, 99),
        st.sampled_from(
            [
                {},
                {"temperature": 0.0},
                {"n": 3},
                {"top_k": 5, "logprobs": 1},
                {"top_p": 0.5, "repetition_penalty": 1.5},
                {"temperature": 0.0, "frequency_penalty": 1.0, "min_tokens": 20},
            ]
        ),
    ),
    min_size=1,
    max_size=4,
)


def asked_for(one: Any) -> SamplingParams:
    thought, most, form, seed, more = one
    if form is not None:
        form = replace(form, thought=thought)
    return params(most, thought, seed=seed, structured_outputs=form, max_tokens=60, **more)


def of(deltas: Sequence[CompletionDelta], n: int) -> list[list[int]]:
    return [tokens(deltas, index) for index in range(n)]


@settings(max_examples=examples(15), deadline=None)
@given(
    asks,
    st.sampled_from([{}, {"num_blocks": 110, "max_num_batched_tokens": 9}]),
    st.integers(0, 3),
)
def test_in_any_company(asked: list[Any], options: dict[str, Any], errs: int) -> None:
    """Batched, chunked, forked, preempted or guessed ahead, tokens are those of each alone."""
    alone = engine(enable_prefix_caching=False, takes_exact_logits=False)
    wanted: dict[str, list[list[int]]] = {}
    for number, one in enumerate(asked):
        submit(alone, str(number), [20 + one[3] % 7, 21, 22], asked_for(one))
        found = run(alone)[str(number)]
        assert "error" not in reasons(found), found[-1].error
        wanted[str(number)] = of(found, asked_for(one).n)
        for output in wanted[str(number)]:
            check_thought(asked_for(one), output)

    def future(one: Request) -> Sequence[int]:
        return wanted[one.request_id][one.index]

    prophet = Prophet(future)
    prophet.errs = errs
    for speculator in (None, prophet):
        together = engine(speculator=speculator, **options)
        for number, one in enumerate(asked):
            submit(together, str(number), [20 + one[3] % 7, 21, 22], asked_for(one))
        for name, deltas in run(together).items():
            assert of(deltas, len(wanted[name])) == wanted[name]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_an_open_thought_is_closed_and_then_the_answer_comes(
    temperature: float, form: StructuredOutputs | None
) -> None:
    """Real guesses from the text change no token."""
    found = []
    guesses = SpeculationConfig("ngram", num_speculative_tokens=4)
    for speculator in (None, Eager(NgramDrafter(1, 1), guesses)):
        one = engine(speculator=speculator)
        number_forced = 0
        outputs = []
        for seed in range(12):
            asked = asked_for((OPEN, 4, form, seed, {"temperature": temperature}))
            submit(one, "a", encoded("</think>") + [seed + 20] * 5, asked)
            deltas = run(one)["a"]
            outputs.append(tokens(deltas))
            assert "error" not in reasons(deltas), deltas[-1].error
            number_forced += check_thought(asked, tokens(deltas))
            split = ReasoningSplitter(OPEN).take(text(deltas), is_last=True)
            if form is not None and reasons(deltas) == ["stop"]:
                assert form.choice is None or split.content in form.choice
                assert form.regex is None or split.content[-1] == "x"
        assert number_forced > 8
        found.append(outputs)
    assert found[0] == found[1]


def test_a_bad_word_that_ends_in_a_tag_is_the_request_s_fault() -> None:
    one = engine()
    letter = encoded("x")[0]
    asked = params(2, bad_words=["x</"], logit_bias={letter: 100.0}, temperature=0.0)
    submit(one, "a", PROMPT, asked)
    failure = run(one)["a"][-1].failure
    assert failure is not None
    assert failure.refused
    assert "bad_words and thinking_token_budget forbid all" in failure.message


def test_a_form_holds_no_special_token() -> None:
    words = with_tags(special=True)
    form = StructuredOutputs(regex="[a-f]{3}", thought=OPEN)
    asked = replace(params(3, OPEN), structured_outputs=form)
    with pytest.raises(
        RequestError, match="'</think>', which closes a thought, is a special token"
    ):
        thought_budget(asked, words, words.vocab_size)
    words = with_tags(special=False)
    assert thought_budget(asked, words, words.vocab_size) is not None


def test_a_chat_knows_the_thoughts_of_its_template() -> None:
    template = "{{ messages[0].content }}<think>{% if 0 %}</think>{% endif %}"
    words = with_tags(special=True)
    closes = words.token_to_id("</think>")
    with LLM.from_engine(
        null_engine(tokenizer=words, vocab_size=words.vocab_size),
        ChatTemplate({"default": template}),
    ) as llm:
        asked = SamplingParams(temperature=0.0, max_tokens=12, thinking_token_budget=3)
        messages = [{"role": "user", "content": "hello"}]
        output = list(llm.chat(messages, asked)[0].outputs[0].token_ids)
        assert output[3] == closes
        free = replace(asked, thinking_token_budget=None)
        assert list(llm.chat(messages, free)[0].outputs[0].token_ids)[:3] == output[:3]
        with pytest.raises(RequestError, match="use a chat"):
            llm.generate("hello", asked)
        (told,) = llm.generate("hello<think>", replace(asked, thought=OPEN))
        assert told.outputs[0].token_ids[3] == closes
    plain = LLM.from_engine(null_engine(tokenizer=words), ChatTemplate({"default": "hello"}))
    with plain, pytest.raises(RequestError, match="not known how this model writes"):
        plain.chat(messages, asked)


def test_a_thought_is_read_no_further_than_it_goes() -> None:
    budget = thought_budget(params(2), tokenizer(), tokenizer().vocab_size)
    assert budget is not None
    one = SequenceBudget(budget, 0)
    assert one.forced(array("q", encoded("x"))) is None
    assert one._splitter is not None
    assert one.forced(array("q", encoded("x</think>yes"))) is None
    assert one._splitter is None
    without = thought_budget(params(2, THINK), tokenizer(), tokenizer().vocab_size)
    assert without is not None
    one = SequenceBudget(without, 0)
    assert one.forced(array("q", encoded("yes"))) is None
    assert one._splitter is None


def test_a_thought_that_is_ended_gets_no_further() -> None:
    [closing] = encoded("</think>")[:1]
    budget = thought_budget(params(1 << 62), tokenizer(), tokenizer().vocab_size)
    assert budget is not None
    one = SequenceBudget(budget, 0)
    written = encoded("xyz")
    assert one.forced(array("q", written)) is None
    other = one.fork()
    assert one.end()
    assert one.end()  # which changes nothing
    forced = one.forced(array("q", written))
    assert forced is not None
    assert forced.ids.tolist() == [closing]
    assert other.forced(array("q", written)) is None
    whole = encoded("xyz</think>")
    assert one.forced(array("q", whole)) is None
    assert not one.end()  # it answers


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_request_that_is_told_to_answer(num_steps: int) -> None:
    engine = null_engine(tokenizer=tokenizer(), vocab_size=tokenizer().vocab_size)
    submit(engine, "a", PROMPT, params(1 << 62, max_tokens=40, temperature=0.0))
    submit(engine, "b", PROMPT, params(1 << 62, max_tokens=40, temperature=0.0))
    before = [delta for _ in range(num_steps) for delta in engine.step()]
    assert engine.end_thoughts("a")
    deltas = run(engine)
    thought = [delta for delta in before if delta.request_id == "a"]
    assert "</think>" in text([*thought, *deltas["a"]])
    assert len(text(thought)) <= text([*thought, *deltas["a"]]).index("</think>")
    assert "</think>" not in text(deltas["b"])
    assert not engine.end_thoughts("a")
