"""`GET /metrics`: the engine's counters in Prometheus' text format, under vLLM's names.

The format is https://prometheus.io/docs/instrumenting/exposition_formats (version 0.0.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxport.serving.engine import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[str, int | float]  # further labels, value


def render(stats: EngineStats, model_name: str) -> str:
    """Return the metrics of one model."""
    return "\n".join(_lines(stats, model_name)) + "\n"


def _lines(stats: EngineStats, model_name: str) -> Iterator[str]:
    escaped = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    for name, kind, text, samples in _metrics(stats):
        yield f"# HELP vllm:{name} {text}"
        yield f"# TYPE vllm:{name} {kind}"
        for labels, value in samples:
            yield f'vllm:{name}{{model_name="{escaped}"{labels}}} {value!r}'


def _metrics(stats: EngineStats) -> Iterator[tuple[str, str, str, Sequence[Sample]]]:
    """Yield name, kind, explanation and samples of each metric."""
    used = 1 - stats.num_free_blocks / stats.num_blocks
    finished = [(f',finished_reason="{reason}"', count) for reason, count in stats.finished.items()]
    yield "num_requests_running", "gauge", "Requests that run.", [("", stats.num_requests_running)]
    yield "num_requests_waiting", "gauge", "Requests that wait.", [("", stats.num_requests_waiting)]
    yield "kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 0 to 1.", [("", used)]
    yield "num_preemptions_total", "counter", "Preemptions.", [("", stats.num_preemptions)]
    yield "prompt_tokens_total", "counter", "Tokens of prompts.", [("", stats.prompt_tokens)]
    tokens = [("", stats.generation_tokens)]
    yield "generation_tokens_total", "counter", "Tokens generated.", tokens
    yield "request_success_total", "counter", "Requests that ended, by reason.", finished
