"""`onnxport bench`: how fast a model is here, or a server anywhere."""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from onnxport.cli.arguments import Commands, command
from onnxport.cli.bench_arguments import (
    API_KEY_VARIABLE,
    NUM_PROMPTS,
    add_latency,
    add_serve,
    add_throughput,
    command_line,
    without_credentials,
)
from onnxport.errors import RequestError

if TYPE_CHECKING:
    from onnxport.serving.bench.load import Ask, Lengths, RandomPrompts
    from onnxport.serving.bench.records import Distribution, Goals, RequestRecord
    from onnxport.serving.bench.report import BenchReport, Kind, ServerSetup, Setup
    from onnxport.serving.engine import Engine
    from onnxport.serving.params import SamplingParams

FAILED = 1
WARM_UP_TOKENS = 4
MOST_SEEDS = 2**31  # servers take such as fit 32 bits


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command and its three kinds."""
    summary = "Measure latency or throughput of an artifact, or a server under load."
    parser = commands.add_parser("bench", help=summary, description=summary)
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    text = "Time a batch of equal requests, again and again."
    add_latency(command(kinds, "latency", text, _latency))
    text = "Run many requests that arrive at once."
    add_throughput(command(kinds, "throughput", text, _throughput))
    text = "Ask a running server with OpenAI's API at a rate, and stream the answers."
    add_serve(command(kinds, "serve", text, _serve))


def _latency(options: argparse.Namespace) -> int:
    """Run the iterations, each with prompts of its own."""
    _check_outputs(options)
    _at_least_0(options, "num_iters_warmup")
    count, warm = options.num_iters, options.num_iters_warmup

    def measure(engine: Engine) -> tuple[list[RequestRecord], Distribution | None]:
        from onnxport.serving.bench.local import run_local
        from onnxport.serving.bench.records import Distribution

        prompts = _random_prompts(options, engine.capabilities.vocab_size)
        iterations = [
            run_local(
                engine,
                prompts.draw(options.batch_size, options.seed + number),
                _params(options),
                name=f"bench-{number}",
            )
            for number in range(warm + count)
        ][warm:]
        # One with a request that failed was not the whole of its work.
        whole = (records for records in iterations if all(one.error is None for one in records))
        batches = (max(one.finished_s for one in records) for records in whole)
        # One after the other, so that the sum of all is a load like any other.
        return _one_after_another(iterations), Distribution.of(batches)

    return _run_here("latency", options, measure)


def _throughput(options: argparse.Namespace) -> int:
    """Run all requests at once, after a short one."""
    _check_outputs(options)

    def measure(engine: Engine) -> tuple[list[RequestRecord], Distribution | None]:
        from onnxport.serving.bench.load import Ask
        from onnxport.serving.bench.local import run_local

        asks, params = _asks(options, engine.capabilities.vocab_size), _params(options)
        run_local(engine, [Ask((1, 2, 3), WARM_UP_TOKENS)], params, name="warm-up")
        return run_local(engine, asks, params), None

    return _run_here("throughput", options, measure)


def _run_here(
    kind: Kind,
    options: argparse.Namespace,
    measure: Callable[[Engine], tuple[list[RequestRecord], Distribution | None]],
) -> int:
    """Load the artifact, measure, and report."""
    from onnxport.cli.session import open_session
    from onnxport.graphs.artifact import Artifact
    from onnxport.serving.bench.report import engine_setup, with_outcome

    started_s = time.perf_counter()
    with open_session(options.artifact, options) as engine:
        load_s = time.perf_counter() - started_s
        artifact = Artifact.read(options.artifact)
        setup = engine_setup(artifact, engine, options.threads, load_s)
        records, batch_s = measure(engine)
        setup = with_outcome(setup, engine)
    return _tell(kind, options, setup, records, batch_s)


def _serve(options: argparse.Namespace) -> int:
    """Ask the server."""
    import asyncio

    from onnxport.serving.bench.load import Ask, arrivals
    from onnxport.serving.bench.online import Target, first_model, run_online
    from onnxport.serving.bench.records import Goals
    from onnxport.serving.bench.report import ServerSetup

    _check_outputs(options)
    _at_least_0(options, "num_warmups")
    rate: float = options.request_rate
    if not rate > 0:
        raise RequestError(f"--request-rate is {rate:g}; give requests a second above 0, or inf")
    goals = Goals.parse(options.goodput) if options.goodput else None
    if options.seed is None:  # the server has cached the prompts of the run before
        options.seed = secrets.randbelow(MOST_SEEDS)
    asks = _asks(options, options.vocab_size)
    key = options.api_key or (os.environ.get(API_KEY_VARIABLE) or "").split(",")[0] or None
    base_url = options.base_url.rstrip("/").removesuffix("/v1")
    model = options.model or asyncio.run(first_model(base_url, key))
    fields = {"temperature": options.temperature, "seed": options.seed}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    target = Target(base_url, options.endpoint, model, key, options.timeout, fields)
    for number in range(options.num_warmups):
        warm = Ask(_unlike(asks[number % len(asks)].prompt, number), WARM_UP_TOKENS)
        [record] = asyncio.run(run_online(target, [warm], [0.0]))
        if record.error is not None:
            raise RequestError(f"the server does not answer such requests: {record.error}")
    times = arrivals(len(asks), rate, options.seed)
    records = asyncio.run(run_online(target, asks, times, options.max_concurrency))
    setup = ServerSetup(
        without_credentials(base_url),
        options.endpoint,
        model,
        None if math.isinf(rate) else rate,
        options.max_concurrency,
    )
    return _tell("serve", options, setup, records, None, goals)


def _tell(
    kind: Kind,
    options: argparse.Namespace,
    setup: Setup | ServerSetup,
    records: list[RequestRecord],
    batch_s: Distribution | None,
    goals: Goals | None = None,
) -> int:
    """Print the table, write what else was asked for; 1 if a request failed."""
    from datetime import UTC, datetime

    from onnxport.cli.bench_table import lines
    from onnxport.serving.bench.plot import draw
    from onnxport.serving.bench.records import summarize
    from onnxport.serving.bench.report import SCHEMA, BenchReport
    from onnxport.serving.verify.machine import this_machine
    from onnxport.version import __version__

    report = BenchReport(
        schema=SCHEMA,
        kind=kind,
        onnxport=__version__,
        date_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(kind, options),
        machine=this_machine(),
        setup=setup,
        summary=summarize(records, goals),
        batch_s=batch_s,
        requests=tuple(records),
    )
    print("\n".join(lines(report)))
    _write(report, options)
    if options.plot:
        draw(report.command, records, options.plot)
    return FAILED if report.summary.num_failed else 0


def _write(report: BenchReport, options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", "utf-8")
        print(f"Wrote {options.json}.", file=sys.stderr)


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written before anything is measured."""
    from onnxport.serving.bench.plot import check

    for path in (options.json, options.plot):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise RequestError(f"{path} cannot be written: {path.parent} is no folder; make it")
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.is_file():
                path.open("ab").close()
            elif not path.exists():  # and no pipe, whose reader would be told of an end
                made = path.resolve()
                made.open("ab").close()
                made.unlink()
        except (OSError, RuntimeError) as error:  # the second: links in a circle
            raise RequestError(f"{path} cannot be written: {error}") from error
    if options.plot is not None:
        check(options.plot)


