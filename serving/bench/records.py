"""What happened to each request of a load, and the figures that sum it up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from onnxport.errors import RequestError

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request; times are in seconds since the load began.

    Attributes:
        arrival_s: when it was due.
        sent_s: when it was sent; later where `max_concurrency` or the client itself held it up.
        output_s: when each part of the output came. A part is what one step or one chunk brought,
            which may be several tokens.
        finished_s: when it ended, well or not.
        num_prompt_tokens: as the engine or the server counts them; 0 if it failed before that.
        num_output_tokens: likewise, and not the number of parts.
        num_cached_tokens: of the prompt, those that the server says it had cached.
        error: why it failed; None if it did not.
    """

    arrival_s: float
    sent_s: float
    output_s: tuple[float, ...]
    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def delay_s(self) -> float:
        """From when it was due to when it was sent."""
        return self.sent_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None where nothing came."""
        return self.output_s[0] - self.sent_s if self.output_s else None

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.finished_s - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between parts of the output."""
        return [after - before for before, after in pairwise(self.output_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is but one."""
        if not self.output_s or self.num_output_tokens < 2:
            return None
        return (self.output_s[-1] - self.output_s[0]) / (self.num_output_tokens - 1)


def shifted(record: RequestRecord, by_s: float) -> RequestRecord:
    """Return a record as if all of it had happened later."""
    return replace(
        record,
        arrival_s=record.arrival_s + by_s,
        sent_s=record.sent_s + by_s,
        output_s=tuple(time_s + by_s for time_s in record.output_s),
        finished_s=record.finished_s + by_s,
    )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of any number of values above 0, in their own unit."""

    count: int
    mean: float
    std: float  # of the whole population
    min: float
    median: float
    max: float
    percentiles: Mapping[str, float]  # p50, p90, …; see `percentile`

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Sum up values; None of none."""
        ordered = sorted(values)
        if not ordered:
            return None
        mean = math.fsum(ordered) / len(ordered)
        variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
        return cls(
            count=len(ordered),
            mean=mean,
            std=math.sqrt(variance),
            min=ordered[0],
            median=percentile(ordered, 50),
            max=ordered[-1],
            percentiles={f"p{share}": percentile(ordered, share) for share in PERCENTILES},
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` percent of `ordered`, ascending and not empty, do not exceed.

    Between two values it is interpolated, as NumPy's `percentile` does.
    """
    place = (len(ordered) - 1) * share / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Goals:
    """What a request has to keep to count as good, in seconds; None: no matter.

    Attributes:
        ttft_s: most time to its first token.
        itl_s: longest gap in its output.
        tpot_s: most time per output token after the first.
        e2e_s: most time in all.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Goals:
        """Read `ttft:500`, `itl:50` and so on; numbers are milliseconds.

        Raises:
            RequestError: it is none of the four, is given twice, or is not above 0.
        """
        found: dict[str, float] = {}
        for text in texts:
            name, _, number = text.partition(":")
            try:
                value = float(number) / 1000
            except ValueError:
                value = math.nan
            key = f"{name}_s"
            if key not in cls.__slots__ or not 0 < value < math.inf:
                raise RequestError(
                    f"a goal is {text!r}; it must be ttft, itl, tpot or e2e, a colon and "
                    "milliseconds above 0, as in ttft:500"
                )
            if key in found:
                raise RequestError(f"the goal {name} is given twice; give it once")
            found[key] = value
        return cls(**found)

    def met(self, record: RequestRecord) -> bool:
        """Whether a request ended well and kept them all.

        When the first token came is not known where all that could be seen came at the end.
        """
        if record.error is not None:
            return False
        is_unseen = record.ttft_s is None and record.num_output_tokens > 1
        if is_unseen and (self.ttft_s or self.itl_s or self.tpot_s):
            return False
        found = {
            "ttft_s": record.ttft_s,
            "itl_s": max(record.itl_s, default=None),
            "tpot_s": record.tpot_s,
            "e2e_s": record.e2e_s,
        }
        goals = ((getattr(self, name), value) for name, value in found.items())
        return all(goal is None or value is None or value <= goal for goal, value in goals)


@dataclass(frozen=True, slots=True)
class Summary:
    """A load. Tokens and latencies are of the requests that ended well; rates are per second."""

    num_requests: int
    num_completed: int
    num_failed: int
    errors: Mapping[str, int]  # message -> requests that failed with it
    duration_s: float  # from the first arrival to the last end
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    most_at_once: int  # requests that were under way
    num_good: int | None  # None without goals
    good_requests_per_s: float | None
    ttft_s: Distribution | None  # None where there is nothing to measure, here and below
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    delay_s: Distribution | None


def summarize(records: Sequence[RequestRecord], goals: Goals | None = None) -> Summary:
    """Sum up the records of one load, in any order; at least one."""
    good = [record for record in records if record.error is None]
    start = min(record.arrival_s for record in records)
    duration = max(max(record.finished_s for record in records) - start, 1e-9)
    output_tokens = sum(record.num_output_tokens for record in good)
    prompt_tokens = sum(record.num_prompt_tokens for record in good)
    num_good = sum(goals.met(record) for record in records) if goals else None
    return Summary(
        num_requests=len(records),
        num_completed=len(good),
        num_failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.num_cached_tokens for record in good),
        output_tokens=output_tokens,
        requests_per_s=len(good) / duration,
        prompt_tokens_per_s=prompt_tokens / duration,
        output_tokens_per_s=output_tokens / duration,
        most_at_once=_most_at_once(records),
        num_good=num_good,
        good_requests_per_s=None if num_good is None else num_good / duration,
        ttft_s=Distribution.of(record.ttft_s for record in good if record.ttft_s is not None),
        itl_s=Distribution.of(gap for record in good for gap in record.itl_s),
        tpot_s=Distribution.of(record.tpot_s for record in good if record.tpot_s is not None),
        e2e_s=Distribution.of(record.e2e_s for record in good),
        delay_s=Distribution.of(record.delay_s for record in records),
    )


def _most_at_once(records: Sequence[RequestRecord]) -> int:
    changes = [(record.sent_s, 1) for record in records]
    changes += [(record.finished_s, -1) for record in records]
    now = most = 0
    for _, change in sorted(changes):  # at the same time, ends come before beginnings
        now += change
        most = max(most, now)
    return most
