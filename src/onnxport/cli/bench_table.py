"""A report of `onnxport bench` as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from onnxport.serving.bench.records import PERCENTILES, Distribution, Summary
from onnxport.serving.bench.report import BenchReport, Incidents, ServerSetup, Setup

WIDTH = 100
GIB, MIB = 1024**3, 1024**2
LATENCIES = {
    "ttft_s": "time to first token",
    "itl_s": "inter-token latency",
    "tpot_s": "time per output token",
    "e2e_s": "whole request",
    "delay_s": "sent after it was due",
}


def lines(report: BenchReport) -> Iterator[str]:
    """Yield the lines."""
    yield from textwrap.wrap(f"$ {report.command}", WIDTH, subsequent_indent="  ")
    machine = report.machine
    yield from textwrap.wrap(
        f"{machine.system} {machine.architecture}, {machine.processor}, {machine.cores} cores, "
        f"{machine.memory_bytes / GIB:.1f} GiB; onnxport {report.onnxport}, Python "
        f"{machine.python}; {report.date_utc}",
        WIDTH,
    )
    yield from textwrap.wrap(_setup(report.setup), WIDTH)
    yield ""
    yield from _counts(report.summary)
    yield ""
    yield from _latencies(report)
    if isinstance(report.setup, Setup):
        yield from _incidents(report.setup.incidents)
    for message, count in report.summary.errors.items():
        yield from textwrap.wrap(f"failed, {count} times: {message}", WIDTH)


def _setup(setup: Setup | ServerSetup) -> str:
    if isinstance(setup, ServerSetup):
        rate = setup.request_rate_per_s
        pace = "all at once" if rate is None else f"{rate:g} requests/s"
        most = setup.max_concurrency
        limit = "" if most is None else f", at most {most} under way"
        return f"{setup.model} at {setup.base_url}{setup.endpoint}; {pace}{limit}"
    loaded, artifact = setup.capabilities, setup.artifact
    versions = ", ".join(f"{name} {version}" for name, version in setup.versions.items())
    peak = setup.peak_memory_bytes
    memory = "" if peak is None else f", peak memory {peak / MIB:.0f} MiB"
    return (
        f"{artifact.name}: {artifact.family}, {artifact.weights}, head in "
        f"{artifact.head_precision}; {loaded.provider} ({versions}), {loaded.attention} attention, "
        f"{loaded.compute_dtype}, KV cache {loaded.kv_cache_dtype}, {setup.threads} threads; "
        f"loaded in {setup.load_s:.2f} s{memory}"
    )


def _incidents(found: Incidents) -> Iterator[str]:
    """What the figures are of besides, where there is anything."""
    if found.num_failed_steps:
        yield f"steps that failed and were tried again: {found.num_failed_steps}"
    if found.num_preemptions:
        yield f"requests that were preempted: {found.num_preemptions}"
    for loss in found.losses:
        what = "did not load" if loss.device is None else f"on {loss.device} was lost"
        then = f"{loss.replaced_by} took over" if loss.replaced_by else "nobody took over"
        yield from textwrap.wrap(f"{loss.provider} {what}, and {then}: {loss.reason}", WIDTH)


def _counts(summary: Summary) -> Iterator[str]:
    rows = {
        "requests": f"{summary.num_completed} ended well, {summary.num_failed} failed",
        "duration": f"{summary.duration_s:.2f} s, at most {summary.most_at_once} at once",
        "tokens": f"{summary.prompt_tokens} in ({summary.cached_tokens} cached), "
        f"{summary.output_tokens} out",
        "throughput": f"{summary.requests_per_s:.2f} requests/s, "
        f"{summary.prompt_tokens_per_s:.1f} prompt tokens/s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s",
    }
    if summary.num_good is not None:
        rows["goodput"] = (
            f"{summary.good_requests_per_s:.2f} requests/s; {summary.num_good} of "
            f"{summary.num_requests} kept the goals"
        )
    for name, text in rows.items():
        yield f"{name:<12}{text}"


def _latencies(report: BenchReport) -> Iterator[str]:
    found: dict[str, Distribution | None] = {
        title: getattr(report.summary, name) for name, title in LATENCIES.items()
    }
    if report.kind != "serve":
        del found[LATENCIES["delay_s"]]
    if report.batch_s is not None:
        found = {"whole batch": report.batch_s, **found}
    titles = ("mean", "std", "min", *(f"p{share}" for share in PERCENTILES), "max")
    yield f"{'ms':<24}" + "".join(f"{title:>9}" for title in titles)
    for name, values in found.items():
        if values is None:
            continue
        shown = (values.mean, values.std, values.min, *values.percentiles.values(), values.max)
        yield f"{name:<24}" + "".join(f"{1000 * value:>9.1f}" for value in shown)
