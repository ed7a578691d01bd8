"""How fast a loaded model prefills and decodes, through the engine; figures of this run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from onnxport.errors import ProviderError
from onnxport.kv.states import SLOTS_PER_SEQUENCE
from onnxport.kv.table import blocks_for
from onnxport.providers.base import Model
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.events import RequestEvent, StepRecord
from onnxport.serving.params import SamplingParams
from onnxport.serving.verify.decoding import LentModel, failed_steps
from onnxport.serving.verify.prompts import stream

PREFILL_TOKENS = 512
MOST_PREFILLS = 4
DECODE_ROWS = (1, 8)
DECODE_PROMPT_TOKENS = 16
DECODE_STEPS = 32
FEWEST_STEPS = 3  # however long they take: one prefills, one warms up
PART_S = 3.0  # of time that each of the three figures may take, beside what one step takes
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Decoding with a number of sequences at once."""

    rows: int
    tokens_per_s: float  # of all rows together, from the median step
    num_steps: int  # that were measured


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured, with the clock of this machine, in this run."""

    prefill_num_tokens: int  # of the prompt
    prefill_tokens_per_s: float  # the median of several
    num_prefills: int  # that were measured
    decode: tuple[DecodeSpeed, ...]  # those of DECODE_ROWS that fit the KV cache


class _Steps:
    """Notes what the engine did."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_request(self, event: RequestEvent) -> None:
        """Requests are of no interest here."""

    def on_step(self, record: StepRecord) -> None:
        """Note a step."""
        self.records.append(record)


def measure_speed(
    model: Model, token_ids: Sequence[int], clock: Clock = time.perf_counter
) -> Speed:
    """Measure prefill, and decode with 1 and 8 rows.

    Args:
        model: stays open.
        token_ids: the prompts are made from; see `prompts.stream`.
        clock: the time in seconds.

    Raises:
        ProviderError: the device failed, also where the engine got over it: a step that was tried
            again took longer than its record says.
    """
    limits = model.capabilities
    room = min(limits.max_model_len, limits.kv_tokens)
    length = max(1, min(PREFILL_TOKENS, room - 1))
    prompt = _prompt(token_ids, length, 0)
    times = _prefill_times(model, prompt, clock)
    used = times[1:] or times  # the first one warms up
    steps = [
        (rows, _decode_times(model, token_ids, rows, clock))
        for rows in DECODE_ROWS
        if _fits(model, rows)
    ]
    return Speed(
        prefill_num_tokens=length,
        prefill_tokens_per_s=length / median(used),
        num_prefills=len(used),
        decode=tuple(
            DecodeSpeed(rows, rows / median(taken), len(taken)) for rows, taken in steps if taken
        ),
    )


def _prefill_times(model: Model, prompt: list[int], clock: Clock) -> list[float]:
    """Seconds of each prefill of `prompt`; at least one."""
    times: list[float] = []
    end_s = clock() + PART_S
    while not times or (len(times) < MOST_PREFILLS and clock() < end_s):
        lent = LentModel(model)
        engine, steps = _engine(lent, 1, clock)
        _submit(engine, "prefill", prompt, 1)
        while engine.has_work:
            _step(engine)
        _check(engine, lent)
        times.append(sum(record.end_s - record.start_s for record in steps.records))
    return times


def _decode_times(model: Model, token_ids: Sequence[int], rows: int, clock: Clock) -> list[float]:
    """Seconds of each step in which all of `rows` sequences decode."""
    lent = LentModel(model)
    engine, steps = _engine(lent, rows, clock)
    for row in range(rows):
        _submit(engine, str(row), _prompt(token_ids, DECODE_PROMPT_TOKENS, row), DECODE_STEPS + 1)
    end_s = clock() + PART_S
    while engine.has_work and (clock() < end_s or len(steps.records) < FEWEST_STEPS):
        _step(engine)
    _check(engine, lent)
    decodes = [
        record.end_s - record.start_s
        for record in steps.records
        if record.num_rows == record.num_tokens == rows
    ]
    return decodes[1:] or decodes  # the first one warms up


def _fits(model: Model, rows: int) -> bool:
    """Whether `rows` sequences decode at once."""
    limits = model.capabilities
    length = DECODE_PROMPT_TOKENS + DECODE_STEPS
    needed = rows * blocks_for(length, limits.block_size) * len(limits.windows)
    return (
        length < limits.max_model_len
        and needed <= limits.num_blocks
        and rows <= (limits.max_batch_rows or rows)
        and (not limits.state_slots or rows <= limits.state_slots // SLOTS_PER_SEQUENCE)
    )


def _engine(model: LentModel, rows: int, clock: Clock) -> tuple[Engine, _Steps]:
    config = EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=PREFILL_TOKENS,
        enable_prefix_caching=False,
        preemption="recompute",
    )
    engine, steps = Engine(model, config=config, clock=clock), _Steps()
    engine.add_listener(steps)
    return engine, steps


def _submit(engine: Engine, name: str, prompt: list[int], num_new: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    engine.submit(engine.prepare(name, prompt, params))


def _step(engine: Engine) -> None:
    for delta in engine.step():
        if delta.finish_reason == "error":
            raise ProviderError(f"a request failed while it was timed: {delta.error}")


def _check(engine: Engine, model: LentModel) -> None:
    if failure := failed_steps(engine, model):
        raise ProviderError(f"while it was timed, {failure}")


def _prompt(token_ids: Sequence[int], length: int, number: int) -> list[int]:
    return [stream(token_ids, position, number) for position in range(length)]
