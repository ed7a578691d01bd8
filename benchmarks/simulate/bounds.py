"""The bounds that `serving/planner.py` states, measured: each function builds a worst case.

B is `max_num_batched_tokens`, R `max_num_seqs`, a quantum B / 4, all in tokens or rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.simulate.cost import CostModel, VirtualClock
from benchmarks.simulate.driver import make_engine
from benchmarks.simulate.scenarios import Scenario
from onnxport.serving.config import EngineConfig, SchedulingPolicy
from onnxport.serving.events import RequestEvent, StepRecord
from onnxport.serving.params import RequestOptions, SamplingParams

ENDLESS = 30_000  # output tokens of a request that decodes throughout
FLOOD_TOKENS = 5_000  # of a flood's prompt; the steps that bounds are measured in are far fewer
MAX_MODEL_LEN = 40_000
NUM_BLOCKS = 200_000


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen, and what may at most be; both in steps or both in seconds."""

    seen: float
    bound: float


class Lab:
    """An engine whose steps are counted. Its pool never runs out."""

    def __init__(
        self, rows: int, budget_tokens: int, policy: SchedulingPolicy = "fcfs", seed: int = 0
    ) -> None:
        config = EngineConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget_tokens,
            scheduling_policy=policy,
            max_queued_requests=10_000,
        )
        self.clock, self.cost = VirtualClock(), CostModel()
        scenario = Scenario((), config, NUM_BLOCKS, max_model_len=MAX_MODEL_LEN)
        self.engine = make_engine(scenario, self.clock, self.cost)
        self.engine.add_listener(self)
        self.records: list[StepRecord] = []
        self.scheduled: dict[str, int] = {}  # steps before the one that started a request
        self.first_token: dict[str, int] = {}  # likewise, its first token
        self.finished: set[str] = set()
        self._random = Random(seed)

    def submit(
        self, name: str, prompt: int | Sequence[int], output_tokens: int, tenant: str = ""
    ) -> None:
        """Send a request: its tokens, or how many random ones."""
        tokens = list(self._random.randbytes(prompt)) if isinstance(prompt, int) else prompt
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
        options = RequestOptions(tenant=tenant)
        self.engine.submit(self.engine.prepare(name, tokens, params, options))

    def decode(self, count: int, tenant: str = "") -> None:
        """Let `count` requests decode from now on."""
        names = [f"decode-{tenant}-{index}" for index in range(count)]
        for name in names:
            self.submit(name, 1, ENDLESS, tenant)
        while not all(name in self.first_token for name in names):
            self.engine.step()

    def steps_to_first_token(self, name: str) -> int:
        """Run until `name` has a token; returns in how many steps."""
        begin = len(self.records)
        while name not in self.first_token:
            self.engine.step()
        return len(self.records) - begin

    def on_request(self, event: RequestEvent) -> None:
        """Note in which step it was."""
        if event.kind == "scheduled":
            self.scheduled.setdefault(event.request_id, len(self.records))
        elif event.kind == "first_token":
            self.first_token[event.request_id] = len(self.records)
        elif event.kind == "finished":
            self.finished.add(event.request_id)

    def on_step(self, record: StepRecord) -> None:
        """Keep it."""
        self.records.append(record)


def prefill_under_decode(prompts: Sequence[int], rows: int, budget_tokens: int) -> Measured:
    """Steps in which the last of `prompts` is computed while all other rows decode.

    The prompts arrive together; those before the last are ahead of it.
    """
    lab = Lab(rows, budget_tokens)
    lab.decode(rows - len(prompts))
    for index, length in enumerate(prompts):
        lab.submit(f"prompt-{index}", length, ENDLESS)
    seen = lab.steps_to_first_token(f"prompt-{len(prompts) - 1}")
    lab.engine.close()
    return Measured(seen, math.ceil(sum(prompts) / (budget_tokens - rows + 1)))


def decode_under_prompts(
    length: int, rows: int, budget_tokens: int, steps: int = 60
) -> tuple[Measured, int, int]:
    """Half of the rows decode, and prompts of `length` tokens never cease to arrive.

    Returns:
        The longest time between two tokens, in seconds; the fewest tokens that the decoding half
        got in a step; the most tokens that a step computed.
    """
    lab = Lab(rows, budget_tokens)
    lab.decode(rows // 2)
    begin, sent = len(lab.records), 0
    for _ in range(steps):
        while lab.engine.num_queued < rows:
            lab.submit(f"prompt-{sent}", length, 1)
            sent += 1
        lab.engine.step()
    records = lab.records[begin:]
    longest_s = max(max(record.inter_token_s) for record in records)
    lab.engine.close()
    return (
        Measured(longest_s, lab.cost.most_seconds(budget_tokens, rows, length + steps)),
        min(len(record.inter_token_s) for record in records),
        max(record.num_tokens for record in records),
    )


def prompt_beside_tenants(
    length: int,
    policy: SchedulingPolicy,
    num_others: int = 1,
    rows: int = 60,
    budget_tokens: int = 64,
    warm_steps: int = 1,
) -> Measured:
    """Steps in which a tenant's prompt is computed beside others that compute long ones.

    All other rows decode, for somebody else. The bound is that of "fair".
    """
    lab = Lab(rows, budget_tokens, policy)
    lab.decode(rows - 1 - num_others, "decoding")
    for index in range(num_others):
        lab.submit(f"flood-{index}", FLOOD_TOKENS, 1, f"flood-{index}")
    for _ in range(warm_steps):
        lab.engine.step()
    lab.submit("light", length, 1, "light")
    seen = lab.steps_to_first_token("light")
    lab.engine.close()
    quantum = budget_tokens // 4
    ahead = num_others * quantum * math.ceil(length / quantum)
    return Measured(seen, math.ceil((ahead + length) / (budget_tokens - rows + 1)))


def starts_before(
    policy: SchedulingPolicy, rows: int, prompt_tokens: int, output_tokens: int
) -> int:
    """How many requests of a flooding tenant get a row while another tenant waits for its first.

    The flood has twice as many requests in the queue as there are rows, and sends on.
    """
    budget_tokens, sent = 512, 0
    lab = Lab(rows, budget_tokens, policy)
    for step in range(100 * output_tokens):
        while lab.engine.num_queued < 2 * rows:
            lab.submit(f"flood-{sent}", prompt_tokens, output_tokens, "flood")
            sent += 1
        if step == 2 * output_tokens:
            before = len(lab.scheduled)
            lab.submit("light", prompt_tokens, 1, "light")
        if "light" in lab.scheduled:
            break
        lab.engine.step()
    last = lab.scheduled.get("light", len(lab.records))
    lab.engine.close()
    return sum(step < last for step in lab.scheduled.values()) - before
