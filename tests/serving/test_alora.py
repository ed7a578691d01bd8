"""aLoRAs in the engine: what is before the invocation is the model's own, the rest the adapter's.

The null model's K/V, states and logits depend on the adapter of each row; what is expected is
computed by hand, in `activated.py`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import CapacityError, RequestError
from onnxport.providers.null import NullModel
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from tests.serving.activated import activated, border, by_hand, logits_by_hand
from tests.serving.adapting import adapter_engine, content, mixed_with, null_options
from tests.serving.helpers import checked_step, null_engine, null_model, run, submit, tokens
from tests.serving.pooling import MEAN, embed
from tests.serving.prophet import Prophet
from tests.tiers import examples

MIB = 1 << 20
CONTEXT = [(i * 7) % 500 for i in range(22)]  # five blocks of four tokens, and a half
A, B = (3, 3, 9), (8, 2)  # invocations
SIX = SamplingParams(temperature=0.0, max_tokens=6)
# Adapter -> seed of its content, and where it begins; "c" acts on all tokens.
LOADED: dict[str, tuple[int, tuple[int, ...]]] = {"a": (0, A), "b": (1, B), "c": (2, ())}


def alora_engine(*names: str, **options: Any) -> Engine:
    engine = adapter_engine(**options)
    for name in names or LOADED:
        seed, invocation = LOADED[name]
        engine.adapters.load(name, activated(seed, *invocation))
    return engine


def expected(
    name: str | None, prompt: Sequence[int], max_tokens: int = 6, *, states: int = 0
) -> list[int]:
    if name is None:
        return by_hand(None, None, prompt, max_tokens, states=states)
    seed, invocation = LOADED[name]
    start = border(prompt, invocation) if invocation else 0
    return by_hand(seed, start, prompt, max_tokens, states=states)


def ask(engine: Engine, prompt: Sequence[int], name: str | None = None) -> list[CompletionDelta]:
    """Run a request alone, and check its tokens."""
    submit(engine, "one", prompt, SIX, adapter=name)
    deltas = run(engine)["one"]
    assert tokens(deltas) == expected(name, prompt)
    return deltas


def cached(engine: Engine, prompt: Sequence[int], name: str | None = None) -> int:
    return ask(engine, prompt, name)[0].num_cached_tokens


# Where it begins.


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ([3, 3, 9], 0),
        ([1, 3, 3, 9, 5], 1),
        ([3, 3, 9, 1, 3, 3, 9, 3, 3], 4),
        ([3, 3, 3, 9], 1),  # begins inside of what might have been one
        ([3, 3], None),
        ([3, 9, 3], None),
        ([], None),
        ([3 << 8, 3 << 8, 9 << 8], None),  # the same bytes, not the same tokens
        ([3, 3, 9, 0, 3 << 8, 3 << 8, 9 << 8, 0], 0),
        ([3 << 7, 3 << 7, 9 << 7], None),
        ([3 << 28, 3 << 28, 9 << 28, 0], None),
    ],
)
def test_the_last_invocation_counts(prompt: list[int], start: int | None) -> None:
    one = activated(0, *A)
    adapter = Adapter("a", 1, "", 1, one.path, None, invocation=one.invocation)
    assert adapter.start_in(array("q", prompt)) == start
    if 3 << 8 not in prompt:
        assert border(prompt, A) == start


@given(
    st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=4)
)
def test_it_is_looked_for_from_the_end(prompt: list[int], invocation: list[int]) -> None:
    adapter = Adapter("a", 1, "", 1, content(0).path, None, invocation=tuple(invocation))
    assert adapter.start_in(array("q", prompt)) == border(prompt, invocation)


def test_looking_for_it_takes_no_longer_where_tokens_repeat() -> None:
    """It is done for each request, by the engine's thread, too."""
    invocation = (0, 1, *[0] * 998)
    adapter = Adapter("a", 1, "", 1, content(0).path, None, invocation=invocation)
    start_s = time.monotonic()
    assert adapter.start_in(array("q", [0] * 100_000)) is None
    assert time.monotonic() - start_s < 1.5  # it takes some 10 ms


