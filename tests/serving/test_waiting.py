"""The order in which requests wait."""

from array import array
from collections.abc import Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.waiting import (
    NO_BARS,
    PATIENCE_S,
    Bars,
    Place,
    WaitingQueue,
    by_arrival,
    by_deadline,
)


def make(
    arrival: int,
    *,
    priority: int = 0,
    tenant: str = "",
    timeout_s: float | None = None,
    adapter: int | None = None,
) -> Request:
    used = None
    if adapter is not None:
        used = Adapter(str(adapter), adapter, f"content {adapter}", 1, Path(), None)
    request = Request(
        str(arrival),
        array("q", [1]),
        SamplingParams(),
        max_total_tokens=10,
        options=RequestOptions(priority=priority, tenant=tenant, timeout_s=timeout_s),
        adapter=used,
    )
    request.rank = (priority, arrival, 0)
    request.tenant = tenant
    return request


def queue(*requests: Request) -> WaitingQueue:
    made = WaitingQueue()
    for request in requests:
        made.add(request)
    return made


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_arrivals_in_order_whenever_they_are_added() -> None:
    waiting = queue(make(2), make(0), make(1))  # 0 and 1 were preempted
    assert names(waiting) == ["0", "1", "2"]
    assert len(waiting) == 3
    assert waiting.levels == [0]


def test_who_has_to_end_sooner_goes_first() -> None:
    waiting = queue(make(0), make(1, timeout_s=9), make(2, timeout_s=5), make(3, timeout_s=9))
    assert names(waiting) == ["2", "1", "3", "0"]


def test_a_hurry_does_not_let_others_wait_for_ever() -> None:
    """Late deadlines count as little as none, and each request's time comes."""
    old, late = make(0), make(1, timeout_s=86_400)
    newer = make(2, timeout_s=86_400)
    newer.times.arrival_s = 1.0
    hasty = make(3, timeout_s=5)
    hasty.times.arrival_s = PATIENCE_S - 4
    hasty.deadline_s = hasty.times.arrival_s + 4
    assert names(queue(newer, hasty, late, old)) == ["0", "1", "3", "2"]


def test_by_arrival_no_deadline_counts() -> None:
    waiting = WaitingQueue(by_arrival)
    for request in (make(2, timeout_s=1), make(0), make(1, timeout_s=5)):
        waiting.add(request)
    assert names(waiting) == ["0", "1", "2"]


def test_priorities_come_before_deadlines_and_tenants() -> None:
    waiting = queue(
        make(0, priority=1, timeout_s=1),
        make(1, priority=-1, tenant="b"),
        make(2, priority=-1, tenant="a", timeout_s=3),
        make(3, priority=-1, tenant="b", timeout_s=4),
    )
    assert waiting.levels == [-1, 1]
    lanes = waiting.lanes(-1)
    assert {name: [one.request_id for one in lane] for name, lane in lanes.items()} == {
        "b": ["3", "1"],
        "a": ["2"],
    }
    assert waiting.lanes(0) == {}
    assert names(waiting) == ["3", "1", "2", "0"]


def test_what_is_taken_out_leaves_no_trace() -> None:
    requests = [make(0, priority=1), make(1, tenant="a"), make(2, tenant="a")]
    waiting = queue(*requests)
    assert requests[1] in waiting
    waiting.remove(requests[1])
    assert requests[1] not in waiting
    assert requests[2] in waiting
    waiting.remove(requests[2])
    assert waiting.levels == [1]
    waiting.remove(requests[0])
    assert (len(waiting), waiting.levels, list(waiting)) == (0, [], [])
    assert requests[0] not in waiting


@given(st.data())
def test_any_order_of_adding_and_removing(data: st.DataObject) -> None:
    waiting = WaitingQueue()
    inside: list[Request] = []
    for arrival in range(data.draw(st.integers(1, 25))):
        if inside and data.draw(st.booleans()):
            waiting.remove(inside.pop(data.draw(st.integers(0, len(inside) - 1))))
        request = make(
            arrival,
            priority=data.draw(st.integers(-1, 1)),
            tenant=data.draw(st.sampled_from("ab")),
            timeout_s=data.draw(st.sampled_from([None, 1.0, 2.0])),
            adapter=data.draw(st.sampled_from([None, 1, 2])),
        )
        waiting.add(request)
        inside.append(request)
        assert len(waiting) == len(inside)
        assert set(waiting) == set(inside)
        adapted = [one for one in inside if one.adapter is not None]
        assert list(waiting.adapted) == sorted(adapted, key=waiting.place)
        found = {one.adapter: one for one in sorted(adapted, key=waiting.place, reverse=True)}
        assert set(waiting.adapted.firsts()) == set(found.values())
        assert waiting.levels == sorted({one.rank[0] for one in inside})