def _at_least_0(options: argparse.Namespace, name: str) -> None:
    value = getattr(options, name)
    if value < 0:
        raise RequestError(f"--{name.replace('_', '-')} is {value}; it must be at least 0")


def _unlike(prompt: str | tuple[int, ...], number: int) -> str | tuple[int, ...]:
    """A prompt as long as another one that begins otherwise: caches of servers keep beginnings."""
    if not isinstance(prompt, str):
        return prompt[::-1]
    begin = f"{number}: "
    return begin + prompt[len(begin) :]


def _asks(options: argparse.Namespace, vocab_size: int) -> list[Ask]:
    """Return the requests of a load."""
    from onnxport.serving.bench.load import read_dataset

    if options.dataset_path is None:
        count = options.num_prompts or NUM_PROMPTS
        return _random_prompts(options, vocab_size).draw(count, options.seed)
    if options.prefix_len:
        raise RequestError(
            "--prefix-len is for random prompts and --dataset-path brings its own; give one of them"
        )
    length = _lengths("--output-len", options.output_len)
    return read_dataset(options.dataset_path, length, options.num_prompts, options.seed)


def _random_prompts(options: argparse.Namespace, vocab_size: int) -> RandomPrompts:
    from onnxport.serving.bench.load import RandomPrompts

    prefix_len = getattr(options, "prefix_len", 0)
    if prefix_len < 0:
        raise RequestError(f"--prefix-len is {prefix_len}; it must be at least 0")
    return RandomPrompts(
        _lengths("--input-len", options.input_len),
        _lengths("--output-len", options.output_len),
        prefix_len,
        vocab_size - 1,
    )


def _lengths(name: str, text: str) -> Lengths:
    from onnxport.serving.bench.load import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise RequestError(f"{name}: {error}") from None


def _params(options: argparse.Namespace) -> SamplingParams:
    from onnxport.serving.params import SamplingParams

    return SamplingParams(
        temperature=options.temperature, seed=options.seed, ignore_eos=options.ignore_eos
    )


def _one_after_another(iterations: list[list[RequestRecord]]) -> list[RequestRecord]:
    """Move each iteration behind the one before."""
    from onnxport.serving.bench.records import shifted

    moved: list[RequestRecord] = []
    start_s = 0.0
    for records in iterations:
        moved += [shifted(record, start_s) for record in records]
        start_s = max(record.finished_s for record in moved)
    return moved
