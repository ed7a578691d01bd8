"""The application: routes over one engine. Built by `create_app`; there is no global one."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http import (
    adapters,
    anthropic,
    chat_completions,
    classification,
    cohere_embeddings,
    completions,
    controls,
    embeddings,
    errors,
    infill,
    information,
    llama_completion,
    messages,
    responses,
    scoring,
    tokens,
)
from onnxport.serving.http.adapter_folder import AdapterFolder
from onnxport.serving.http.chat_request import ChatRequest
from onnxport.serving.http.completion_request import CompletionRequest
from onnxport.serving.http.generation import DisconnectedError
from onnxport.serving.http.invocations import CLASSIFY, EMBEDDINGS, InvocationsMiddleware
from onnxport.serving.http.messages_request import CountRequest, MessagesRequest
from onnxport.serving.http.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    RootPathMiddleware,
)
from onnxport.serving.http.request_ids import HEADER, RequestIdMiddleware
from onnxport.serving.http.responses_request import ResponsesRequest
from onnxport.serving.http.service import Engine, Service
from onnxport.serving.http.service import Tokenizer as ServiceTokenizer
from onnxport.serving.http.tool_formats.syntax import ToolSyntax
from onnxport.serving.infill import Infill, InfillNames
from onnxport.serving.metrics import CacheConfig, Metrics
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.reasoning import AnyFormat
from onnxport.serving.reasoning_formats import AUTO, reasoning_format
from onnxport.serving.thought_budget import thought_budget, with_thought
from onnxport.serving.tokenizer import Tokenizer
from onnxport.version import __version__

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 1024 * 1024
SHORTEST_PING_S = 0.05
LONGEST_PING_S = 3600.0
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it marks the access log


@dataclass(frozen=True, slots=True)
class AppOptions:
    """What whoever runs the server chooses about its API.

    Attributes:
        defaults: how requests that do not say are sampled; by itself OpenAI's defaults.
        api_keys: one of them is required as a bearer token for `middleware.PROTECTED`; or as
            the header `x-api-key`. None leave the server open. Where there are
            several, each is a tenant of its own; otherwise the field `user` names the tenant.
        request_timeout_s: deadline of requests that give none; None: no deadline.
        max_body_bytes: larger bodies are refused.
        allow_runtime_lora: whether requests may load LoRA adapters from folders of this machine.
        lora_folder: of adapters that are loaded when a request names them; None: there is none.
        allow_lora_scales: whether they may change what adapters are times in all others that pick
            none; so they may with the one before, too.
        allowed_origins: web pages of these may use the server, such as https://chat.example, "*" of
            any (CORS); none: no page of another origin.
        reasoning_parser: how reasoning is told from the answer: a name that
            `serving/reasoning.py` knows, "none", or "auto", as the chat template has it.
        tool_call_parser: the format that the model writes tool calls in; "auto": the one that its
            chat template asks for.
        aliases: further names that requests may call the model by; answers tell its first one.
        sse_ping_interval_s: streams that have nothing to tell for so long tell that they live, by a
            comment; 0: never.
        root_path: under which a proxy has the server, such as /llm; requests may have it in front
            of their path, or not. "": none.
        thinking_token_budget: of chats, responses and messages that think and give none; None: no
            budget.
        stream_interval: tokens that a chunk of a stream has at least, but for the first and the
            last, where requests do not say.
        infill_tokens: by which the model fills in, as `infill.InfillNames` calls them; None: those
            that its vocabulary is known to have.
        force_include_usage: whether streams of completions and chats tell the usage with each chunk
            and at the end, asked or not.
        spm_infill: whether what stands behind a gap comes first there; Codestral has it so anyway.
        artifact: what the graph and weights hash to, `Manifest.fingerprint`; a part of the
            `system_fingerprint` of answers. "": that is not known.
    """

    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    request_timeout_s: float | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    allow_runtime_lora: bool = False
    lora_folder: Path | None = None
    allow_lora_scales: bool = False
    allowed_origins: tuple[str, ...] = ()
    reasoning_parser: str = AUTO
    tool_call_parser: str = AUTO
    aliases: tuple[str, ...] = ()
    sse_ping_interval_s: float = 10.0  # proxies give up after a minute, some after half of one
    root_path: str = ""
    thinking_token_budget: int | None = None
    stream_interval: int = 1
    infill_tokens: Mapping[str, object] | None = None
    spm_infill: bool = False
    force_include_usage: bool = False
    artifact: str = ""

    def __post_init__(self) -> None:
        """Refuse a deadline that no request could have, and what is no interval or path.

        Raises:
            RequestError: the deadline is not above 0, or too long; the interval is not in its
                range; the path is none; the budget is below -1; a chunk has no token; tokens of
                filling in are not named as they should be.
        """
        RequestOptions(timeout_s=self.request_timeout_s)
        check_root_path(self.root_path)
        SamplingParams(thinking_token_budget=self.thinking_token_budget)
        if self.stream_interval < 1:
            raise RequestError(
                f"stream_interval is {self.stream_interval}; a chunk has 1 token or more",
                "stream_interval",
            )
        if self.infill_tokens is not None:
            InfillNames.of(self.infill_tokens, suffix_first=self.spm_infill)
        interval_s = self.sse_ping_interval_s
        if interval_s and not SHORTEST_PING_S <= interval_s <= LONGEST_PING_S:
            raise RequestError(
                f"sse_ping_interval_s is {interval_s}; it must be 0, for no pings, or in "
                f"[{SHORTEST_PING_S}, {LONGEST_PING_S}]",
                "sse_ping_interval_s",
            )


def check_root_path(path: str) -> None:
    """Raise RequestError unless a path is "", or one that others can be put behind.

    One that the server's own paths begin with would be taken off those.
    """
    if f"{path}/".startswith(("/v1/", "/v2/", "/chat/", "/responses/")):
        raise RequestError(
            f"root_path is {path[:80]!r}, which paths of the API itself begin with; give another, "
            "such as /llm",
            "root_path",
        )
    if path and re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path) is None:
        raise RequestError(
            f"root_path is {path[:80]!r}; give a path that begins with / and does not end with it, "
            "of letters, digits and -._~, such as /llm",
            "root_path",
        )


def create_app(
    engine: Engine, model_name: str, template: ChatTemplate, options: AppOptions | None = None
) -> FastAPI:
    """Return the server over `engine`, which the caller opens and closes.

    Args:
        engine: runs the requests; it must have a tokenizer. The server's metrics listen to it.
        model_name: what requests call the model, if they do not mean an adapter.
        template: renders chats; an empty one makes chat requests fail with a reason.
        options: see `AppOptions`; None for the defaults.

    Raises:
        RequestError: there is no format of tool calls of the name that was given, or the model has
            a name twice, or an empty one, or can have no budget of thinking, and one was given, or
            its vocabulary lacks a token that was named to fill in by.
    """
    options = options or AppOptions()
    _check_names((model_name, *options.aliases))
    app = FastAPI(title="onnxport", version=__version__, docs_url=None, redoc_url=None)
    tools = ToolSyntax.of(options.tool_call_parser, template, engine.tokenizer)
    reasoning = reasoning_format(options.reasoning_parser, template.sources.values())
    _check_budget(engine, reasoning, options.thinking_token_budget)
    service = Service(
        engine,
        model_name,
        template,
        options.defaults,
        options.request_timeout_s,
        tools,
        reasoning,
        options.aliases,
        options.sse_ping_interval_s,
        options.thinking_token_budget,
        options.stream_interval,
        _infill(engine.tokenizer, options),
        closes_thoughts=_closes_thoughts(engine, reasoning),
        adapter_folder=None if options.lora_folder is None else AdapterFolder(options.lora_folder),
        forces_usage=options.force_include_usage,
        artifact=options.artifact,
    )
    metrics = Metrics(model_name, engine.stats, lambda: _cache_config(engine))
    engine.add_listener(metrics)
    errors.install(app)
    app.add_exception_handler(DisconnectedError, _client_is_gone)
    judges = engine.classifier is not None and engine.embedder is None
    app.add_middleware(InvocationsMiddleware, of_input=CLASSIFY if judges else EMBEDDINGS)
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=options.max_body_bytes)
    if options.api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=options.api_keys)
    if options.allowed_origins:  # around the others, so that a page may read what they refuse
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After", HEADER, anthropic.ID_HEADER),
        )
    app.add_middleware(RequestIdMiddleware)
    if options.root_path:
        app.add_middleware(RootPathMiddleware, root_path=options.root_path)
    _add_generation(app, service)
    information.add_routes(app, service, metrics)
    tokens.add_routes(app, service)
    controls.add_routes(app, service)
    llama_completion.add_routes(app, service)
    infill.add_routes(app, service)
    embeddings.add_routes(app, service)
    cohere_embeddings.add_routes(app, service)
    classification.add_routes(app, service)
    scoring.add_routes(app, service)
    runtime = options.allow_runtime_lora
    rescales = runtime or options.allow_lora_scales
    adapters.add_routes(app, service, allowed=runtime, rescales=rescales)
    return app


def _infill(tokenizer: ServiceTokenizer | None, options: AppOptions) -> Infill | None:
    """Return how the model fills in; None: it has no tokens for that.

    Raises:
        RequestError: the vocabulary lacks a token that was named by hand.
    """
    if tokenizer is None:
        return None
    if options.infill_tokens is not None:
        names = InfillNames.of(options.infill_tokens, suffix_first=options.spm_infill)
        return Infill(tokenizer, names)
    found = Infill.find(tokenizer, suffix_first=options.spm_infill)
    if found is not None:
        logger.info("gaps are filled in by the tokens %s of the vocabulary", found.names)
    return found


def _check_budget(engine: Engine, known: AnyFormat | None, budget: int | None) -> None:
    """Raise RequestError if there is a budget of thinking, and this model can never have one."""
    params = SamplingParams(thinking_token_budget=budget)
    thought = None if known is None else known.thought("", None)
    params = with_thought(params, thought, is_known=known is not None)
    tokenizer = engine.tokenizer
    if params.thought is not None and isinstance(tokenizer, Tokenizer):
        thought_budget(params, tokenizer, engine.capabilities.vocab_size)


def _closes_thoughts(engine: Engine, known: AnyFormat | None) -> bool:
    """Whether it is known how the model closes a thought, and it has the tokens for that."""
    try:
        _check_budget(engine, known, 0)
    except RequestError:
        return False
    return True


def _check_names(names: Sequence[str]) -> None:
    if "" in names or len(set(names)) < len(names):
        raise RequestError(
            f"the model is served as {', '.join(map(repr, names))}; give names that are not empty, "
            "each once"
        )


def _cache_config(engine: Engine) -> CacheConfig:
    """Return what the KV cache is now, for another provider may have taken over."""
    loaded = engine.capabilities
    return CacheConfig(
        loaded.block_size, loaded.num_blocks, loaded.kv_cache_dtype, engine.prefix_caching
    )


def _add_generation(app: FastAPI, service: Service) -> None:
    """Add the endpoints that generate."""

    @app.post("/v1/completions", response_model=None)
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        return await completions.respond(service, request, body)

    @app.post("/chat/completions", response_model=None)
    @app.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
        return await chat_completions.respond(service, request, body)

    @app.post("/chat/completions/input_tokens")
    @app.post("/v1/chat/completions/input_tokens")
    async def count_chat_tokens(body: ChatRequest) -> dict[str, str | int]:
        await service.pick_adapter(body.model)
        return tokens.counted(await tokens.count(service, body))

    @app.post("/responses", response_model=None)
    @app.post("/v1/responses", response_model=None)
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        return await responses.respond(service, request, body)

    @app.post("/responses/input_tokens")
    @app.post("/v1/responses/input_tokens")
    async def count_response_tokens(body: ResponsesRequest) -> dict[str, str | int]:
        return await responses.count(service, body)

    @app.post(anthropic.PATH, response_model=None)
    async def create_message(request: Request, body: MessagesRequest) -> Response:
        return await messages.respond(service, request, body)

    @app.post(f"{anthropic.PATH}/count_tokens")
    async def count_message_tokens(body: CountRequest) -> dict[str, int]:
        return await messages.count(service, body)


async def _client_is_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