def test_adapters_have_lines_of_their_own() -> None:
    waiting = queue(
        make(0, tenant="a", adapter=1),
        make(1, tenant="b", adapter=2),
        make(2, tenant="b"),
        make(3, tenant="b", adapter=1, timeout_s=5),
        make(4, tenant="a", adapter=1, priority=-1),
    )
    assert {number: names(waiting.adapted.of(number)) for number in (1, 2, 3)} == {
        1: ["4", "3", "0"],
        2: ["1"],
        3: [],
    }
    assert names(waiting.adapted) == ["4", "3", "0", "1"]
    assert names(waiting.adapted.firsts()) == ["4", "1"]
    first = waiting.adapted.first()
    assert names(waiting.adapted.firsts_behind(first)) == ["3", "1"]
    waiting.remove(first)
    assert names(waiting.adapted.firsts()) == ["3", "1"]
    waiting.add(first)
    assert names(waiting.adapted.firsts()) == ["4", "1"]
    assert names(waiting) == ["4", "0", "3", "1", "2"]  # tenant by tenant


def test_bars_leave_out_adapters_or_those_behind_a_place() -> None:
    first, *others = (make(number, adapter=number % 2) for number in range(6))
    waiting = queue(first, *others, make(6), make(7, priority=-1, adapter=0))
    assert names(waiting.startable(Bars({1: None}))) == ["1", "3", "5", "6"]
    place = waiting.place(others[1])  # of number 2
    assert names(waiting.startable(Bars({0: place, 1: place}))) == ["7", "0", "1", "2", "6"]
    assert names(waiting.startable(Bars({0: waiting.place(first)}))) == ["7", "0", "6"]
    assert names(waiting.startable(Bars({0: None, 1: None, 2: None}))) == names(waiting)
    assert names(waiting.startable(NO_BARS)) == names(waiting)
    assert names(waiting.startable(Bars({}))) == ["6"]


@given(st.data())
def test_what_may_start_is_what_is_not_barred(data: st.DataObject) -> None:
    draw = data.draw
    requests = [
        make(
            arrival,
            priority=draw(st.integers(-1, 1)),
            tenant=draw(st.sampled_from("ab")),
            timeout_s=draw(st.sampled_from([None, 1.0, 2.0])),
            adapter=draw(st.sampled_from([None, 1, 2, 3])),
        )
        for arrival in range(draw(st.integers(1, 20)))
    ]
    waiting = queue(*requests)
    places = st.sampled_from([None, *map(waiting.place, requests)])
    opened: dict[int, Place | None] = draw(st.dictionaries(st.sampled_from([1, 2, 3]), places))
    bars = draw(st.sampled_from([NO_BARS, Bars(opened)]))
    firsts = []
    for number in (1, 2, 3):
        own = [one for one in requests if one.adapter is not None and one.adapter.number == number]
        own.sort(key=waiting.place)
        assert list(waiting.adapted.of(number)) == own
        firsts += own[:1]
    assert list(waiting.adapted.firsts()) == sorted(firsts, key=waiting.place)
    for one in firsts:
        behind = [other for other in firsts if waiting.place(other) > waiting.place(one)]
        assert one.adapter is not None
        behind += list(waiting.adapted.of(one.adapter.number))[1:2]
        assert list(waiting.adapted.firsts_behind(one)) == sorted(behind, key=waiting.place)
    barred = {
        one
        for one in requests
        if one.adapter is not None
        and bars.open is not None
        and (
            one.adapter.number not in bars.open
            or ((last := bars.open[one.adapter.number]) is not None and waiting.place(one) > last)
        )
    }
    assert list(waiting.startable(bars)) == [one for one in waiting if one not in barred]
    for level in waiting.levels:
        for lane in waiting.lanes(level).values():
            assert list(lane) == sorted(lane, key=by_deadline)
            assert lane.first() is next(iter(lane))