def test_by_hand_all_differ() -> None:
    prompt = [*CONTEXT, *A, 5]
    starts = [None, 0, 20, 21, 22, 23]
    assert len({tuple(by_hand(0, start, prompt, 6)) for start in starts}) == len(starts)


# Who gets what.


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_whatever_is_in_the_batch_each_gets_its_own(data: st.DataObject) -> None:
    draw = data.draw
    states = draw(st.sampled_from([0, 0, 24]))
    parts = st.lists(
        st.sampled_from([CONTEXT[:4], CONTEXT[:9], [*A], [*B], [7], CONTEXT]),
        min_size=1,
        max_size=4,
    )
    request = st.tuples(
        st.sampled_from([None, "a", "a", "b", "c"]), parts, st.integers(1, 3), st.integers(1, 8)
    )
    requests = draw(st.lists(request, min_size=1, max_size=6))
    tier: dict[str, Any] = {}
    if not states:
        tier = draw(st.sampled_from([{}, {"preemption": "swap", "kv_host_memory": MIB}]))
    future = {}
    for number, (name, pieces, _, max_tokens) in enumerate(requests):
        prompt = [token for piece in pieces for token in piece]
        future[str(number)] = (name, prompt, expected(name, prompt, max_tokens, states=states))
    prophet = None
    if draw(st.booleans()):
        prophet = Prophet(lambda one: future[one.request_id][2])
        prophet.errs = draw(st.sampled_from([0, 2]))
    engine = alora_engine(
        num_blocks=draw(st.sampled_from([30, 64])),
        max_num_seqs=4,
        max_num_batched_tokens=draw(st.sampled_from([4, 9, 40])),
        state_slots=states,
        max_adapters=draw(st.sampled_from([1, 2, 4])),
        config={
            "enable_prefix_caching": draw(st.booleans()) or bool(tier),
            "max_host_adapters": 4,
            **tier,
        },
        speculator=prophet,
    )
    for number, (_, _, n, max_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n)
        submit(engine, str(number), future[str(number)][1], params, adapter=requests[number][0])
    deltas = run(engine)
    for number, (_, _, n, _) in enumerate(requests):
        for index in range(n):
            assert tokens(deltas[str(number)], index) == future[str(number)][2]
    assert engine.adapters.num_requests == {"a": 0, "b": 0, "c": 0}


def test_a_step_ends_where_the_adapter_begins() -> None:
    engine = alora_engine()
    submit(engine, "one", [*CONTEXT, *A, 5], SIX, adapter="a")
    checked_step(engine)
    (request,) = engine._scheduler.requests()
    assert request.num_computed_tokens == 22
    assert null_model(engine).num_runs == 1
    assert [len(delta.token_ids) for delta in checked_step(engine)] == [1]


def test_without_an_invocation_the_model_answers_alone() -> None:
    """Though its answer has one; and no slot is asked for."""
    engine = alora_engine("a", max_adapters=1)
    submit(engine, "one", [*CONTEXT, 3, 3], SIX, adapter="a")
    assert engine.adapters.num_requests == {"a": 0}
    assert tokens(run(engine)["one"]) == expected(None, [*CONTEXT, 3, 3])
    forced = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={9: 100.0})
    for name in (None, "a"):
        submit(engine, str(name), [*CONTEXT, 3, 3], forced, adapter=name)
    answers = run(engine)
    assert tokens(answers["a"]) == tokens(answers["None"]) == [9] * 6


def test_preemption() -> None:
    engine = alora_engine(num_blocks=22, max_num_seqs=4)
    prompt = [*CONTEXT, *A, *B]
    params = SamplingParams(temperature=0.0, max_tokens=30)
    for name in (None, *LOADED):
        submit(engine, str(name), prompt, params, adapter=name)
    deltas = run(engine)
    assert engine.stats().num_preemptions > 0
    for name in (None, *LOADED):
        assert tokens(deltas[str(name)]) == expected(name, prompt, 30)


