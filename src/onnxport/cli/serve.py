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
from typing import TYPE_CHECKING, NamedTuple, get_args

from onnxport.cli.adapters import add_adapter_options
from onnxport.cli.arguments import (
    Commands,
    add_cache_options,
    add_choice_options,
    add_embedding_options,
    add_engine_options,
    add_export_options,
    add_load_options,
    add_queue_options,
    add_reasoning_option,
    add_score_template,
    add_speculation_options,
    command,
    engine_config,
)
from onnxport.cli.cache import add_source, find_artifact
from onnxport.cli.model_defaults import (
    add_generation_config,
    add_override,
    add_repetition_option,
    add_template_options,
    chat_template,
    sampling_defaults,
    template_text,
)
from onnxport.cli.session import load_engine
from onnxport.cli.values import json_object, port, positive, seconds
from onnxport.errors import RequestError
from onnxport.serving.config import LogprobsMode

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
    group.add_argument("--host", help=f"address to listen on ({LOOPBACK})")
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
        "--served-model-name",
        type=model_name,
        nargs="+",
        metavar="NAME",
        help="what requests may call the model, put behind MODEL; of several names answers tell "
        "the first (the model's)",
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
        "--request-timeout",
        type=timeout,
        metavar="SECONDS",
        help="end requests that take longer, unless they say timeout_s themselves (none)",
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
        "--seed",
        type=int,
        metavar="N",
        help="makes requests without a seed of their own reproducible, by their order (none)",
    )
    group.add_argument(
        "--max-logprobs",
        type=int,
        metavar="N",
        help="most of the likeliest tokens whose log probabilities a request may ask for at each "
        "position; -1: no limit, and requests that ask for -1 get all tokens (20)",
    )
    group.add_argument(
        "--logprobs-mode",
        choices=get_args(LogprobsMode),
        help="what log probabilities are of: of the model's own logits (raw_logprobs, default), or "
        "of what tokens are drawn from; or these logits themselves",
    )
    add_generation_config(group)
    add_override(group)
    add_repetition_option(group, ", of requests that do not say")
    add_template_options(group, "--default-chat-template-kwargs")
    add_reasoning_option(group)
    group.add_argument(
        "--thinking-token-budget",
        type=int,
        metavar="N",
        help="most tokens that chats, responses and messages think which do not say (no limit)",
    )
    group.add_argument(
        "--tool-call-parser",
        type=tool_call_parser,
        default="auto",
        metavar="FORMAT",
        help="how the model writes tool calls: apertus, cohere_command3, cohere_command4, "
        "cohere_command_r, deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, "
        "functionary_v3_1, functionary_v3_2, functiongemma, gemma4, gigachat3, glm4, glm45, "
        "granite, hermes, hunyuan_a13b, hy_v3, kimi_k2, kimi_k3, lfm2, llama3_json, minicpm5, "
        "minimax, minimax_m2, minimax_m3, mistral, nemotron_json, openai, phi4_mini_json, "
        "pythonic, qwen3_coder, seed_oss, solar_open or xlam (auto: as its chat template says)",
    )
    group.add_argument(
        "--infill-tokens",
        type=infill_tokens,
        metavar="JSON",
        help="the tokens by which the model fills in a gap, as its vocabulary spells them: prefix, "
        "suffix and middle, perhaps pad, repo_name and file_separator (those that are known of its "
        "family, where its vocabulary has them)",
    )
    group.add_argument(
        "--spm-infill",
        action="store_true",
        help="fill in with what stands behind the gap first, for models that prefer that",
    )
    group.add_argument("--access-log", action="store_true", help="log every request")
    _add_tls_options(parser)
    add_load_options(parser)
    add_choice_options(parser)
    add_engine_options(parser)
    add_embedding_options(parser)
    add_score_template(parser)
    add_queue_options(parser)
    add_cache_options(parser)
    add_speculation_options(parser)
    add_adapter_options(parser)
    add_export_options(parser)


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


def timeout(text: str) -> float:
    """Return seconds above 0, and as many at most as a request may say."""
    from onnxport.serving.params import MAX_TIMEOUT_S

    if (found := seconds(text)) > MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(
            f"{text} is more than {MAX_TIMEOUT_S:.0f} seconds; leave it out for no limit"
        )
    return found


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


def model_name(text: str) -> str:
    """Return a name that is one."""
    if not text:
        raise argparse.ArgumentTypeError("a model without a name cannot be asked for; give it one")
    return text


def origin(text: str) -> str:
    """Return an origin of web pages as browsers spell it, or "*"."""
    if text != "*" and re.fullmatch(r"https?://[^/\s?#@]+", text) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no origin; give scheme and host, such as https://chat.example, and the "
            "port if it is not the usual one, or '*'"
        )
    return text.lower()


def tool_call_parser(text: str) -> str:
    """Return the name of a format of tool calls, or "auto"."""
    from onnxport.serving.http.tool_formats.registry import AUTO, NAMES

    if text not in (AUTO, *NAMES):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no format of tool calls; give {AUTO}, or one of {', '.join(NAMES)}"
        )
    return text


