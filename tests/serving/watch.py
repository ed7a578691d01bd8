"""A listener that checks every event against the life that a sequence may have."""

from __future__ import annotations

from collections import Counter

from onnxport.serving.engine import Engine
from onnxport.serving.events import RequestEvent, StepRecord

# What may follow. A sequence whose sampling fails goes from "scheduled" to "finished".
FOLLOWS = {
    "queued": {"scheduled", "finished"},
    "scheduled": {"first_token", "preempted", "finished"},
    "first_token": {"preempted", "finished"},
    "preempted": {"scheduled", "finished"},
    "finished": set(),
}


class Watch:
    """Counts tokens and events; asserts the order of events and of their times."""

    def __init__(self, engine: Engine) -> None:
        self.num_tokens = 0
        self.num_sampled = 0
        self.steps: list[StepRecord] = []
        self.events: dict[tuple[str, int], list[RequestEvent]] = {}
        self.finished: Counter[str] = Counter()
        self._time_s = 0.0
        engine.add_listener(self)

    def on_request(self, event: RequestEvent) -> None:
        events = self.events.setdefault((event.request_id, event.index), [])
        if events:
            assert event.kind in FOLLOWS[events[-1].kind], f"{events[-1]} and then {event}"
        elif event.index == 0:
            assert event.kind == "queued"
        else:  # "finished" if the prompt, which sequence 0 computes, was never done
            assert event.kind in ("scheduled", "finished")
        if event.kind == "first_token":
            assert not any(one.kind == "first_token" for one in events)
        assert not events or event.time_s >= events[-1].time_s
        assert (event.finished is not None) == (event.kind == "finished")
        events.append(event)
        if event.finished is not None:
            self._check_end(events)

    def on_step(self, record: StepRecord) -> None:
        assert self._time_s <= record.start_s <= record.end_s
        self._time_s = record.end_s
        assert 1 <= record.num_rows <= record.num_tokens
        assert all(gap >= 0 for gap in record.inter_token_s)
        self.num_tokens += record.num_tokens
        self.num_sampled += record.num_sampled
        self.steps.append(record)

    def kinds(self, request_id: str, index: int = 0) -> list[str]:
        return [event.kind for event in self.events.get((request_id, index), [])]

    def check_all_ended(self) -> None:
        for events in self.events.values():
            assert events[-1].kind == "finished"

    def _check_end(self, events: list[RequestEvent]) -> None:
        last = events[-1]
        record = last.finished
        assert record is not None
        self.finished[record.reason] += 1
        metrics = record.metrics
        times = {event.kind: event.time_s for event in reversed(events)}  # the first of its kind
        assert metrics.finished_time_s == last.time_s
        assert metrics.first_token_time_s == times.get("first_token")
        assert metrics.scheduled_time_s == times.get("scheduled")
        if "queued" in times:
            assert metrics.arrival_time_s == times["queued"]
        assert record.num_preemptions == sum(event.kind == "preempted" for event in events)
        assert (record.num_output_tokens > 0) == ("first_token" in times)
        assert 0 <= record.num_cached_tokens < record.num_prompt_tokens