def test_a_device_that_is_lost() -> None:
    lost = [False]

    def loses(_: int) -> bool:
        was, lost[0] = lost[0], False
        return was

    spare = NullModel(null_options(num_blocks=64))
    engine = alora_engine(fallbacks=[spare], lost_at=loses, num_blocks=64)
    prompt = [*CONTEXT, *A, 5]
    for name in (None, "a", "c"):
        submit(engine, str(name), prompt, SIX, adapter=name)
    deltas: dict[str, list[CompletionDelta]] = {}
    for number in range(40):
        lost[0] = number == 2
        for delta in checked_step(engine) if engine.has_work else ():
            deltas.setdefault(delta.request_id, []).append(delta)
    assert not engine.has_work
    assert null_model(engine) is spare
    for name in (None, "a", "c"):
        assert tokens(deltas[str(name)]) == expected(name, prompt)


def test_beams() -> None:
    """Whatever the steps: a search from a border in the middle of a step's budget."""
    params = SamplingParams(temperature=0.0, max_tokens=5, n=2, use_beam_search=True)
    found = []
    for budget, start in ((4, True), (64, True), (64, False)):
        engine = alora_engine(max_num_batched_tokens=budget, max_num_seqs=4)
        submit(engine, "one", [*CONTEXT, *A, 5], params, adapter="a" if start else "c")
        deltas = run(engine)["one"]
        found.append([tokens(deltas, index) for index in range(2)])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("budget", [3, 22, 23, 64])
def test_log_probabilities_of_the_prompt(budget: int) -> None:
    engine = alora_engine(max_num_batched_tokens=budget, max_num_seqs=2)
    prompt = (*CONTEXT, *A, 5)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    submit(engine, "one", prompt, params, adapter="a")
    scores = [row for delta in run(engine)["one"] for row in delta.prompt_logprobs or () if row]
    logits = logits_by_hand(0, 22, prompt, 1).astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    told = [row[token].logprob for row, token in zip(scores, prompt[1:], strict=True)]
    np.testing.assert_allclose(told, wanted[range(len(prompt) - 1), prompt[1:]], atol=1e-4)


def test_vectors_of_prompts() -> None:
    """The mean of what is made of all tokens: of those before the invocation, by the model."""
    prompt = [*CONTEXT, *A, 5]
    found: dict[str, list[bytes]] = {}
    for budget in (5, 64):
        engine = null_engine(
            embedder=MEAN, max_adapters=2, max_num_seqs=4, max_num_batched_tokens=budget
        )
        for name in ("a", "c"):
            engine.adapters.load(name, activated(0, *(A if name == "a" else ())))
        for name in (None, "a", "c"):
            for told, size in (("whole", len(prompt)), ("context", len(CONTEXT))):
                embed(engine, f"{name} {told}", prompt[:size], adapter=name)
        for request_id, (delta,) in run(engine).items():
            assert delta.embedding is not None
            found.setdefault(request_id, []).append(delta.embedding.tobytes())
    assert all(one == other for one, other in found.values())
    assert found["a context"] == found["None context"] != found["c context"]
    assert len({found[f"{name} whole"][0] for name in (None, "a", "c")}) == 3


# The prefix cache.


def test_what_is_before_the_invocation_is_shared_with_all() -> None:
    engine = alora_engine()
    assert cached(engine, CONTEXT) == 0
    assert cached(engine, [*CONTEXT, *A, 5], "a") == 20  # the model's, up to the block of A
    assert cached(engine, [*CONTEXT, *A, 5], "a") == 24  # and its own
    assert cached(engine, [*CONTEXT, *B, 5], "b") == 20
    assert cached(engine, [*CONTEXT, *B, 5], "c") == 0  # a LoRA shares with nobody
    assert cached(engine, [*CONTEXT, *A, 5]) == 20  # the model, not what A made of that block
    assert cached(engine, [*CONTEXT, *A, 5]) == 24


def test_what_an_alora_computes_first_is_the_models() -> None:
    engine = alora_engine()
    assert cached(engine, [*CONTEXT, *A, 5], "a") == 0
    assert cached(engine, [*CONTEXT, *B, 5], "b") == 20
    assert cached(engine, [*CONTEXT, 1]) == 20


