"""`onnxport serve`: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from socket import socket
from ssl import SSLContext
from typing import TYPE_CHECKING, NamedTuple

from onnxport.cli.application import (
    Chosen,
    add_api_options,
    add_model_options,
    check_choices,
    open_app,
)
from onnxport.cli.arguments import Commands, command
from onnxport.cli.cache import add_source, find_artifact
from onnxport.cli.values import port, positive
from onnxport.errors import RequestError

if TYPE_CHECKING:
    from onnxport.providers.base import Capabilities

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "ONNXPORT_API_KEY"
LOOPBACK = "127.0.0.1"
PORT = 8000
MOST_GRACE_S = 86_400


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(commands, "serve", "Serve a model behind an OpenAI-compatible API.", run)
    add_source(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", help=f"address to listen on, or several with commas between them ({LOOPBACK})"
    )
    group.add_argument("--port", type=port, help=f"0 takes a free one ({PORT})")
    group.add_argument(
        "--uds", metavar="PATH", help="listen on a socket of this path, and on no address"
    )
    group.add_argument(
        "--root-path",
        type=root_path,
        default="",
        metavar="PATH",
        help="under which a proxy has the server, such as /llm (none)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="required under /v1, and for all that generates or tells of prompts; repeatable: each "
        "of several keys is a tenant. Or set "
        f"{API_KEY_VARIABLE}, with commas between several",
    )
    group.add_argument(
        "--allowed-origins",
        action="append",
        type=origin,
        default=[],
        metavar="ORIGIN",
        help="web pages of it may use the server, such as https://chat.example, or '*': of any; "
        "repeatable (none)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=grace,
        default=10.0,
        metavar="SECONDS",
        help="what running requests have to finish after a signal to stop (10)",
    )
    group.add_argument(
        "--stream-interval",
        type=positive,
        default=1,
        metavar="TOKENS",
        help="least tokens of a chunk of a stream, but for the first and the last, where requests "
        "do not say (1)",
    )
    group.add_argument(
        "--sse-ping-interval",
        type=ping_interval,
        default=10.0,
        metavar="SECONDS",
        help="a stream that has nothing to tell for so long tells that it lives, by a comment; 0: "
        "never (10)",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="streams of completions and chats tell the usage with each chunk and at the end, "
        "whatever their stream_options say",
    )
    add_api_options(group)
    group.add_argument("--access-log", action="store_true", help="log every request")
    _add_tls_options(parser)
    add_model_options(parser)


def _add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add TLS, by uvicorn's and vLLM's names."""
    group = parser.add_argument_group("TLS")
    group.add_argument(
        "--ssl-certfile", type=Path, metavar="FILE", help="the certificate, PEM: serve https (none)"
    )
    group.add_argument(
        "--ssl-keyfile", type=Path, metavar="FILE", help="its private key, PEM (in the same file)"
    )
    group.add_argument("--ssl-keyfile-password", metavar="TEXT", help="of the private key (none)")
    group.add_argument(
        "--ssl-ca-certs",
        type=Path,
        metavar="FILE",
        help="authorities that certificates of clients are of, PEM (none)",
    )
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="whether clients show a certificate: 0 no, 1 they may, 2 they must (0)",
    )


def root_path(text: str) -> str:
    """Return a path that others can be put behind."""
    from onnxport.serving.http.app import check_root_path

    try:
        check_root_path(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def grace(text: str) -> float:
    """Return seconds from 0 to MOST_GRACE_S."""
    with suppress(ValueError):
        if 0 <= (found := float(text)) <= MOST_GRACE_S:
            return found
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a number of seconds from 0 to {MOST_GRACE_S}"
    )


def ping_interval(text: str) -> float:
    """Return an interval of pings in seconds, or 0."""
    from onnxport.serving.http.app import LONGEST_PING_S, SHORTEST_PING_S

    with suppress(ValueError):
        found = float(text)
        if found == 0 or SHORTEST_PING_S <= found <= LONGEST_PING_S:
            return found
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither 0 nor a number of seconds from {SHORTEST_PING_S} to "
        f"{LONGEST_PING_S:.0f}"
    )


