"""States of sequences: exact slots in each step, and what the model is told."""

from __future__ import annotations

import numpy as np
import pytest

from onnxport.errors import CapacityError, OptionError, ProviderError
from onnxport.kv.pool import BlockPool
from onnxport.kv.states import StatePool, StateStep
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving import sampling
from onnxport.serving.batch import BatchPacker
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.fallback import describe
from onnxport.serving.linear_attention import rows_for, slots_wanted
from onnxport.serving.params import SamplingParams
from onnxport.serving.pooling import Embedder
from onnxport.serving.step_plan import StepPlan
from tests.serving.bench import Bench, name_of
from tests.serving.helpers import (
    GREEDY,
    alone,
    checked_step,
    null_engine,
    null_model,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.pooling import LAST, MEAN, embed

PROMPT = list(range(1, 23))


class StateBench(Bench):
    """A bench whose sequences have states; notes the slots of the last step."""

    @property
    def pool_of_states(self) -> StatePool:
        assert self.states is not None
        return self.states

    def slots(self) -> list[tuple[str, int, int]]:
        """Step; returns what each row read and wrote."""
        plan = self.scheduler.plan()
        reservation = self.scheduler.reserve(plan)
        ends = [plan.requests[row] for row in plan.sampled]
        ends += [one for request in ends for one in request.siblings]
        self.scheduler.commit(plan, reservation)
        for one in ends:
            one.tokens.append(7)
        self.scheduler.check()
        assert reservation.states is not None
        return _rows(plan, reservation.states)


def _rows(plan: StepPlan, states: StateStep) -> list[tuple[str, int, int]]:
    return [
        (name_of(one), read, write)
        for one, read, write in zip(plan.requests, states.reads, states.writes, strict=True)
    ]


def bench(rows: int = 4, num_blocks: int = 40, budget: int = 16) -> StateBench:
    return StateBench(num_blocks, rows=rows, budget=budget, states=StatePool(2 * rows))


# The scheduler.


def test_each_step_writes_the_slot_that_the_next_one_reads() -> None:
    states = bench()
    states.submit("a", 20)
    states.submit("b", 3)
    assert states.slots() == [("a", 0, 1)]  # 16 tokens of it
    assert states.slots() == [("a", 1, 2), ("b", 0, 3)]
    assert states.slots() == [("a", 2, 1), ("b", 3, 4)]
    assert states.slots() == [("a", 1, 3), ("b", 4, 2)]
    states.finish("a")
    assert states.slots() == [("b", 2, 3)]
    states.finish("b")
    assert states.requests["b"].state == 0


def test_a_step_that_fails_leaves_the_slots_where_they_were() -> None:
    states = bench()
    states.submit("a", 3)
    states.slots()
    states.submit("b", 3)
    states.fail()
    states.fail()
    assert [one.state for one in states.requests.values()] == [1, 0]
    assert states.slots() == [("a", 1, 2), ("b", 0, 3)]


def test_completions_go_on_from_one_slot() -> None:
    states = bench()
    states.submit("a", 3, n=3)
    assert states.slots() == [("a", 0, 1)]
    assert [one.state for one in states.requests.values()] == [1, 1, 1]
    assert states.slots() == [("a", 1, 2), ("a1", 1, 3), ("a2", 1, 4)]
    states.finish("a1")
    assert states.slots() == [("a", 2, 3), ("a2", 4, 1)]


def test_who_yields_begins_again_without_a_state() -> None:
    states = bench(num_blocks=4)
    states.submit("a", 8)
    states.submit("b", 7)
    while not states.scheduler.num_preemptions:
        states.slots()
    assert states.requests["b"].state == 0
    states.finish("a")
    assert states.slots()[0][:2] == ("b", 0)


def test_another_model_begins_with_empty_slots() -> None:
    states = bench()
    states.submit("a", 3)
    states.slots()
    [yielded] = states.scheduler.move_to(states.pool, 1, 8, StatePool(2))
    assert (yielded.state, yielded.running) == (0, False)
    assert states.slots() == [("a", 0, 1)]


def caching(rows: int = 4, extra: int = 0) -> StateBench:
    return StateBench(60, rows=rows, budget=16, states=StatePool(2 * rows + extra))


def test_a_prompt_stops_where_its_state_is_kept() -> None:
    states = caching()
    states.submit("a", range(14), cached=True)
    assert states.slots() == [("a", 0, 1)]
    assert states.requests["a"].num_computed_tokens == 12
    assert states.slots() == [("a", 1, 2)]
    states.submit("b", [*range(14), 50], cached=True)
    assert states.slots() == [("a", 2, 3), ("b", 1, 4)]  # which a has let go of
    states.submit("c", range(12), cached=True)
    assert states.slots()[2] == ("c", 0, 6)
    assert states.requests["c"].num_computed_tokens == 8  # and not 11: one is left to compute


def test_a_prompt_of_several_chunks_stops_once() -> None:
    states = caching()
    states.submit("a", range(39), cached=True)
    past = []
    while len(states.requests["a"].tokens) == 39:
        states.slots()
        past.append(states.requests["a"].num_computed_tokens)
    assert past == [16, 32, 36, 39]


def test_a_request_starts_from_the_longest_state_that_is_there() -> None:
    states = caching()
    states.submit("a", range(40), cached=True)
    states.submit("b", range(40), cached=True)
    assert states.slots() == [("a", 0, 1)]
    assert states.slots() == [("a", 1, 2)]
    assert states.slots() == [("a", 2, 1), ("b", 2, 3)]  # it had to wait for tokens of a step
    assert states.requests["b"].num_computed_tokens == 36
    assert states.slots() == [("a", 1, 2), ("b", 3, 4)]


def test_who_runs_goes_on_from_a_state_of_its_own() -> None:
    states = caching()
    states.submit("a", range(40), cached=True)
    states.slots()
    own = states.requests["a"].state
    states.submit("b", range(40), cached=True)
    states.step(only=["b"])
    states.step(only=["b"])
    assert [one.num_computed_tokens for one in states.requests.values()] == [16, 36]
    assert states.slots()[0] == ("a", own, 2)  # and K/V that are there are computed again
    assert states.requests["a"].num_computed_tokens == 32


def test_states_of_an_answer_go_before_those_of_prompts_while_it_grows() -> None:
    states = StateBench(60, rows=1, budget=16, states=StatePool(3))
    states.submit("a", range(9), cached=True)
    states.slots()
    keys = states.requests["a"].keys
    assert keys is not None
    for _ in range(20):
        states.slots()
        assert states.pool_of_states.find(keys.key(1)) == 1


def test_of_the_states_of_an_answer_the_latest_is_kept_longest() -> None:
    states = caching()
    states.submit("a", range(9), cached=True)
    while len(states.requests["a"].tokens) < 31:
        states.slots()
    keys = states.requests["a"].keys
    assert keys is not None
    pool = states.pool_of_states
    found = [one for one in range(len(keys)) if pool.find(keys.key(one)) is not None]
    assert found == [1, 6]  # of 8 tokens, and of 28
    states.finish("a")
    assert pool.free_slots()[-2:] == (pool.find(keys.key(1)), pool.find(keys.key(6)))


def test_a_state_where_one_stops_outlives_that_of_another_on_its_way() -> None:
    states = caching()
    states.submit("x", range(100, 108))
    states.submit("a", range(18), cached=True)
    states.slots()
    states.submit("y", range(200, 208))
    states.submit("b", range(60), cached=True)
    states.step(only=["y", "b"])
    lengths = {name: one.num_computed_tokens for name, one in states.requests.items()}
    assert lengths == {"x": 8, "a": 8, "y": 8, "b": 16}
    pool, keys = states.pool_of_states, states.requests["a"].keys
    assert keys is not None
    assert pool.find(keys.key(3)) == states.requests["b"].state
    states.step(only=["a"])
    for _ in range(4):
        states.step(only=["b"])
    assert pool.find(keys.key(3)) is not None
    assert states.requests["b"].num_computed_tokens == 60


@pytest.mark.parametrize("ends", ["a", "b"])
def test_a_state_where_one_has_ended_stays_when_its_like_goes_on(ends: str) -> None:
    states = caching()
    states.submit("a", range(6), cached=True)
    states.submit("b", range(6), cached=True)
    requests = states.requests.values()
    while min(request.num_computed_tokens for request in requests) < 12:
        due = [name for name, one in states.requests.items() if one.num_computed_tokens < 12]
        states.step(only=due)
    keys = states.requests["a"].keys
    assert keys is not None
    states.finish(ends)
    for _ in range(8):
        states.slots()
    other = states.requests["b" if ends == "a" else "a"]
    assert other.num_computed_tokens == 20
    assert states.pool_of_states.find(keys.key(2)) is not None


def test_states_on_the_way_through_a_prompt_are_replaced() -> None:
    states = caching()
    states.submit("a", range(60), cached=True)
    pool, keys = states.pool_of_states, states.requests["a"].keys
    assert keys is not None
    found = []
    for _ in range(5):
        states.slots()
        found.append([one for one in range(len(keys)) if pool.find(keys.key(one)) is not None])
    assert found == [[3], [7], [11], [13], [13, 14]]  # 56 is its stop, and 60 its end
    states.finish("a")
    assert pool.free_slots()[-2:] == (pool.find(keys.key(13)), pool.find(keys.key(14)))


# The packer.


def test_slots_are_packed_row_by_row_in_the_same_arrays() -> None:
    states = bench()
    packer = BatchPacker(4, 16)
    states.submit("a", 3)
    states.submit("b", 4)

    def step() -> StepInputs:
        plan = states.scheduler.plan()
        reservation = states.scheduler.reserve(plan)
        inputs = packer.pack(plan, states=reservation.states)
        states.scheduler.commit(plan, reservation)
        for one in plan.requests:
            one.tokens.append(7)
        return inputs

    step()
    first = step()
    assert first.state_reads is not None
    assert first.state_reads.dtype == np.int32
    assert first.state_reads.tolist() == [1, 2]
    assert first.state_writes is not None
    assert first.state_writes.tolist() == [3, 4]
    second = step()
    assert second is first  # what is bound finds the next step's numbers in it
    assert first.state_reads.tolist() == [3, 4]
    assert first.state_writes.tolist() == [2, 1]


# The engine.


def test_tokens_depend_on_states() -> None:
    assert alone(PROMPT) != alone(PROMPT, has_states=True)


@pytest.mark.parametrize("max_num_batched_tokens", [8, 9, 64])
def test_batched_and_chunked_tokens_are_those_of_each_alone(max_num_batched_tokens: int) -> None:
    engine = null_engine(state_slots=16, max_num_batched_tokens=max_num_batched_tokens)
    prompts = {str(length): PROMPT[:length] for length in (1, 2, 5, 9, 22)}
    for name, prompt in prompts.items():
        submit(engine, name, prompt)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == alone(prompt, has_states=True)


def computed(engine: Engine, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> int:
    """Run a request, whose tokens must be its own; returns how many tokens it found."""
    before = engine.stats().prefix_cache_hits
    submit(engine, name, prompt, params)
    assert tokens(run(engine)[name]) == alone(prompt, params, has_states=True)
    return engine.stats().prefix_cache_hits - before


def blank(engine: Engine) -> int:
    """How many slots hold nothing of use."""
    assert engine._runtime.states is not None
    return len(engine._runtime.states.blank_slots())


def test_a_prompt_is_found_up_to_its_last_whole_block() -> None:
    engine = null_engine(state_slots=16)
    assert computed(engine, "a", PROMPT) == 0
    assert computed(engine, "b", PROMPT) == 20
    assert computed(engine, "c", PROMPT[:20]) == 0  # K/V of 16 tokens, and no state behind them
    assert computed(engine, "d", PROMPT[:20]) == 16
    assert computed(engine, "e", [*PROMPT, 50, 51]) == 20
    engine.reset_prefix_cache()
    assert blank(engine) == 16
    assert computed(engine, "f", PROMPT) == 0


def test_where_two_have_parted_a_third_goes_on() -> None:
    engine = null_engine(state_slots=16)
    for name, tail, found in (("a", 60, 0), ("b", 70, 0), ("c", 80, 12)):
        prompt = [*PROMPT[:13], *range(tail, tail + 9)]
        assert computed(engine, name, prompt) == found


def test_a_next_turn_goes_on_from_the_answer() -> None:
    engine = null_engine(state_slots=16)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompt = PROMPT[:6]
    assert computed(engine, "a", prompt, params) == 0
    answer = alone(prompt, params, has_states=True)
    assert computed(engine, "b", [*prompt, *answer, 3, 4], params) == 16  # the last is not computed


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    engine = null_engine(state_slots=16, enable_prefix_caching=False)
    for name in "ab":
        assert computed(engine, name, PROMPT) == 0
    assert blank(engine) == 16


def test_who_does_not_read_the_cache_finds_no_state() -> None:
    engine = null_engine(state_slots=16)
    params = SamplingParams(temperature=0.0, max_tokens=5, skip_reading_prefix_cache=True)
    for name in "ab":
        assert computed(engine, name, PROMPT, params) == 0


def test_requests_with_other_salts_share_no_state() -> None:
    engine = null_engine(state_slots=16)
    for name, salt, found in (("a", "x", 0), ("b", "y", 0), ("c", "x", 20)):
        before = engine.stats().prefix_cache_hits
        submit(engine, name, PROMPT, cache_salt=salt)
        run(engine)
        assert engine.stats().prefix_cache_hits - before == found


def test_what_failed_while_it_was_sampled_is_not_gone_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = null_engine(state_slots=16)

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("sampling")

    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sample_positions", fail)
        submit(engine, "a", PROMPT, sampled)
        assert reasons(run(engine)["a"]) == ["error"]
    assert blank(engine) == 16
    assert computed(engine, "b", PROMPT) == 0


def test_requests_that_yield_are_computed_again() -> None:
    engine = null_engine(state_slots=16, num_blocks=12)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for number in range(4):
        submit(engine, str(number), PROMPT[number : number + 9], params)
    deltas = run(engine)
    assert engine.stats().num_preemptions > 0
    for number in range(4):
        expected = alone(PROMPT[number : number + 9], params, has_states=True)
        assert tokens(deltas[str(number)]) == expected


def test_a_step_that_fails_is_tried_again_from_the_same_states() -> None:
    engine = null_engine(state_slots=16, fails=lambda number: number % 3 == 2)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    for name in "abcd":
        submit(engine, name, [ord(name), *PROMPT[:7]], params)
    deltas = run(engine)
    assert engine.stats().num_failed_steps > 2
    ended = [name for name in "abcd" if reasons(deltas[name]) == ["length"]]
    assert ended
    for name in "abcd":
        expected = alone([ord(name), *PROMPT[:7]], params, has_states=True)
        found = tokens(deltas[name])
        assert found == expected[: len(found)]
        assert len(found) == 9 or name not in ended


@pytest.mark.parametrize("params", [{"n": 3}, {"n": 2, "best_of": 4}, {"n": 3, "beams": True}])
def test_completions_of_one_prompt_part_from_one_state(params: dict[str, int]) -> None:
    chosen = dict(params)
    beams = bool(chosen.pop("beams", 0))
    sampled = {} if beams else {"seed": 5, "temperature": 1.0}
    asked = SamplingParams(max_tokens=6, use_beam_search=beams, **chosen, **sampled)  # type: ignore[arg-type]
    engine = null_engine(state_slots=16)
    submit(engine, "a", PROMPT, asked)
    submit(engine, "b", PROMPT[:3], GREEDY)
    deltas = run(engine)
    assert tokens(deltas["b"]) == alone(PROMPT[:3], has_states=True)
    for index in range(asked.num_sequences):
        assert tokens(deltas["a"], index) == alone(PROMPT, asked, index, has_states=True)


def test_a_request_that_is_aborted_gives_its_slot_back() -> None:
    engine = null_engine(state_slots=4, max_num_seqs=2)
    for name in "abc":
        submit(engine, name, PROMPT)
    checked_step(engine)
    engine.abort("a")
    engine.check()
    deltas = run(engine)
    assert tokens(deltas["b"]) == tokens(deltas["c"]) == alone(PROMPT, has_states=True)
    assert engine._runtime.states is not None
    assert engine._runtime.states.num_free == 4


def test_fewer_slots_let_fewer_sequences_run(caplog: pytest.LogCaptureFixture) -> None:
    engine = null_engine(state_slots=5, max_num_seqs=4)
    words = "there is room for 5 states, so 2 sequences run at once, not 4: each needs 2, and 1 are"
    assert words in caplog.text
    for number in range(4):
        submit(engine, str(number), PROMPT)
    checked_step(engine)
    checked_step(engine)
    assert engine._scheduler.num_running == 2
    assert all(reasons(deltas) == ["length"] for deltas in run(engine).values())


@pytest.mark.parametrize(
    ("slots", "rows", "keeps", "expected"),
    [
        (3, 4, True, 1),
        (4, 4, True, 1),
        (4, 4, False, 2),
        (6, 4, True, 2),
        (8, 4, False, 4),
        (8, 4, True, 3),
        (9, 4, True, 3),
        (10, 4, True, 4),
        (2, 4, True, 1),
        (40, 64, True, 16),
        (40, 64, False, 20),
        (135, 64, True, 63),
        (136, 64, True, 64),
        (999, 64, True, 64),
    ],
)
def test_kept_states_have_slots_of_their_own(
    slots: int, rows: int, keeps: bool, expected: int
) -> None:
    assert rows_for(StatePool(slots), rows, keeps=keeps) == expected
    assert rows_for(None, rows, keeps=keeps) == rows


@pytest.mark.parametrize("caches", [True, False])
def test_states_are_kept_while_as_many_run_as_may(
    caches: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = null_engine(state_slots=8, max_num_seqs=4, enable_prefix_caching=caches)
    assert ("so 3 sequences run at once, not 4" in caplog.text) == caches
    submit(engine, "first", PROMPT)
    run(engine)
    for number in range(4):
        submit(engine, str(number), [90 + number], SamplingParams(max_tokens=3, ignore_eos=True))
    run(engine)
    assert computed(engine, "again", PROMPT) == (20 if caches else 0)


def test_what_is_computed_again_is_found_as_long_as_somebody_has_it() -> None:
    """The second computes the beginning anew, for no state is there, and answers at length."""
    engine = null_engine(
        num_blocks=64, max_num_batched_tokens=64, max_num_seqs=4, state_slots=16, max_model_len=400
    )
    beginning = list(range(100, 140))
    found = []
    for number, length in enumerate([2, 190, 2, 2]):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        prompt = [*beginning, *range(10 * number, 10 * number + 9)]
        found.append(computed(engine, str(number), prompt, params))
    assert found == [0, 0, 40, 40]


@pytest.mark.parametrize(("embedder", "kept"), [(LAST, 1), (MEAN, 0)])
def test_a_prompt_that_reads_nothing_stops_for_no_state(embedder: Embedder, kept: int) -> None:
    engine = null_engine(
        state_slots=16, max_num_batched_tokens=64, embedder=embedder, final_features=8
    )
    for name in "ab":
        embed(engine, name, PROMPT)
        before = engine.stats().num_steps
        run(engine)
        assert engine.stats().num_steps - before == 1 + (name == "a") * kept
    assert blank(engine) == 16 - kept


def test_a_text_that_reads_nothing_leaves_its_state_to_others() -> None:
    engine = null_engine(state_slots=16)
    params = SamplingParams(temperature=0.0, max_tokens=5, skip_reading_prefix_cache=True)
    assert computed(engine, "a", PROMPT, params) == 0
    assert computed(engine, "b", PROMPT) == 20


def test_as_many_slots_as_were_asked_for_limit_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(max_num_seqs=3)
    Engine(NullModel(NullOptions(state_slots=slots_wanted(config))), config=config).close()
    assert "at once" not in caplog.text


def test_what_takes_over_has_states_of_its_own() -> None:
    small = NullModel(NullOptions(block_size=8, state_slots=3))
    engine = null_engine(state_slots=16, lost_at=lambda number: number == 4, fallbacks=[small])
    for number in range(3):
        submit(engine, str(number), PROMPT[number:])
    deltas = run(engine)
    assert null_model(engine) is small
    for number in range(3):
        assert tokens(deltas[str(number)]) == alone(PROMPT[number:], has_states=True)


def test_what_was_kept_is_forgotten_when_another_model_takes_over() -> None:
    """A slot of the same number, under the same key, is another request's there."""
    states = bench()
    states.submit("a", 3, cached=True)
    states.submit("b", [4, 5, 6], cached=True, n=2)
    for _ in range(2):
        states.slots()
    requests = states.requests.values()
    assert [request.kept is not None for request in requests] == [True, True, True]
    states.scheduler.move_to(BlockPool(40, 4), 4, 16, StatePool(8))
    assert all(request.kept is None for request in requests)
    states.scheduler.check()


def test_what_has_no_room_for_a_sequence_does_not_take_over() -> None:
    small = NullModel(NullOptions(state_slots=1))
    engine = null_engine(state_slots=16, lost_at=lambda number: number == 2, fallbacks=[small])
    submit(engine, "a", PROMPT)
    assert reasons(run(engine)["a"]) == ["error"]
    assert engine.failure is not None
    assert "there is room for 1 states of sequences, and one sequence needs 2" in engine.failure
    assert small.closed


# What does not go with states.


def test_a_model_without_room_for_a_sequence_is_refused() -> None:
    with pytest.raises(CapacityError, match="room for 1 states"):
        null_engine(state_slots=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_host_memory": 1 << 20}, r": kv_host_memory \(K/V are of no use"),
        ({"kv_disk": "blocks"}, r": kv_disk \(K/V"),
        ({"kv_host_memory": 1 << 20, "kv_disk": "blocks"}, "kv_host_memory and kv_disk"),
    ],
)
def test_options_that_do_not_go_with_states_are_refused(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(OptionError, match=f"this model has layers that keep a state.*{words}"):
        null_engine(state_slots=16, **options)  # type: ignore[arg-type]


def test_a_log_tells_how_many_states_there_are() -> None:
    assert "room for 6 states of sequences, 0.0 MiB each" in describe(
        NullModel(NullOptions(state_slots=6)).capabilities
    )
    assert "states" not in describe(NullModel().capabilities)


# What the null model sees.


def stepped(model: NullModel, past: int, read: int, write: int) -> None:
    total = past + 2
    model.run(
        StepInputs(
            input_ids=np.array([1, 2]),
            block_table=np.array([[0]], np.int32),
            cumulative_sequence_lengths=np.array([0, 2], np.int32),
            past_sequence_lengths=np.array([past], np.int32),
            attention_metadata=np.array([2, total, total], np.int32),
            logits_indices=np.array([1], np.int32),
            state_reads=np.array([read], np.int32),
            state_writes=np.array([write], np.int32),
        )
    )


@pytest.mark.parametrize(
    ("past", "read", "write", "words"),
    [
        (2, 2, 3, "slot 2 is the state of what is undefined"),
        (1, 1, 2, "goes on after 1 tokens, and slot 1 is the state of 2"),
        (2, 1, 1, "reads what one writes"),
        (2, 1, 0, r"\[0\]"),
        (2, 1, 4, r"\[4\]"),
        (2, 0, 2, "read slot 0"),
        (0, 1, 2, "read slot 0"),
    ],
)
def test_the_null_model_sees_slots_that_are_wrong(
    past: int, read: int, write: int, words: str
) -> None:
    model = NullModel(NullOptions(state_slots=3))
    stepped(model, 0, 0, 1)
    with pytest.raises(AssertionError, match=words):
        stepped(model, past, read, write)


def test_a_step_that_fails_leaves_what_it_wrote_undefined_and_no_more() -> None:
    model = NullModel(NullOptions(state_slots=3, fails=lambda number: number == 1))
    stepped(model, 0, 0, 1)
    with pytest.raises(ProviderError, match="told to fail"):
        stepped(model, 2, 1, 2)
    stepped(model, 2, 1, 3)
    with pytest.raises(AssertionError, match="slot 2 is the state of what is undefined"):
        stepped(model, 4, 2, 1)