def test_an_invocation_at_the_beginning_of_a_block() -> None:
    engine = alora_engine()
    context = CONTEXT[:20]
    assert cached(engine, [*context, *A, 5, 6], "a") == 0
    assert cached(engine, [*context, 1]) == 20
    assert cached(engine, [*context, *A, 5, 6], "a") == 24
    assert cached(engine, [*context, *A, 5, 6]) == 20


def test_an_invocation_at_the_beginning_of_a_prompt() -> None:
    """What it computes is what a LoRA of the same weights does."""
    engine = alora_engine("a")
    engine.adapters.load("all", content(0))
    prompt = [*A, *CONTEXT]
    assert cached(engine, prompt, "a") == 0
    submit(engine, "one", prompt, SIX, adapter="all")
    assert run(engine)["one"][0].num_cached_tokens == 24


def test_the_same_tokens_with_another_border_share_what_is_before_both() -> None:
    engine = alora_engine()
    assert cached(engine, [*CONTEXT, *A, *CONTEXT], "a") == 0
    longer = [*CONTEXT, *A, *CONTEXT, *A, 5]  # whose first invocation is context
    assert cached(engine, longer, "a") == 20
    assert cached(engine, [*CONTEXT, *A, *CONTEXT]) == 44  # the model's, which that one computed


def test_the_same_block_with_another_border_inside_is_not_shared() -> None:
    """Here the invocation comes in the answer of one, and in the prompt of the other."""
    engine = adapter_engine()
    engine.adapters.load("a", activated(0, 9))
    prompt = [*CONTEXT[:20], 9, 7]
    nines = SamplingParams(temperature=0.0, max_tokens=4, logit_bias={9: 100.0})
    submit(engine, "one", prompt, nines, adapter="a")
    assert tokens(run(engine)["one"]) == [9] * 4
    prompt += [9, 9, 5]
    submit(engine, "two", prompt, SIX, adapter="a")
    deltas = run(engine)["two"]
    assert tokens(deltas) == by_hand(0, 23, prompt, 6)
    assert deltas[0].num_cached_tokens == 20


def test_other_salts_share_nothing() -> None:
    engine = alora_engine()
    cached(engine, CONTEXT)
    submit(engine, "one", [*CONTEXT, *A, 5], SIX, adapter="a", cache_salt="other")
    assert run(engine)["one"][0].num_cached_tokens == 0


@pytest.mark.parametrize("tier", ["host", "pool"])
def test_another_load_of_the_name_shares_what_is_before_it(tier: str) -> None:
    config = {"kv_host_memory": MIB} if tier == "host" else {}
    engine = alora_engine("a", max_adapters=1, config=config)
    prompt = [*CONTEXT, *A, 5]
    assert cached(engine, prompt, "a") == 0
    engine.adapters.load("a", activated(1, *A), in_place=True)
    submit(engine, "one", prompt, SIX, adapter="a")
    deltas = run(engine)["one"]
    assert tokens(deltas) == by_hand(1, 22, prompt, 6)
    assert deltas[0].num_cached_tokens == 20


@pytest.mark.parametrize(
    ("invocation", "start"), [(A, 22), (B, 20), ((), 0), ((400,), None), ((5,), 25)]
)
def test_the_name_means_another_adapter_by_the_time_of_the_start(
    invocation: tuple[int, ...], start: int | None
) -> None:
    engine = alora_engine("a", max_adapters=1)
    prompt = [*CONTEXT[:20], *B, *A, 5]
    cached(engine, prompt, "a")
    request = engine.prepare("one", prompt, SIX, RequestOptions(adapter="a"))
    engine.adapters.load("a", activated(1, *invocation), in_place=True)
    engine.submit(request)
    deltas = run(engine)["one"]
    assert tokens(deltas) == by_hand(1, start, prompt, 6)
    assert deltas[0].num_cached_tokens == (0 if start == 0 else 20)


