"""What is made of the times of requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.errors import RequestError
from onnxport.serving.bench.records import (
    Distribution,
    Goals,
    RequestRecord,
    percentile,
    shifted,
    summarize,
)


def record(
    output_s: tuple[float, ...] = (1.5, 2.0, 4.0),
    *,
    arrival_s: float = 0.0,
    sent_s: float = 1.0,
    finished_s: float = 5.0,
    output_tokens: int = 6,
    error: str | None = None,
) -> RequestRecord:
    return RequestRecord(arrival_s, sent_s, output_s, finished_s, 10, output_tokens, 4, error)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=50),
    st.sampled_from([0, 1, 50, 90, 95, 99, 100]),
)
def test_percentiles_are_numpys(values: list[float], share: int) -> None:
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, share))


def test_a_distribution() -> None:
    found = Distribution.of([4.0, 1.0, 3.0, 2.0])
    assert found is not None
    assert (found.count, found.mean, found.min, found.median, found.max) == (4, 2.5, 1, 2.5, 4)
    assert found.std == pytest.approx(1.25**0.5)
    assert found.percentiles == pytest.approx({"p50": 2.5, "p90": 3.7, "p95": 3.85, "p99": 3.97})
    assert Distribution.of([]) is None


def test_latencies_of_a_request() -> None:
    one = record()
    assert (one.delay_s, one.ttft_s, one.e2e_s, one.itl_s) == (1.0, 0.5, 4.0, [0.5, 2.0])
    assert one.tpot_s == 2.5 / 5  # six tokens in three parts
    assert record((), output_tokens=0).ttft_s is None
    assert record((2.0,), output_tokens=1).tpot_s is None
    assert record((2.0,), output_tokens=3).tpot_s == 0  # a draft that came whole


def test_a_record_moves_as_a_whole() -> None:
    late = shifted(record(), 10.0)
    assert (late.arrival_s, late.sent_s, late.finished_s) == (10, 11, 15)
    assert late.itl_s == record().itl_s


def test_failed_requests_count_as_such_and_as_nothing_else() -> None:
    records = [
        record(arrival_s=2.0, sent_s=2.0, output_s=(3.0,), finished_s=3.0, output_tokens=1),
        record(arrival_s=3.0, sent_s=4.0, output_s=(5.0, 7.0), finished_s=7.0, output_tokens=2),
        record(arrival_s=2.5, sent_s=2.5, output_s=(2.6,), finished_s=12.0, error="HTTP 503"),
        record(arrival_s=2.5, sent_s=2.5, output_s=(), finished_s=2.6, error="HTTP 503"),
    ]
    summary = summarize(records)
    assert (summary.num_requests, summary.num_completed, summary.num_failed) == (4, 2, 2)
    assert summary.errors == {"HTTP 503": 2}
    assert summary.duration_s == 10.0  # the failed one took that long
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (20, 8, 3)
    assert summary.requests_per_s == 0.2
    assert (summary.prompt_tokens_per_s, summary.output_tokens_per_s) == (2.0, 0.3)
    assert summary.ttft_s is not None
    assert (summary.ttft_s.count, summary.ttft_s.mean) == (2, 1.0)
    assert summary.itl_s is not None
    assert (summary.itl_s.count, summary.itl_s.max) == (1, 2.0)
    assert summary.delay_s is not None
    assert summary.delay_s.count == 4
    assert summary.most_at_once == 3
    assert (summary.num_good, summary.good_requests_per_s) == (None, None)


def test_who_follows_another_is_not_beside_it() -> None:
    records = [record(sent_s=float(n), finished_s=float(n + 1)) for n in range(3)]
    assert summarize(records).most_at_once == 1


def test_nothing_ended_well() -> None:
    summary = summarize([record((), error="no")])
    assert (summary.num_completed, summary.output_tokens_per_s) == (0, 0.0)
    assert summary.ttft_s is summary.itl_s is summary.tpot_s is summary.e2e_s is None


@pytest.mark.parametrize(
    ("goal", "kept"),
    [
        ("ttft:500", True),
        ("ttft:499", False),
        ("itl:2000", True),  # the longest gap counts
        ("itl:1999", False),
        ("tpot:500", True),
        ("tpot:499", False),
        ("e2e:4000", True),
        ("e2e:3999", False),
    ],
)
def test_goals(goal: str, kept: bool) -> None:
    assert Goals.parse([goal]).met(record()) == kept
    assert not Goals.parse([goal]).met(record(error="no"))


@pytest.mark.parametrize("goal", ["ttft:1", "itl:1", "tpot:1"])
def test_goals_are_not_kept_where_nothing_was_seen(goal: str) -> None:
    """Of two tokens and more something is seen, unless the server tells it in an unknown way."""
    assert not Goals.parse([goal]).met(record(()))
    assert Goals.parse(["e2e:9000"]).met(record(()))


def test_goals_have_to_be_kept_together() -> None:
    assert Goals.parse(["ttft:500", "itl:2000"]).met(record())
    assert not Goals.parse(["ttft:500", "itl:1999"]).met(record())


def test_goodput() -> None:
    records = [record(), record((4.9, 5.0)), record(error="no")]
    summary = summarize(records, Goals.parse(["ttft:1000"]))
    assert (summary.num_good, summary.good_requests_per_s) == (1, 0.2)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:inf", "p99:5", ":5"])
def test_goals_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="a goal is"):
        Goals.parse([text])


def test_a_goal_given_twice() -> None:
    with pytest.raises(RequestError, match="itl is given twice"):
        Goals.parse(["itl:5", "itl:6"])
