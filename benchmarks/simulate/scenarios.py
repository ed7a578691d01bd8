"""What is simulated: an engine's limits and the traffic that it gets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.simulate.traffic import Lengths, Stream
from onnxport.serving.config import EngineConfig, Preemption, SchedulingPolicy

NULL_TOKEN_BYTES = 16  # of K/V in the null model


@dataclass(frozen=True, slots=True)
class Scenario:
    """One engine and its traffic. The pool is 65,536 tokens: 1.6 GB for the 0.5B shape."""

    streams: tuple[Stream, ...]
    config: EngineConfig = field(default_factory=EngineConfig)
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 8192


CHAT = Lengths(median=40, sigma=0.8, low=4, high=1024)
ANSWER = Lengths(median=40, sigma=0.6, low=1, high=400)
DOCUMENT = Lengths(median=600, sigma=0.7, low=100, high=4096)


def mixed(rate_s: float, policy: SchedulingPolicy = "fcfs") -> Scenario:
    """Short questions, and one in ten requests a long document, of lower priority if there are."""
    low = 1 if policy == "priority" else 0
    return Scenario(
        (
            Stream(0.9 * rate_s, CHAT, ANSWER, tenant="chat"),
            Stream(0.1 * rate_s, DOCUMENT, ANSWER, tenant="documents", priority=low),
        ),
        EngineConfig(scheduling_policy=policy),
    )


def chat(rate_s: float = 0.45) -> Scenario:
    """Conversations of several turns that branch, and begin with one of 50 system prompts."""
    stream = Stream(
        rate_s,
        CHAT,
        ANSWER,
        num_system_prompts=50,
        system_tokens=300,
        continues=0.7,
        branches=0.1,
    )
    return Scenario((stream,))


def uncached(scenario: Scenario) -> Scenario:
    """The same without prefix caching."""
    return replace(scenario, config=replace(scenario.config, enable_prefix_caching=False))


def flood(policy: SchedulingPolicy, rate_s: float = 4.0) -> Scenario:
    """One tenant sends `rate_s` requests a second, more than can be served; three send few."""
    light = tuple(Stream(0.05, CHAT, ANSWER, tenant=f"light-{k}") for k in (1, 2, 3))
    heavy = Stream(rate_s, CHAT, ANSWER, tenant="flood", patience=2)
    return Scenario((*light, heavy), EngineConfig(scheduling_policy=policy))


def contention(policy: SchedulingPolicy) -> Scenario:
    """Four tenants that all want more than a quarter of what can be served, one much more."""
    rates = {"a": 4.0, "b": 1.5, "c": 1.5, "d": 1.5}
    streams = tuple(Stream(rate, CHAT, ANSWER, tenant=name) for name, rate in rates.items())
    return Scenario(streams, EngineConfig(scheduling_policy=policy))


def tight(preemption: Preemption) -> Scenario:
    """A pool for a quarter of what 64 rows need: requests yield all the time."""
    stream = Stream(1.2, CHAT, Lengths(median=120, sigma=0.6, low=8, high=800))
    memory = 0 if preemption == "recompute" else 20_000 * 16 * NULL_TOKEN_BYTES
    config = EngineConfig(preemption=preemption, kv_host_memory=memory)
    return Scenario((stream,), config, num_blocks=320, max_model_len=4096)


SCENARIOS = {
    "poisson": mixed(1.5),
    "bursts": Scenario((Stream(6.0, CHAT, ANSWER, on_s=60.0, off_s=240.0),)),
    "long-tail": Scenario(
        (
            Stream(
                0.75,
                Lengths(median=120, sigma=1.3, low=4, high=6000),
                Lengths(median=60, sigma=1.1, low=1, high=2000),
            ),
        )
    ),
    "chat": chat(),
    "priorities": mixed(1.5, "priority"),
    "flood-fcfs": flood("fcfs"),
    "flood-fair": flood("fair"),
    "contention-fcfs": contention("fcfs"),
    "contention-fair": contention("fair"),
    "tight-recompute": tight("recompute"),
    "tight-swap": tight("swap"),
}