@pytest.mark.parametrize("first", [None, "a"])
def test_states_behind_shared_blocks(first: str | None) -> None:
    """The state behind the last block before the invocation is gone on from, whoever left it."""
    engine = alora_engine(state_slots=16, max_adapters=2, config={"max_host_adapters": 3})
    for name, prompt, found in (
        (first, CONTEXT if first is None else [*CONTEXT, *A, 5], 0),
        ("a", [*CONTEXT, *A, 5], 20 if first is None else 24),
        ("b", [*CONTEXT, *B, 5], 20),
        ("c", [*CONTEXT, *B, 5], 0),
        ("a", [*CONTEXT, *A, 5], 24),
    ):
        submit(engine, "one", prompt, SIX, adapter=name)
        deltas = run(engine)["one"]
        assert tokens(deltas) == expected(name, prompt, states=16)
        assert deltas[0].num_cached_tokens == found


# Sums.


def test_one_times_a_scale() -> None:
    engine = alora_engine()
    prompt = (*CONTEXT, *A, 5)
    submit(engine, "none", prompt[:22], SIX)
    run(engine)
    submit(engine, "one", prompt, SIX, adapter_scales={"a": 0.5})
    deltas = run(engine)["one"]
    assert deltas[0].num_cached_tokens == 20
    others = [expected(name, prompt) for name in (None, *LOADED)]
    assert tokens(deltas) not in [*others, mixed_with(((0, 0.5),), prompt, SIX)]
    whole = [*A, *CONTEXT]  # where it begins at once it is the sum that it was
    submit(engine, "two", whole, SIX, adapter_scales={"a": 0.5})
    assert tokens(run(engine)["two"]) == mixed_with(((0, 0.5),), tuple(whole), SIX)


def test_several_of_one_invocation() -> None:
    engine = alora_engine("a")
    engine.adapters.load("d", activated(3, *A))
    scales = {"a": 0.5, "d": 2.0}
    prompt = (*A, *CONTEXT)
    submit(engine, "one", prompt, SIX, adapter_scales=scales)
    assert tokens(run(engine)["one"]) == mixed_with(((0, 0.5), (3, 2.0)), prompt, SIX)
    submit(engine, "two", [7, 7, 7, 7, *prompt], SIX, adapter_scales=scales)
    assert engine.adapters.num_requests == {"a": 1, "d": 1}
    run(engine)
    submit(engine, "three", CONTEXT, SIX, adapter_scales=scales)
    assert tokens(run(engine)["three"]) == expected(None, CONTEXT)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"a": 1.0, "b": 0.5}, r"a at the tokens \[3, 3, 9\], b at the tokens \[8, 2\]; an aLoRA"),
        ({"a": 1.0, "c": 1.0}, r"a at the tokens \[3, 3, 9\], c at the first token; an aLoRA goes"),
    ],
)
def test_several_that_begin_elsewhere(scales: dict[str, float], words: str) -> None:
    engine = alora_engine()
    with pytest.raises(RequestError, match=words):
        submit(engine, "one", [*CONTEXT, *A, *B], SIX, adapter_scales=scales)
    with pytest.raises(RequestError, match="begin at different tokens"):
        engine.adapters.set_scales(scales)
    assert engine.adapters.scales == {}
    submit(engine, "two", [*CONTEXT, *A], SIX, adapter_scales={"a": 1.0, "b": 0.0, "c": 0.0})
    assert tokens(run(engine)["two"]) == expected("a", [*CONTEXT, *A])


def test_what_replaces_a_part_of_the_sum_of_all() -> None:
    engine = adapter_engine(adapters=[0, 1])
    engine.adapters.set_scales({"0": 1.0, "1": 1.0})
    with pytest.raises(CapacityError, match=r"cannot replace '1'.*begin at different tokens"):
        engine.adapters.load("1", activated(1, *A), in_place=True)
    engine.adapters.set_scales({"1": 1.0})
    engine.adapters.load("1", activated(1, *A), in_place=True)
    submit(engine, "one", [*CONTEXT, *A], SIX)
    assert tokens(run(engine)["one"]) == by_hand(1, 22, [*CONTEXT, *A], 6)