def infill_tokens(text: str) -> dict[str, object]:
    """Return tokens of filling in by their names."""
    from onnxport.serving.infill import InfillNames

    found: dict[str, object] = json_object(text)
    try:
        InfillNames.of(found, suffix_first="middle" not in found)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; what can be wrong without the model is told before it is exported."""
    from onnxport.serving.http.tls import TlsFiles

    logging.getLogger("onnxport").setLevel(logging.INFO)
    logging.getLogger("asyncio").addFilter(_is_news)
    template = template_text(options)
    names = model_names(options)
    api_keys(options.api_key)
    engine_config(options)
    check_infill(options)
    files = TlsFiles.of(
        options.ssl_certfile,
        options.ssl_keyfile,
        options.ssl_keyfile_password,
        options.ssl_ca_certs,
        options.ssl_cert_reqs,
    )
    tls = None if files is None else files.context()
    with _bound(options) as sock:
        return _serve(find_artifact(options), names, Listening(sock, tls), options, template)


def check_infill(options: argparse.Namespace) -> None:
    """Refuse tokens of filling in that lack the one behind the suffix, where that is last.

    Raises:
        RequestError: they do.
    """
    from onnxport.serving.infill import InfillNames

    if options.infill_tokens is not None:
        InfillNames.of(options.infill_tokens, suffix_first=options.spm_infill)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line says more than that a client left while its answer was being written."""
    return record.getMessage() != "socket.send() raised exception."


class Listening(NamedTuple):
    """Where the server listens, and what its connections are made with."""

    sock: socket
    tls: SSLContext | None


def _bound(options: argparse.Namespace) -> AbstractContextManager[socket]:
    """Return the socket that was asked for, bound.

    Raises:
        RequestError: it was asked for two.
        OnnxportError: it cannot be used.
    """
    from onnxport.serving.http.sockets import bind, unix_socket

    if options.uds is None:
        return bind(options.host or LOOPBACK, PORT if options.port is None else options.port)
    if options.host is not None or options.port is not None:
        raise RequestError(
            f"--uds {options.uds} was given with --host or --port; the server listens on one of "
            "them, so leave out the others"
        )
    return unix_socket(options.uds)


def model_names(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names that requests may call the model by, the one that answers tell first.

    Raises:
        RequestError: one is given twice, or an adapter has it.
    """
    source: str = options.source
    path = Path(source)
    own = path.resolve().name if path.exists() else source
    names = tuple(options.served_model_name or (own,))
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(f"--served-model-name has {twice[0]!r} twice; give each name once")
    for adapter, _ in options.lora_modules:
        if adapter in names:
            raise RequestError(
                f"--lora-modules calls an adapter {adapter!r}, as the model itself is called; "
                "choose another name, or another --served-model-name"
            )
    return names


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
    artifact: Path,
    names: tuple[str, ...],
    listening: Listening,
    options: argparse.Namespace,
    source: str | None,
) -> int:
    """Load the artifact and serve it; `source` is its chat template, if it is not its own."""
    import asyncio

    from onnxport.graphs.artifact import Artifact
    from onnxport.serving.config import EngineConfig
    from onnxport.serving.http.app import AppOptions, create_app
    from onnxport.serving.http.server import ServerOptions, raise_open_files, serve
    from onnxport.serving.http.sockets import url
    from onnxport.serving.reasoning_formats import reasoning_format
    from onnxport.serving.worker import AsyncEngine

    keys = api_keys(options.api_key)
    template = chat_template(artifact, source, options.template_variables)
    defaults = sampling_defaults(artifact, options)
    logger.info("requests that do not say are sampled with %s", defaults)
    found = reasoning_format(options.reasoning_parser, template.sources.values())
    logger.info(
        "reasoning parser %s: %s",
        options.reasoning_parser,
        "no reasoning is told from answers" if found is None else f"reasoning is {found}",
    )
    engine = AsyncEngine(load_engine(artifact, options, found.tags if found else ()))

    sock, tls = listening

    def ready() -> None:
        loaded = engine.capabilities
        address = url(options.host or LOOPBACK, sock, is_tls=tls is not None)
        print(
            f"Serving {', '.join(names)} on {address} ({loaded.provider}, "
            f"{loaded.attention} attention, {kv_tokens(loaded)} of KV cache). Ctrl-C stops it.",
            file=sys.stderr,
            flush=True,
        )

    try:
        choices = AppOptions(
            defaults,
            keys,
            options.request_timeout,
            allow_runtime_lora=options.allow_runtime_lora,
            allowed_origins=tuple(options.allowed_origins),
            reasoning_parser=options.reasoning_parser,
            tool_call_parser=options.tool_call_parser,
            aliases=names[1:],
            sse_ping_interval_s=options.sse_ping_interval,
            stream_interval=options.stream_interval,
            root_path=options.root_path,
            thinking_token_budget=options.thinking_token_budget,
            infill_tokens=options.infill_tokens,
            spm_infill=options.spm_infill,
            artifact=Artifact.read(artifact, check_graphs=False).manifest.fingerprint,
        )
        app = create_app(engine, names[0], template, choices)
        limits = EngineConfig()
        raise_open_files(
            (options.max_num_seqs or limits.max_num_seqs)
            + (options.max_queued_requests or limits.max_queued_requests)
        )
        server = ServerOptions(options.shutdown_timeout, options.access_log, tls)
        serve(app, sock, engine.close, ready, server)
    finally:
        asyncio.run(engine.close())
    return 0
