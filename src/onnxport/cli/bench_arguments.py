"""The options of `onnxport bench`."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from pathlib import Path

from onnxport.cli.arguments import add_choice_options, add_load_options
from onnxport.cli.engine_arguments import (
    add_cache_options,
    add_engine_options,
    add_speculation_options,
)
from onnxport.cli.values import positive, seconds

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")  # serving.bench.online's, not imported
API_KEY_VARIABLE = "ONNXPORT_API_KEY"
SECRET = "api_key"
SPECULATION = "speculation"  # of which a draft model is a folder
NUM_PROMPTS = 100


def add_latency(parser: argparse.ArgumentParser) -> None:
    """Add the options of `latency`."""
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path)
    parser.add_argument("--batch-size", type=positive, default=8, help="requests at once (8)")
    parser.add_argument("--input-len", default="32", metavar="TOKENS", help="of a prompt (32)")
    parser.add_argument("--output-len", default="128", metavar="TOKENS", help="of an answer (128)")
    parser.add_argument("--num-iters", type=positive, default=10, help="that are measured (10)")
    parser.add_argument(
        "--num-iters-warmup", type=int, default=2, help="before, which are not measured (2)"
    )
    _add_common(parser)
    _add_model(parser)


def add_throughput(parser: argparse.ArgumentParser) -> None:
    """Add the options of `throughput`."""
    parser.add_argument("artifact", metavar="ARTIFACT", type=Path)
    _add_load(parser)
    _add_common(parser)
    _add_model(parser)


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the options of `serve`."""
    parser.add_argument(
        "--base-url", default="http://127.0.0.1:8000", help="of the server, without /v1"
    )
    parser.add_argument("--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0])
    parser.add_argument("--model", help="as the server names it (the first it lists)")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"sent with each request; or set {API_KEY_VARIABLE}"
    )
    _add_load(parser)
    parser.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="PER_S",
        help="mean arrivals a second, as a Poisson process; inf (default): all at once",
    )
    parser.add_argument(
        "--max-concurrency", type=positive, metavar="N", help="most requests under way (no limit)"
    )
    parser.add_argument(
        "--num-warmups", type=int, default=1, help="requests before, not measured (1)"
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="GOAL",
        help="count requests that keep all of these, in ms: ttft:500 itl:50 tpot:40 e2e:9000; "
        "itl is the longest gap",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="SECONDS", help="of a request (600)"
    )
    parser.add_argument(
        "--vocab-size",
        type=positive,
        default=256,
        help="random token ids are below this; every model has the default (256)",
    )
    _add_common(parser, seed=None)


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-prompts",
        type=positive,
        metavar="N",
        help=f"requests ({NUM_PROMPTS}; with --dataset-path one a line)",
    )
    group.add_argument(
        "--input-len",
        default="128",
        metavar="TOKENS",
        help="of a random prompt; 32:512 draws from a range (128)",
    )
    group.add_argument(
        "--output-len", default="128", metavar="TOKENS", help="of an answer, likewise (128)"
    )
    group.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="TOKENS",
        help="that all prompts begin with, before --input-len (0)",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help='JSON lines {"prompt": text or token ids, "max_tokens": n} instead of random prompts',
    )


def _add_common(parser: argparse.ArgumentParser, seed: int | None = 0) -> None:
    group = parser.add_argument_group("measuring")
    usual = "another in each run, which the report tells" if seed is None else seed
    group.add_argument("--seed", type=int, default=seed, help=f"of prompts and arrivals ({usual})")
    group.add_argument(
        "--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers are as long as asked for (on)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write a report")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw latencies: .png, .svg, .pdf")
    parser.set_defaults(parser=parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add_load_options(parser)
    add_choice_options(parser)
    add_engine_options(parser)
    add_cache_options(parser)
    add_speculation_options(parser)


def command_line(kind: str, options: argparse.Namespace) -> str:
    """The command as one would type it: what differs from the defaults, no folders, no keys."""
    words = ["onnxport", "bench", kind]
    parser: argparse.ArgumentParser = options.parser
    for action in parser._actions:
        value = getattr(options, action.dest, action.default)
        if value == action.default or action.dest == SECRET:
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            words.append(action.option_strings[0 if value else 1])
            continue
        flag = list(action.option_strings[:1])
        if action.nargs == 0:
            words += flag
        elif isinstance(value, list) and action.nargs is None:  # repeatable
            words += [text for one in value for text in (*flag, str(one))]
        else:
            several = value if isinstance(value, list) else [value]
            words += flag + [_told(action.dest, one) for one in several]
    return shlex.join(words)


def without_credentials(url: str) -> str:
    """A URL without the user and the password that it may hold."""
    return re.sub(r"(?<=://)[^/]*@", "", url)


def _told(name: str, value: object) -> str:
    """An option's value without folders and secrets."""
    if isinstance(value, Path):
        return value.name or value.resolve().name or str(value)
    if name == "base_url":
        return without_credentials(str(value))
    if name == SPECULATION:  # by now it is known to be an object
        config = json.loads(str(value))
        return (
            json.dumps(config | {"model": Path(config["model"]).name})
            if "model" in config
            else str(value)
        )
    return str(value)
