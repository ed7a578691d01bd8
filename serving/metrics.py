"""Prometheus metrics of one engine, under vLLM's names where vLLM has one.

Counters and gauges are read from the engine's statistics when a scraper asks; histograms are fed by
its events. vLLM's names are those of `vllm/v1/metrics/loggers.py`; what it has no name for begins
with `onnxport:`. The text is written by `prometheus_client`.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from onnxport.serving.events import FinishedRecord, RequestEvent, StepRecord
from onnxport.serving.stats import EngineStats, SpeculationCounters

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM's number of an engine among several of one server; here there is one

# Upper edges of the buckets, in seconds: vLLM's, with finer ones below for small models. They end
# where a long prompt on a slow CPU does.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 2560.0),
)
INTER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
COMPLETIONS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)

# Name without "vllm:" -> what it says, the edges of its buckets.
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "iteration_tokens_total": ("Tokens computed in one step.", STEP_TOKENS),
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Between two tokens of a sequence.", INTER_TOKEN_S),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_S),
    "request_queue_time_seconds": ("From arrival to the first step.", REQUEST_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", REQUEST_S),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST_S),
    "request_inference_time_seconds": ("From the first step to the last token.", REQUEST_S),
    "request_prompt_tokens": ("Tokens of the prompt.", TOKENS),
    "request_generation_tokens": ("Tokens generated.", TOKENS),
    "request_max_num_generation_tokens": ("Of the longest completion of a request.", TOKENS),
    "request_time_per_output_token_seconds": (
        "Between two tokens of a sequence, the mean of each.",
        INTER_TOKEN_S,
    ),
    "request_num_preemptions": ("Times that a sequence was preempted.", PREEMPTIONS),
    "request_params_max_tokens": ("max_tokens, where a request gave it.", TOKENS),
    "request_params_n": ("n, the completions that a request asked for.", COMPLETIONS),
}

# Name -> what it says, its value.
Table = dict[str, tuple[str, Callable[[EngineStats], float]]]
GAUGES: Table = {
    "vllm:num_requests_running": ("Requests that run.", lambda s: s.num_requests_running),
    "vllm:num_requests_waiting": ("Requests that wait.", lambda s: s.num_requests_waiting),
    "vllm:kv_cache_usage_perc": (
        "Share of the KV cache in use, 0 to 1.",
        lambda s: 1 - s.num_free_blocks / s.num_blocks,
    ),
    "onnxport:kv_cached_blocks": (
        "Free KV blocks whose content can be used again.",
        lambda s: s.num_cached_blocks,
    ),
}
COUNTERS: Table = {
    "vllm:num_preemptions": ("Preemptions.", lambda s: s.num_preemptions),
    "vllm:prefix_cache_queries": (
        "Tokens looked up in the prefix cache.",
        lambda s: s.prefix_cache_queries,
    ),
    "vllm:prefix_cache_hits": (
        "Tokens found in the prefix cache.",
        lambda s: s.prefix_cache_hits,
    ),
    "vllm:prompt_tokens": ("Tokens of prompts.", lambda s: s.prompt_tokens),
    "vllm:generation_tokens": ("Tokens generated.", lambda s: s.generation_tokens),
    "onnxport:steps": ("Steps of the engine.", lambda s: s.num_steps),
    "onnxport:failed_steps": ("Steps that failed.", lambda s: s.num_failed_steps),
    "onnxport:requests_refused": ("Requests that found the queue full.", lambda s: s.num_refused),
    "onnxport:devices_lost": ("Devices that were lost, or did not load.", lambda s: s.num_losses),
    "onnxport:fallbacks": (
        "Times that another provider took over.",
        lambda s: s.num_fallbacks,
    ),
    "onnxport:kv_blocks_saved": ("KV blocks saved in a tier.", lambda s: s.num_blocks_saved),
    "onnxport:kv_blocks_loaded": ("KV blocks loaded from a tier.", lambda s: s.num_blocks_loaded),
    "onnxport:kv_tier_errors": (
        "KV blocks of a tier that were corrupt, foreign or could not be stored.",
        lambda s: s.num_tier_errors,
    ),
}

# Only where the model has slots for LoRA adapters.
ADAPTER_GAUGES: Table = {
    "onnxport:lora_adapters": (
        "LoRA adapters in host memory, in a slot or not.",
        lambda s: s.num_adapters,
    ),
}
ADAPTER_COUNTERS: Table = {
    "onnxport:lora_swaps": (
        "Slots that one LoRA adapter lost to another, which was written there.",
        lambda s: s.num_adapter_swaps,
    ),
}

# Only where something is guessed.
SPECULATION: dict[str, tuple[str, Callable[[SpeculationCounters], int]]] = {
    "vllm:spec_decode_num_drafts": ("Drafts that were checked.", lambda s: s.num_drafts),
    "vllm:spec_decode_num_draft_tokens": (
        "Tokens of drafts that were checked.",
        lambda s: s.num_draft_tokens,
    ),
    "vllm:spec_decode_num_accepted_tokens": (
        "Tokens of drafts that were right.",
        lambda s: s.num_accepted_tokens,
    ),
}


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What vLLM tells of the KV cache, as far as there is such a thing here."""

    block_size: int  # tokens
    num_gpu_blocks: int  # of the pool, wherever that is
    cache_dtype: str
    enable_prefix_caching: bool


