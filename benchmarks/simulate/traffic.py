"""Arrival traces: who asks what, and when. Seeded; nothing is made before it is needed.

Lengths are in tokens. What a conversation asks next does not depend on how it was served, only
when it asks does: a client reads the answer before it goes on.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from benchmarks.simulate.model import ANSWER


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens with a long tail: lognormal, clipped."""

    median: int
    sigma: float  # of the logarithm; 0: always the median
    low: int = 1
    high: int = 4096

    def draw(self, random: Random) -> int:
        """A number."""
        value = self.median * math.exp(self.sigma * random.gauss(0.0, 1.0))
        return min(self.high, max(self.low, round(value)))


@dataclass(slots=True, eq=False)
class Job:
    """One request as its client sees it."""

    name: str
    stream: Stream
    arrival_s: float  # of the first try
    prompt: array[int]
    output_tokens: int
    seed: int  # of what the conversation goes on with
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """The traffic of one tenant."""

    rate_s: float  # conversations that begin in a second, while the tenant is active
    prompt: Lengths
    output: Lengths
    tenant: str = "all"
    priority: int = 0
    on_s: float = 0.0  # mean length of a burst; 0: always active
    off_s: float = 0.0  # mean pause between bursts
    num_system_prompts: int = 0  # of which number k is chosen with a weight of 1 / k (Zipf)
    system_tokens: int = 0
    continues: float = 0.0  # chance that an answer is followed by another turn
    branches: float = 0.0  # chance that a second turn follows from the same answer
    think_s: float = 20.0  # mean time between an answer and the next turn
    patience: int = 8  # tries before a refused client gives up

    def jobs(self, seed: int) -> Iterator[Job]:
        """First turns in the order of their arrival, without end."""
        random = Random(f"{seed}/{self.tenant}")
        systems = [random.randbytes(self.system_tokens) for _ in range(self.num_system_prompts)]
        weights = list(accumulate(1 / k for k in range(1, self.num_system_prompts + 1)))
        for number, arrival_s in enumerate(self._arrivals(random)):
            content = b""
            if systems:
                [content] = random.choices(systems, cum_weights=weights)
            content += random.randbytes(self.prompt.draw(random))
            yield Job(
                f"{self.tenant}-{number}",
                self,
                arrival_s,
                array("q", list(content)),
                self.output.draw(random),
                random.getrandbits(64),
            )

    def _arrivals(self, random: Random) -> Iterator[float]:
        now = 0.0
        end = random.expovariate(1 / self.on_s) if self.on_s else math.inf
        while True:
            now += random.expovariate(self.rate_s)
            while now > end:
                pause = random.expovariate(1 / self.off_s)
                now += pause
                end += pause + random.expovariate(1 / self.on_s)
            yield now


def next_turns(job: Job, end_s: float, longest: int) -> Iterator[Job]:
    """What follows an answer: no, one or two turns that go on from it.

    Args:
        job: the turn that was answered.
        end_s: when.
        longest: a conversation of more tokens ends here.
    """
    stream, random = job.stream, Random(job.seed)
    if random.random() >= stream.continues:
        return
    for child in range(1 + (random.random() < stream.branches)):
        message = random.randbytes(stream.prompt.draw(random))
        output = stream.output.draw(random)
        seed = random.getrandbits(64)
        wait_s = random.expovariate(1 / stream.think_s)
        prompt = job.prompt + array("q", [ANSWER]) * job.output_tokens + array("q", list(message))
        if len(prompt) + output <= longest:
            yield Job(f"{job.name}.{child}", stream, end_s + wait_s, prompt, output, seed)
