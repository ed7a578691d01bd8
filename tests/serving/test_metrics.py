"""The engine's events and statistics as Prometheus metrics."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from onnxport.serving.events import EventKind, FinishedRecord, RequestEvent, StepRecord
from onnxport.serving.metrics import HISTOGRAMS, CacheConfig, Histogram, Metrics
from onnxport.serving.outputs import FinishReason, RequestMetrics
from onnxport.serving.stats import EngineStats

STATS = EngineStats(
    num_requests_running=3,
    num_requests_waiting=4,
    num_blocks=10,
    num_free_blocks=4,
    num_steps=100,
    num_failed_steps=1,
    num_preemptions=5,
    prompt_tokens=600,
    generation_tokens=700,
    prefix_cache_queries=60,
    prefix_cache_hits=50,
    num_cached_blocks=2,
    host_tier_bytes=2048,
    disk_tier_bytes=4096,
    num_blocks_saved=8,
    num_blocks_loaded=9,
    num_refused=6,
    num_tier_errors=11,
    num_losses=13,
    num_fallbacks=14,
    finished={"stop": 12, "timeout": 1},
)
CACHE = CacheConfig(16, 10, "float16", True)
TIMES = RequestMetrics(
    arrival_time_s=10.0,
    scheduled_time_s=10.5,
    first_token_time_s=12.5,
    last_token_time_s=20.5,
    finished_time_s=20.6,
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m", lambda: STATS, lambda: CACHE)


def samples(metrics: Metrics) -> dict[str, float]:
    """Return what a scraper reads: name and labels, but the model's, to value."""
    text, _ = metrics.render()
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
            name = sample.name + "".join(f",{label}={value}" for label, value in labels.items())
            assert name not in found
            found[name] = sample.value
    return found


def happen(metrics: Metrics, kind: EventKind, time_s: float, index: int = 0, **more: Any) -> None:
    metrics.on_request(RequestEvent(kind, "r", index, time_s, **more))


def finished(
    times: RequestMetrics = TIMES, reason: FinishReason = "stop", **more: Any
) -> FinishedRecord:
    record: dict[str, Any] = {
        "num_prompt_tokens": 30,
        "num_output_tokens": 9,
        "num_cached_tokens": 16,
        "num_preemptions": 3,
        "max_tokens": 40,
        "n": 2,
        "num_sequences": 1,
    }
    return FinishedRecord(reason, times, **record | more)


def test_statistics_have_vllms_names(metrics: Metrics) -> None:
    wanted = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 4,
        "vllm:kv_cache_usage_perc": pytest.approx(0.6),
        "vllm:num_preemptions_total": 5,
        "vllm:prefix_cache_queries_total": 60,
        "vllm:prefix_cache_hits_total": 50,
        "vllm:prompt_tokens_total": 600,
        "vllm:generation_tokens_total": 700,
        "vllm:request_success_total,finished_reason=stop": 12,
        "vllm:request_success_total,finished_reason=timeout": 1,
        "onnxport:steps_total": 100,
        "onnxport:failed_steps_total": 1,
        "onnxport:kv_cached_blocks": 2,
        "onnxport:kv_blocks_saved_total": 8,
        "onnxport:kv_blocks_loaded_total": 9,
        "onnxport:requests_refused_total": 6,
        "onnxport:kv_tier_errors_total": 11,
        "onnxport:devices_lost_total": 13,
        "onnxport:fallbacks_total": 14,
        "onnxport:kv_tier_bytes,tier=host": 2048,
        "onnxport:kv_tier_bytes,tier=disk": 4096,
    }
    found = samples(metrics)
    assert {name: found[name] for name in wanted} == wanted
    assert all(found[f"vllm:{name}_count"] == 0 for name in HISTOGRAMS)


def test_statistics_are_read_at_every_scrape() -> None:
    stats = [STATS]
    metrics = Metrics("m", lambda: stats[-1], lambda: CACHE)
    assert samples(metrics)["vllm:num_requests_running"] == 3
    stats.append(EngineStats(0, 0, 10, 10, 0, 0, 0, 0, 0))
    assert samples(metrics)["vllm:num_requests_running"] == 0


def test_the_cache_is_told_in_labels_as_it_is_at_every_scrape() -> None:
    caches = [CACHE]
    metrics = Metrics("m", lambda: STATS, lambda: caches[-1])
    text = metrics.render()[0].decode()
    assert "# TYPE vllm:cache_config_info gauge\n" in text
    labels = 'block_size="16",cache_dtype="float16",enable_prefix_caching="True"'
    rest = 'engine="0",model_name="m",num_gpu_blocks="10"'
    assert f"vllm:cache_config_info{{{labels},{rest}}} 1.0\n" in text
    caches.append(CacheConfig(32, 5, "int8", False))
    assert 'block_size="32",cache_dtype="int8",enable_prefix_caching="False"' in (
        metrics.render()[0].decode()
    )


def test_a_request_of_one_completion(metrics: Metrics) -> None:
    happen(metrics, "queued", 10.0)
    happen(metrics, "scheduled", 10.5)
    assert samples(metrics)["vllm:time_to_first_token_seconds_count"] == 0
    happen(metrics, "first_token", 12.5)
    assert samples(metrics)["vllm:time_to_first_token_seconds_sum"] == 2.5  # before it ends
    happen(metrics, "finished", 20.6, finished=finished())
    found = samples(metrics)
    sums = {name: found[f"vllm:{name}_sum"] for name in HISTOGRAMS}
    assert sums == pytest.approx(
        {
            "iteration_tokens_total": 0,
            "time_to_first_token_seconds": 2.5,
            "inter_token_latency_seconds": 0,
            "e2e_request_latency_seconds": 10.6,
            "request_queue_time_seconds": 0.5,
            "request_prefill_time_seconds": 2.0,
            "request_decode_time_seconds": 8.0,
            "request_inference_time_seconds": 10.0,
            "request_prompt_tokens": 30,
            "request_generation_tokens": 9,
            "request_max_num_generation_tokens": 9,
            "request_time_per_output_token_seconds": 1.0,
            "request_num_preemptions": 3,
            "request_params_max_tokens": 40,
            "request_params_n": 2,
        }
    )
    counts = {found[f"vllm:{name}_count"] for name in list(HISTOGRAMS)[3:]}
    assert counts == {1}


def test_several_completions_share_one_prompt(metrics: Metrics) -> None:
    happen(metrics, "queued", 10.0)
    happen(metrics, "first_token", 12.5, 0)
    happen(metrics, "first_token", 12.5, 1)
    first = finished(num_output_tokens=5, num_sequences=2)
    happen(metrics, "finished", 20.6, 1, finished=first)
    assert samples(metrics)["vllm:request_max_num_generation_tokens_count"] == 0
    happen(metrics, "finished", 20.6, 0, finished=finished(num_sequences=2))
    found = samples(metrics)
    assert found["vllm:request_max_num_generation_tokens_count"] == 1
    assert found["vllm:request_max_num_generation_tokens_sum"] == 9
    assert found["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(8 / 4 + 8 / 8)
    once = ("time_to_first_token_seconds", "request_prompt_tokens", "request_params_n")
    assert [found[f"vllm:{name}_count"] for name in once] == [1, 1, 1]
    assert found["vllm:request_prompt_tokens_sum"] == 30
    assert found["vllm:request_generation_tokens_sum"] == 14
    assert found["vllm:e2e_request_latency_seconds_count"] == 2


def test_a_request_that_ends_before_its_first_step(metrics: Metrics) -> None:
    happen(metrics, "queued", 10.0)
    times = RequestMetrics(arrival_time_s=10.0, finished_time_s=11.0)
    happen(metrics, "finished", 11.0, finished=finished(times, "timeout", max_tokens=None))
    happen(metrics, "first_token", 12.5)  # a later request of the same id, queued unheard
    found = samples(metrics)
    assert found["vllm:e2e_request_latency_seconds_sum"] == 1.0
    for name in ("request_queue_time", "request_prefill_time", "time_to_first_token"):
        assert found[f"vllm:{name}_seconds_count"] == 0
    assert found["vllm:request_params_max_tokens_count"] == 0
    assert found["vllm:request_params_n_count"] == 1


def test_steps(metrics: Metrics) -> None:
    metrics.on_step(StepRecord(1.0, 1.1, 3, 18, 3, (0.1, 0.02)))
    metrics.on_step(StepRecord(1.1, 1.2, 1, 1, 1, ()))
    found = samples(metrics)
    assert found["vllm:iteration_tokens_total_sum"] == 19
    assert found["vllm:iteration_tokens_total_bucket,le=1.0"] == 1
    assert found["vllm:iteration_tokens_total_bucket,le=32.0"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_bucket,le=0.025"] == 1
    assert found["vllm:inter_token_latency_seconds_bucket,le=0.1"] == 2  # an edge is inside


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 1e9])))
def test_buckets_are_cumulative(values: list[float]) -> None:
    histogram = Histogram((1.0, 2.0))
    for value in values[::2]:
        histogram.add(value)
    histogram.add(*values[1::2])
    expected = [(le, sum(value <= float(le) for value in values)) for le in ("1.0", "2.0", "+Inf")]
    assert histogram.snapshot() == (expected, pytest.approx(sum(values)))