class Metrics(Collector):
    """What a scraper reads: listens to the engine, from its thread, and renders in any other."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        cache: Callable[[], CacheConfig],
    ) -> None:
        """Start with empty histograms.

        Args:
            model_name: a label of every sample.
            stats: returns the engine's counters; called at every scrape.
            cache: likewise, what the KV cache is.
        """
        self._labels = (model_name, ENGINE)
        self._stats = stats
        self._cache = cache
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._lock = threading.Lock()
        # Both are guarded by _lock.
        self._histograms = {name: Histogram(edges) for name, (_, edges) in HISTOGRAMS.items()}
        self._arrivals: dict[str, float] = {}  # of requests without a token yet: id -> time
        self._longest: dict[str, tuple[int, int]] = {}  # id -> completions that ended, most tokens

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the metrics and their content type.

        Args:
            accept: the request's `Accept` header: a scraper that asks for OpenMetrics gets it, all
                others Prometheus' text format 0.0.4.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> list[Metric]:
        """Name nothing in advance: the registry holds no other collector to clash with."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is now."""
        stats = self._stats()
        has_slots = stats.max_adapters > 0
        yield self._cache_config()
        for name, (text, value) in (GAUGES | ADAPTER_GAUGES if has_slots else GAUGES).items():
            yield self._filled(GaugeMetricFamily(name, text, labels=LABELS), [((), value(stats))])
        counters = COUNTERS | ADAPTER_COUNTERS if has_slots else COUNTERS
        for name, (text, value) in counters.items():
            yield self._filled(CounterMetricFamily(name, text, labels=LABELS), [((), value(stats))])
        text, labels = "Sequences that ended, by reason.", (*LABELS, "finished_reason")
        ended = [((reason,), count) for reason, count in stats.finished.items()]
        yield self._filled(CounterMetricFamily("vllm:request_success", text, labels=labels), ended)
        text, labels = "Unfinished requests of a loaded LoRA adapter.", (*LABELS, "lora_name")
        using = [((name,), count) for name, count in stats.adapter_requests.items()]
        yield self._filled(GaugeMetricFamily("onnxport:lora_requests", text, labels=labels), using)
        if has_slots:
            yield _adapters(stats)
        text, labels = "Bytes of K/V in a tier.", (*LABELS, "tier")
        tiers = [(("host",), stats.host_tier_bytes), (("disk",), stats.disk_tier_bytes)]
        yield self._filled(GaugeMetricFamily("onnxport:kv_tier_bytes", text, labels=labels), tiers)
        if stats.speculation is not None:
            yield from self._guesses(stats.speculation)
        with self._lock:
            found = {name: histogram.snapshot() for name, histogram in self._histograms.items()}
        for name, (buckets, total) in found.items():
            family = HistogramMetricFamily(f"vllm:{name}", HISTOGRAMS[name][0], labels=LABELS)
            family.add_metric(self._labels, buckets, total)
            yield family

    def _cache_config(self) -> Metric:
        """Return vLLM's gauge of the KV cache, which is 1: all that it says is in its labels."""
        told = asdict(self._cache())
        name, text = "vllm:cache_config_info", "What the KV cache is, in the labels."
        family = GaugeMetricFamily(name, text, labels=(*LABELS, *told))
        return self._filled(family, [(tuple(map(str, told.values())), 1)])

    def _guesses(self, stats: SpeculationCounters) -> Iterator[Metric]:
        """Yield what speculation did."""
        for name, (text, value) in SPECULATION.items():
            yield self._filled(CounterMetricFamily(name, text, labels=LABELS), [((), value(stats))])
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        text, labels = "Tokens of drafts that were right, by place.", (*LABELS, "position")
        places = [((str(place),), n) for place, n in enumerate(stats.accepted_per_position)]
        yield self._filled(CounterMetricFamily(name, text, labels=labels), places)

    def on_step(self, record: StepRecord) -> None:
        """Count the tokens of a step and the times between them."""
        with self._lock:
            self._histograms["iteration_tokens_total"].add(record.num_tokens)
            self._histograms["inter_token_latency_seconds"].add(*record.inter_token_s)

    def on_request(self, event: RequestEvent) -> None:
        """Count what a request took."""
        with self._lock:
            if event.kind == "queued":
                self._arrivals[event.request_id] = event.time_s
            elif event.kind in ("first_token", "finished"):
                arrival_s = self._arrivals.pop(event.request_id, None)
                if arrival_s is not None and event.kind == "first_token":
                    self._add("time_to_first_token_seconds", event.time_s - arrival_s)
            if event.finished is not None:
                self._finish(event.index, event.finished)
                self._end_request(event.request_id, event.finished)

    def _finish(self, index: int, record: FinishedRecord) -> None:
        """Count a sequence that ended; what belongs to the prompt with the first one alone."""
        times = record.metrics
        arrived = times.arrival_time_s
        first, last = times.first_token_time_s, times.last_token_time_s
        if times.finished_time_s is not None:
            self._add("e2e_request_latency_seconds", times.finished_time_s - arrived)
        if first is not None and last is not None:
            self._add("request_decode_time_seconds", last - first)
            if record.num_output_tokens > 1:
                mean = (last - first) / (record.num_output_tokens - 1)
                self._add("request_time_per_output_token_seconds", mean)
        self._add("request_generation_tokens", record.num_output_tokens)
        self._add("request_num_preemptions", record.num_preemptions)
        if index:
            return
        started = times.scheduled_time_s
        if started is not None:
            self._add("request_queue_time_seconds", started - arrived)
        if started is not None and first is not None:
            self._add("request_prefill_time_seconds", first - started)
        if started is not None and last is not None:
            self._add("request_inference_time_seconds", last - started)
        self._add("request_prompt_tokens", record.num_prompt_tokens)
        self._add("request_params_n", record.n)
        if record.max_tokens is not None:
            self._add("request_params_max_tokens", record.max_tokens)

    def _end_request(self, request_id: str, record: FinishedRecord) -> None:
        """Count a request whose last completion ended."""
        ended, longest = self._longest.pop(request_id, (0, 0))
        ended, longest = ended + 1, max(longest, record.num_output_tokens)
        if ended < record.num_sequences:
            self._longest[request_id] = (ended, longest)
        else:
            self._add("request_max_num_generation_tokens", longest)

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].add(value)

    def _filled(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        samples: Sequence[tuple[Sequence[str], float]],
    ) -> Metric:
        """Return the family with samples: (further label values, value)."""
        for more, value in samples:
            family.add_metric((*self._labels, *more), value)
        return family


def _adapters(stats: EngineStats) -> Metric:
    """Return vLLM's gauge of LoRA adapters: all that it says is in its labels, but for the time."""
    labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    text = "LoRA adapters of requests that wait and run; the value is the time, in seconds."
    family = GaugeMetricFamily("vllm:lora_requests_info", text, labels=labels)
    names = [",".join(one) for one in (stats.waiting_adapters, stats.running_adapters)]
    family.add_metric((str(stats.max_adapters), *names), time.time())
    return family


class Histogram:
    """How many values fell between the edges; nine times as fast as `prometheus_client.Histogram`.

    That one takes a lock and searches linearly for each value, 0.2 ms a step of 256 rows.
    """

    def __init__(self, edges: Sequence[float]) -> None:
        """Start empty.

        Args:
            edges: upper edges of the buckets, ascending; one more bucket holds what is above.
        """
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def add(self, *values: float) -> None:
        """Count values; one that equals an edge is below it."""
        edges, counts = self._edges, self._counts
        for value in values:
            counts[bisect_left(edges, value)] += 1
        self._sum += sum(values)

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Return the (edge, number of values up to it) of every bucket, and the sum of all."""
        names = [*map(floatToGoString, self._edges), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum
