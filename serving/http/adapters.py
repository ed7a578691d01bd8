"""LoRA adapters over HTTP: listed, loaded and scaled, with the routes of vLLM and llama.cpp."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from onnxport.errors import AdapterError, CapacityError, RequestError
from onnxport.serving.http.errors import ApiError
from onnxport.serving.http.llama_cpp import LoraScale, LoraScales
from onnxport.serving.http.service import Service
from onnxport.serving.http.strict import Strict

Text = Annotated[str, Field(min_length=1)]


class LoadRequest(Strict):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool = False
    # vLLM's, of tensors of all experts in one, which are refused
    is_3d_lora_weight: Literal[False] | None = None


class UnloadRequest(Strict):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: Text
    lora_int_id: int | None = None  # vLLM's number of the same; nobody is told one here


def add_routes(app: FastAPI, service: Service, *, allowed: bool, rescales: bool) -> None:
    """Add the endpoints.

    Args:
        app: gets them.
        service: that answers.
        allowed: whether adapters may be loaded and unloaded; else that is a 403.
        rescales: whether the scales of all requests may be changed; else that is.
    """

    @app.post("/v1/load_lora_adapter", response_model=None)
    async def load(body: LoadRequest) -> Response:
        _check_allowed(allowed)
        if body.lora_name in service.model_names:
            raise ApiError(
                400,
                f"{body.lora_name!r} is the name of the model itself; give the adapter another",
                "lora_name",
            )
        path, in_place = Path(body.lora_path), body.load_inplace
        try:
            adapter = await service.engine.load_adapter(body.lora_name, path, in_place=in_place)
        except (AdapterError, CapacityError) as error:
            is_there = await asyncio.to_thread(_is_there, path)
            raise ApiError(400 if is_there else 404, str(error)) from error
        return PlainTextResponse(f"Success: loaded {adapter.name!r} from {adapter.path}.")

    @app.post("/v1/unload_lora_adapter", response_model=None)
    async def unload(body: UnloadRequest) -> Response:
        _check_allowed(allowed)
        await service.engine.unload_adapter(body.lora_name)
        return PlainTextResponse(
            f"Success: unloaded {body.lora_name!r}; requests that use it go on."
        )

    @app.get("/lora-adapters")
    async def scales() -> list[dict[str, Any]]:
        return listed(service)

    @app.post("/lora-adapters")
    async def scale(body: LoraScales) -> dict[str, bool]:
        if not rescales:
            raise ApiError(
                403,
                "this server keeps what it was started with for requests that pick no adapter; "
                "send lora with a request, for that alone. Whoever runs it can allow more with "
                "--allow-runtime-lora, or give scales at start with --lora-scaled",
            )
        await service.engine.set_adapter_scales(_named(service, body))
        return {"success": True}


def listed(service: Service) -> list[dict[str, Any]]:
    """Return the adapters as llama.cpp's server lists them, and what they are times without `lora`.

    Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/server.
    """
    scales = service.engine.adapter_scales
    return [
        {
            "id": one.place,
            "path": str(one.path),
            "scale": scales.get(one.name, 0.0),
            "task_name": one.task_name,
            "prompt_prefix": one.prompt_prefix,
            **_invocation(service, one.invocation),
        }
        for one in sorted(service.engine.adapters, key=lambda one: one.place)
    ]


def _invocation(service: Service, tokens: Sequence[int]) -> dict[str, Any]:
    """Return what is told of an aLoRA's invocation; of any other adapter, nothing."""
    if not tokens:
        return {}
    text = service.tokenizer.decode(tokens, skip_special_tokens=False)
    return {"alora_invocation_string": text, "alora_invocation_tokens": list(tokens)}


def scales_of(
    service: Service, lora: Sequence[LoraScale] | None, adapter: str | None
) -> Mapping[str, float] | None:
    """Return what a request says of adapters by their numbers; None: nothing, as an empty list.

    Args:
        service: that answers.
        lora: what it says; adapters that are not there are as good as none.
        adapter: what its model names; None: the model itself.

    Raises:
        RequestError: no adapter has a number, or one is there twice, or the model names one, too.
    """
    if not lora:
        return None
    if adapter is not None:
        raise RequestError(
            f"model names the adapter {adapter!r}, and lora is given, too; send one of them", "lora"
        )
    return _named(service, lora)


def _named(service: Service, lora: Sequence[LoraScale]) -> Mapping[str, float]:
    """Return scales by the names of adapters, without those that are 0."""
    names = {one.place: one.name for one in service.engine.adapters}
    numbers = [one.id for one in lora]
    for one in lora:
        if numbers.count(one.id) > 1:
            raise RequestError(f"lora has the id {one.id} twice; send each once", "lora")
        if one.scale and one.id not in names:
            known = ", ".join(f"{place} ({name})" for place, name in sorted(names.items()))
            raise RequestError(
                f"lora has the id {one.id}, and the adapters that are loaded have "
                f"{known or 'none, as there is none'}; GET /lora-adapters lists them",
                "lora",
            )
    return {names[one.id]: one.scale for one in lora if one.scale}


def models(service: Service) -> list[dict[str, Any]]:
    """Return OpenAI's model object of all that requests can name, with vLLM's further fields."""
    loaded = service.engine.capabilities
    base = {
        "id": service.model_name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "onnxport",
        "root": service.model_name,
        "parent": None,
        "max_model_len": loaded.max_model_len,
        "meta": {"n_ctx": loaded.max_model_len, "n_vocab": loaded.vocab_size},  # llama.cpp's
    }
    adapters = service.engine.adapters
    change: list[dict[str, Any]] = [{"id": name} for name in service.aliases]
    change += [
        {"id": each.name, "root": str(each.path), "parent": service.model_name} for each in adapters
    ]
    return [base, *(base | one for one in change)]


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, say
        return False


def _check_allowed(allowed: bool) -> None:
    if not allowed:
        raise ApiError(
            403,
            "this server loads no adapters while it runs; whoever runs it can allow that with "
            "--allow-runtime-lora, or name adapters at start with --lora-modules",
        )