def test_edges_ascend() -> None:
    for _, edges in HISTOGRAMS.values():
        assert list(edges) == sorted(set(edges))


def test_the_scraper_chooses_the_format(metrics: Metrics) -> None:
    text, kind = metrics.render("")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert b"# TYPE vllm:num_preemptions_total counter\n" in text
    text, kind = metrics.render("application/openmetrics-text; version=1.0.0, text/plain;q=0.5")
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert len(list(parse_openmetrics(text.decode()))) > len(HISTOGRAMS)


def test_labels_are_escaped() -> None:
    text, _ = Metrics('a"b\\c\n', lambda: STATS, lambda: CACHE).render()
    families = text_string_to_metric_families(text.decode())
    assert {s.labels["model_name"] for f in families for s in f.samples} == {'a"b\\c\n'}


def test_two_models_have_metrics_of_their_own(metrics: Metrics) -> None:
    other = Metrics("other", lambda: STATS, lambda: CACHE)
    metrics.on_step(StepRecord(1.0, 1.1, 3, 18, 3, ()))
    assert (
        b'vllm:iteration_tokens_total_count{engine="0",model_name="other"} 0.0' in other.render()[0]
    )


def test_scraping_while_the_engine_runs_sees_whole_steps(metrics: Metrics) -> None:
    step = StepRecord(1.0, 1.1, 256, 256, 256, (0.5,) * 256)

    def run() -> None:
        for _ in range(200):
            metrics.on_step(step)

    thread = threading.Thread(target=run)
    thread.start()
    alive = True
    while alive:
        alive = thread.is_alive()
        found = samples(metrics)
        count = found["vllm:inter_token_latency_seconds_count"]
        assert found["vllm:inter_token_latency_seconds_sum"] == count / 2
        assert count == 256 * found["vllm:iteration_tokens_total_count"]
    thread.join()
    assert count == 200 * 256


def test_adapters_and_their_slots_are_counted_where_there_are_any() -> None:
    told = replace(STATS, max_adapters=4, num_adapters=7, num_adapter_swaps=9)
    metrics = Metrics("m", lambda: told, lambda: CACHE)
    text = metrics.render()[0].decode()
    labels = '{engine="0",model_name="m"}'
    assert f"# TYPE onnxport:lora_adapters gauge\nonnxport:lora_adapters{labels} 7.0\n" in text
    assert "# TYPE onnxport:lora_swaps_total counter\n" in text
    assert f"onnxport:lora_swaps_total{labels} 9.0\n" in text
    text = Metrics("m", lambda: STATS, lambda: CACHE).render()[0].decode()
    assert "lora_swaps" not in text
    assert "lora_adapters" not in text


def test_adapters_are_told_in_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1234.5)
    told = replace(STATS, max_adapters=4, running_adapters=("a", "b"), waiting_adapters=("b",))
    text, _ = Metrics("m", lambda: told, lambda: CACHE).render()
    [family] = [
        family
        for family in text_string_to_metric_families(text.decode())
        if family.name == "vllm:lora_requests_info"
    ]
    [sample] = family.samples
    assert family.type == "gauge"
    assert sample.labels == {
        "max_lora": "4",
        "running_lora_adapters": "a,b",
        "waiting_lora_adapters": "b",
    }
    assert sample.value == 1234.5
    text, _ = Metrics("m", lambda: STATS, lambda: CACHE).render()
    assert b"lora_requests_info" not in text