def origin(text: str) -> str:
    """Return an origin of web pages as browsers spell it, or "*"."""
    if text != "*" and re.fullmatch(r"https?://[^/\s?#@]+", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no origin; give scheme and host, such as https://chat.example, and the "
            "port if it is not the usual one, or '*'"
        )
    return text.lower()


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; what can be wrong without the model is told before it is exported."""
    from onnxport.serving.http.tls import TlsFiles

    logging.getLogger("onnxport").setLevel(logging.INFO)
    logging.getLogger("asyncio").addFilter(_is_news)
    chosen = check_choices(options)
    api_keys(options.api_key)
    files = TlsFiles.of(
        options.ssl_certfile,
        options.ssl_keyfile,
        options.ssl_keyfile_password,
        options.ssl_ca_certs,
        options.ssl_cert_reqs,
    )
    tls = None if files is None else files.context()
    with _bound(options) as sockets:
        return _serve(find_artifact(options), chosen, Listening(sockets, tls), options)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line says more than that a client left while its answer was being written."""
    return record.getMessage() != "socket.send() raised exception."


class Listening(NamedTuple):
    """Where the server listens, and what its connections are made with."""

    sockets: list[socket]
    tls: SSLContext | None


def _hosts(options: argparse.Namespace) -> list[str]:
    """Return the addresses to listen on.

    Raises:
        RequestError: one is empty, or there twice.
    """
    hosts = [host.strip() for host in (options.host or LOOPBACK).split(",")]
    if not all(hosts) or len({*hosts}) < len(hosts):
        raise RequestError(
            f"--host is {options.host!r}, of which an address is empty or there twice; separate "
            "addresses by single commas, as in 127.0.0.1,::1"
        )
    return hosts


def _bound(options: argparse.Namespace) -> AbstractContextManager[list[socket]]:
    """Return the sockets that were asked for, bound.

    Raises:
        RequestError: both a path and an address were asked for, or as `_hosts`.
        OnnxportError: one cannot be used.
    """
    from onnxport.serving.http.sockets import bound, unix_socket

    if options.uds is None:
        return bound(_hosts(options), PORT if options.port is None else options.port)
    if options.host is not None or options.port is not None:
        raise RequestError(
            f"--uds {options.uds} was given with --host or --port; the server listens on one of "
            "them, so leave out the others"
        )
    return unix_socket(options.uds)


def api_keys(given: list[str] | None) -> tuple[str, ...]:
    """Return the keys that were given, else those of the environment; none leave it open.

    Raises:
        RequestError: a key is empty.
    """
    variable = os.environ.get(API_KEY_VARIABLE)
    keys = given if given is not None else variable.split(",") if variable else []
    stripped = tuple(key.strip() for key in keys)
    if not all(stripped):
        raise RequestError(
            f"an API key is empty; give --api-key some text, or separate the keys in "
            f"{API_KEY_VARIABLE} by single commas"
        )
    return stripped


def kv_tokens(loaded: Capabilities) -> str:
    """Tell how many tokens there is room for; windows that give blocks up make room for more."""
    return f"{'at least ' if any(loaded.windows) else ''}{loaded.kv_tokens} tokens"


def _serve(
    artifact: Path, chosen: Chosen, listening: Listening, options: argparse.Namespace
) -> int:
    """Load the artifact and serve it."""
    from onnxport.serving.config import EngineConfig
    from onnxport.serving.http.server import ServerOptions, raise_open_files, serve
    from onnxport.serving.http.sockets import url

    sockets, tls = listening
    more = {
        "api_keys": api_keys(options.api_key),
        "allow_runtime_lora": options.allow_runtime_lora,
        "allow_lora_scales": bool(options.lora_scaled),
        "allowed_origins": tuple(options.allowed_origins),
        "sse_ping_interval_s": options.sse_ping_interval,
        "stream_interval": options.stream_interval,
        "root_path": options.root_path,
        "force_include_usage": options.enable_force_include_usage,
    }
    with open_app(artifact, chosen, options, **more) as (app, engine):

        def ready() -> None:
            loaded = engine.capabilities
            given = zip(_hosts(options), sockets, strict=True)
            address = " and ".join(url(*each, is_tls=tls is not None) for each in given)
            print(
                f"Serving {', '.join(chosen.names)} on {address} ({loaded.provider}, "
                f"{loaded.attention} attention, {kv_tokens(loaded)} of KV cache). Ctrl-C stops it.",
                file=sys.stderr,
                flush=True,
            )

        limits = EngineConfig()
        raise_open_files(
            (options.max_num_seqs or limits.max_num_seqs)
            + (options.max_queued_requests or limits.max_queued_requests)
        )
        server = ServerOptions(options.shutdown_timeout, options.access_log, tls)
        serve(app, sockets, engine.close, ready, server)
    return 0
