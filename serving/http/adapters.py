"""LoRA adapters over HTTP: listed, and loaded while the server runs, with the routes of vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from onnxport.errors import AdapterError, CapacityError
from onnxport.serving.http.errors import ApiError
from onnxport.serving.http.service import Service
from onnxport.serving.http.strict import Strict

Text = Annotated[str, Field(min_length=1)]


class LoadRequest(Strict):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: Text
    lora_path: Text
    load_inplace: bool = False


class UnloadRequest(Strict):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: Text
    lora_int_id: int | None = None  # vLLM's number of the same; nobody is told one here


def add_routes(app: FastAPI, service: Service, *, allowed: bool) -> None:
    """Add the endpoints that load and unload; they answer 403 unless `allowed`."""

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
            raise ApiError(400, str(error)) from error
        return PlainTextResponse(f"Loaded {adapter.name!r} from {adapter.path}.")

    @app.post("/v1/unload_lora_adapter", response_model=None)
    async def unload(body: UnloadRequest) -> Response:
        _check_allowed(allowed)
        await service.engine.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Unloaded {body.lora_name!r}; requests that use it go on.")


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


def _check_allowed(allowed: bool) -> None:
    if not allowed:
        raise ApiError(
            403,
            "this server loads no adapters while it runs; whoever runs it can allow that with "
            "--allow-runtime-lora, or name adapters at start with --lora-modules",
        )
