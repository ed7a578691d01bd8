"""A report of `onnxport verify` as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from onnxport.serving.verify.caches import CacheReport
from onnxport.serving.verify.comparison import Comparison, Tolerance
from onnxport.serving.verify.report import ModeReport, ProviderReport, Report
from onnxport.serving.verify.variants import Variant

WIDTH = 100
GIB = 1024**3
MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "-"}
VARIANT_WIDTHS = {"batched": 9, "chunked": 9, "cached": 9, "preempted": 11}


def lines(report: Report) -> Iterator[str]:
    """Yield the lines."""
    artifact, machine = report.artifact, report.machine
    yield (
        f"{artifact.name}: {artifact.family}, {artifact.weights}, "
        f"{artifact.fingerprint[:12]}; files match their checksums"
    )
    yield from _wrapped(
        f"{machine.system} {machine.architecture}, {machine.processor}, {machine.cores} cores, "
        f"{machine.memory_bytes / GIB:.1f} GiB; onnxport {report.onnxport}",
        "",
    )
    yield from _answers(report)
    yield from _tokens(report)
    yield from _caches(report)
    yield ""
    for provider in report.providers:
        yield from _verdict(provider)


def _name(provider: ProviderReport) -> str:
    return provider.provider + (" (emulated)" if provider.emulated else "")


def _answers(report: Report) -> Iterator[str]:
    """Logits, and tokens where they were decoded: one line an arithmetic of a provider."""
    rows = [(one, mode) for one in report.providers for mode in one.modes]
    if not rows:
        return
    decoded = any(mode.variants for _, mode in rows)
    titles = "".join(f"{name:>{width}}" for name, width in VARIANT_WIDTHS.items())
    yield ""
    yield f"{'logits':<22}{'arithmetic':<19}{'max diff':>10}{'KL':>10}{titles if decoded else ''}"
    for provider, mode in rows:
        max_diff = max(mode.whole.max_diff, mode.stepwise.max_diff)
        max_kl = max(mode.whole.max_kl, mode.stepwise.max_kl)
        marks = {variant.name: _mark(variant) for variant in mode.variants}
        states = "".join(f"{marks.get(n, ''):>{width}}" for n, width in VARIANT_WIDTHS.items())
        yield (
            f"{_name(provider):<22}{mode.tolerance.name:<19}{max_diff:>10.1e}{max_kl:>10.1e}"
            f"{states}"
        ).rstrip()


def _tokens(report: Report) -> Iterator[str]:
    """What is said of a provider once: agreement with the reference, transfers, speed."""
    rows = [one for one in report.providers if one.transfers or one.speed]
    if not rows:
        return
    found = (mode.agreement for one in rows for mode in one.modes if mode.agreement)
    reference = next((one.reference for one in found), "")
    titles = (f"as on {reference}", f"K/V of {reference}") if reference else ("", "")
    yield ""
    yield (
        f"{'tokens':<22}{titles[0]:>16}{'own K/V':>9}{titles[1]:>17}"
        f"{'prefill/s':>12}{'decode/s':>12}{'8 rows/s':>12}"
    )
    for provider in rows:
        agreements = [mode.agreement.tokens for mode in provider.modes if mode.agreement]
        own, theirs = (
            _worst([one.tokens for one in provider.transfers if one.source == name])
            for name in (provider.provider, reference)
        )
        speed = provider.speed
        decode = {one.rows: one.tokens_per_s for one in speed.decode} if speed else {}
        figures = (speed.prefill_tokens_per_s if speed else None, decode.get(1), decode.get(8))
        yield (
            f"{_name(provider):<22}{_mark(agreements[-1]) if agreements else '':>16}{own:>9}"
            f"{'' if reference == provider.provider else theirs:>17}"
            + "".join(f"{'' if one is None else f'{one:,.0f}':>12}" for one in figures)
        ).rstrip()


def _caches(report: Report) -> Iterator[str]:
    """What each type of KV cache costs, beside float32 arithmetic."""
    rows = [(one, cache) for one in report.providers for cache in one.caches]
    if not rows:
        return
    yield ""
    yield (
        f"{'KV cache':<22}{'type':<12}{'bytes a token':>15}{'of float32':>12}{'max diff':>10}"
        f"{'KL':>10}{'top 1':>8}"
    )
    for provider, cache in rows:
        error, share = cache.error, cache.share_of_float32
        begin = f"{_name(provider):<22}{cache.dtype:<12}"
        if error is None:
            yield f"{begin}{MARKS[cache.state]:>15}"
            continue
        yield (
            f"{begin}{cache.bytes_per_token:>15,}{share:>12.1%}"
            f"{error.max_diff:>10.1e}{error.max_kl:>10.1e}{error.top1_agreement:>8.0%}"
        )


def _worst(variants: Sequence[Variant]) -> str:
    """The mark of the first that failed, or of the last."""
    failed = [one for one in variants if one.state == "failed"]
    return _mark([*failed, *reversed(variants)][0]) if variants else ""


def _mark(variant: Variant) -> str:
    """Passed, failed or skipped; with the share of equal tokens where some differ by near ties."""
    mark = MARKS[variant.state]
    if variant.state == "passed" and variant.divergences:
        return f"{mark} {variant.agreement:.0%}"
    return mark


def _verdict(provider: ProviderReport) -> Iterator[str]:
    """A line about a provider, and one for each thing that failed."""
    name = _name(provider)
    if provider.state == "missing":
        yield from _wrapped(f"{name}: missing. {provider.reason}")
        return
    head = "ok" if provider.state == "passed" else "FAILED"
    if provider.modes:
        mode = provider.modes[-1]
        loaded = mode.capabilities
        bits = ", the same bits in one step or many" if mode.bit_invariant else ""
        head += (
            f" on {loaded.device}, {loaded.attention} attention, {loaded.compute_dtype}, "
            f"{loaded.kv_cache_dtype} cache{bits}"
        )
    yield from _wrapped(f"{name}: {head}")
    if provider.reason:
        yield from _wrapped(f"  {provider.reason}")
    for mode in provider.modes:
        yield from _failures(mode)
    for cache in provider.caches:
        yield from _cache_failures(cache)
    for transfer in provider.transfers:
        title = f"K/V of {transfer.source} in {transfer.arithmetic}"
        yield from _differences(title, transfer.tokens)


def _failures(mode: ModeReport) -> Iterator[str]:
    """What an arithmetic failed."""
    limits = mode.tolerance
    for title, found in (
        ("golden logits in one step", mode.whole),
        ("golden logits token by token", mode.stepwise),
        ("token by token against one step", mode.consistency),
    ):
        if not limits.allows(found):
            yield from _wrapped(f"  {limits.name}, {title}: {_beyond(found, limits)}")
    for variant in mode.variants:
        yield from _differences(f"{limits.name}, {variant.name}", variant)
    if mode.agreement is not None:
        where = f"{limits.name}, against {mode.agreement.reference}"
        yield from _differences(where, mode.agreement.tokens)


def _cache_failures(cache: CacheReport) -> Iterator[str]:
    """What a type of KV cache failed, or why it was skipped."""
    found, limits = cache.error, cache.tolerance
    if cache.reason:
        skipped = "skipped, " if cache.state == "skipped" else ""
        yield from _wrapped(f"  {cache.dtype} cache: {skipped}{cache.reason}")
    if cache.state == "failed" and found is not None and limits is not None:
        yield from _wrapped(f"  {cache.dtype} cache against float32: {_beyond(found, limits)}")


def _beyond(found: Comparison, limits: Tolerance) -> str:
    """Figures that are not all allowed, and what is."""
    figures = f"max diff {found.max_diff:.2g} and KL {found.max_kl:.2g}"
    allowed = f"{limits.max_diff:.2g} and {limits.max_kl:.2g}"
    if limits.nearest_diff is not None:
        figures += f", of the nearest row {found.nearest_diff:.2g}"
        allowed += f", and {limits.nearest_diff:.2g} of the nearest row"
    return f"{figures}; allowed are {allowed}"


def _differences(where: str, tokens: Variant) -> Iterator[str]:
    """Why a comparison of tokens failed, or was skipped."""
    if tokens.state == "skipped":
        yield from _wrapped(f"  {where}: skipped, {tokens.reason}")
    elif tokens.reason:
        yield from _wrapped(f"  {where}: {tokens.reason}")
    if tokens.state == "failed" and tokens.divergences:
        worst = max(tokens.divergences, key=lambda one: one.gap)
        yield from _wrapped(
            f"  {where}: {len(tokens.divergences)} answers differ; token {worst.position} after "
            f"{worst.prompt_tokens} is {worst.found}, not {worst.expected}, {worst.gap:.2g} "
            f"standard deviations apart; {worst.allowed:.2g} are explained by rounding"
        )


def _wrapped(text: str, indent: str = "    ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
