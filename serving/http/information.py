"""What the server tells of itself: to people, probes, load balancers, and llama.cpp's clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from onnxport.serving.defaults import DEFAULTED
from onnxport.serving.http import adapters
from onnxport.serving.http.errors import SERVER_ERROR, ApiError
from onnxport.serving.http.llama_settings import sampling_settings
from onnxport.serving.http.service import Service
from onnxport.serving.metrics import Metrics
from onnxport.serving.params import SamplingParams
from onnxport.version import __version__

_Handler = Callable[[], Awaitable[Response]]


def add_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    """Add the endpoints that tell about the server."""
    _add_probes(app, service)

    @app.get("/models")
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": adapters.models(service)}

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> dict[str, Any]:
        name = model or service.model_name
        service.adapter_of(name)
        return next(each for each in adapters.models(service) if each["id"] == name)

    @app.get("/metrics", response_model=None)
    async def read_metrics(request: Request) -> Response:
        text, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/props")
    async def props() -> dict[str, Any]:
        return _props(service)

    @app.get("/slots", response_model=None)
    async def slots(fail_on_no_slot: bool = False) -> Response:
        told = _slots(service)
        if fail_on_no_slot and all(slot["is_processing"] for slot in told):
            raise ApiError(503, "all slots are busy; ask again later", kind=SERVER_ERROR)
        return JSONResponse(told)


def _add_probes(app: FastAPI, service: Service) -> None:
    """Add what is asked every few seconds: whether the server lives, and how much it has to do."""

    def add_unlisted(path: str, *methods: str) -> Callable[[_Handler], _Handler]:
        # Two methods of one route would have one operationId in `/openapi.json`.
        return app.api_route(path, methods=[*methods], response_model=None, include_in_schema=False)

    @add_unlisted("/health", "HEAD")
    @add_unlisted("/v1/health", "HEAD")
    @app.get("/health", response_model=None)
    @app.get("/v1/health", response_model=None)
    async def health() -> Response:
        return JSONResponse(_health(service), _status(service))

    @add_unlisted("/ping", "HEAD", "POST")
    @app.get("/ping", response_model=None)
    async def ping() -> Response:
        return Response(status_code=_status(service))

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.engine.num_unfinished}


def _status(service: Service) -> int:
    return 200 if service.engine.healthy else 503


def _health(service: Service) -> dict[str, Any]:
    """Return what is loaded, where it really runs, what was lost, and how much there is to do."""
    engine = service.engine
    loaded = _plain(engine.capabilities)
    failed = engine.failure is not None
    return {
        "status": "failed" if failed else "ok" if engine.healthy else "stopped",
        **({"reason": engine.failure} if failed else {}),
        "version": __version__,
        "model": service.model_name,
        "provider": loaded.pop("provider"),
        "device": loaded.pop("device"),
        "attention": loaded.pop("attention"),
        "dtype": loaded.pop("compute_dtype"),
        "kv_cache_dtype": loaded.pop("kv_cache_dtype"),
        "placement": loaded.pop("placement"),
        "on_host": loaded.pop("on_host"),
        "emulated": loaded.pop("emulated"),
        "losses": [_plain(loss) for loss in engine.losses],
        "capabilities": loaded,
        "engine": _plain(engine.stats()),
    }


def _props(service: Service) -> dict[str, Any]:
    """Return what clients of llama.cpp's server look for before they begin, by its names.

    Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/server. A context is that of one
    request, and a slot is a request that runs; fields that mean nothing here are left out.
    """
    engine, template, defaults = service.engine, service.template, service.defaults
    given = {name: getattr(defaults, name) for name in DEFAULTED}
    params = sampling_settings(SamplingParams(max_tokens=None, **given))
    return {
        "default_generation_settings": {
            "n_ctx": engine.capabilities.max_model_len,
            "params": params,
        },
        "total_slots": engine.max_num_seqs,
        "model_alias": service.model_name,
        "model_path": service.model_name,  # where it lies is nobody's business
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,  # nothing can be changed
        "endpoint_metrics": True,
        "chat_template": template.source(with_tools=False),
        "bos_token": template.special_tokens.get("bos_token", ""),
        "eos_token": template.special_tokens.get("eos_token", ""),
        "build_info": f"onnxport {__version__}",
        "is_sleeping": False,
    }


def _slots(service: Service) -> list[dict[str, Any]]:
    """Return llama.cpp's slots, of which each runs one sequence, as many as run at once here.

    They are places without a history, so the first ones are those that are in use.
    """
    engine = service.engine
    running = engine.stats().num_requests_running
    n_ctx = engine.capabilities.max_model_len
    return [
        {"id": number, "n_ctx": n_ctx, "is_processing": number < running}
        for number in range(engine.max_num_seqs)
    ]


def _plain(value: Any) -> Any:
    """Return a dataclass and what it holds as JSON can carry it."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return dict(value) if isinstance(value, Mapping) else value
