"""`POST /infill`, llama.cpp's: what stands between two texts, for editors that complete code."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from onnxport.serving.http.errors import FINAL, ApiError
from onnxport.serving.http.llama_completion import Asked, respond
from onnxport.serving.http.llama_prompts import Prompted
from onnxport.serving.http.llama_request import LlamaBody, without
from onnxport.serving.http.protocol import MOST_TRUNCATED
from onnxport.serving.http.service import Service
from onnxport.serving.http.strict import Strict
from onnxport.serving.infill import Extra, Infill
from onnxport.serving.params import SamplingParams

PATH: Final = "/infill"
MOST_EXTRAS: Final = 1 << 12
UNNAMED: Final = "tmp"  # llama.cpp's name of a text without one
NOT_SUPPORTED: Final = "not_supported_error"


class InputExtra(Strict):
    """A text from elsewhere."""

    text: str
    filename: str | None = None
    time: Any = None  # when an editor took it


class InfillRequest(LlamaBody):
    """The body of `/infill`."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InputExtra], Field(max_length=MOST_EXTRAS)] | None = None
    prompt: str | None = None  # goes on with the prefix


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoint."""

    @app.post(PATH, response_model=None)
    async def infill(request: Request, body: InfillRequest) -> Response:
        fills = filling(service)
        await service.pick_adapter(body.model)
        asked = await Asked.of(service, body)
        params = fills.ended(asked.params)
        if body.ignore_eos:
            params = without(fills.ends, params)
        asked = replace(asked, params=params)
        prompt = await asyncio.to_thread(partial(_prompt, service, body, asked.params, fills))
        return await respond(service, request, body, asked, [prompt])


def filling(service: Service, field: str | None = None) -> Infill:
    """Return how the model fills in.

    Args:
        service: that serves it.
        field: that asks for it; None: all of the request does.

    Raises:
        ApiError: it cannot: a 400 about the field, else a 501.
    """
    if service.infill is None:
        why = (
            "this model's vocabulary has no tokens to fill in by, for prefix, suffix and middle; "
            "serve a model that was trained to, or name its tokens with --infill-tokens"
        )
        if field is not None:
            raise ApiError(400, f"{field} was given, and {why}", field)
        raise ApiError(501, why, kind=NOT_SUPPORTED, headers=FINAL)
    return service.infill


def _prompt(
    service: Service, body: InfillRequest, params: SamplingParams, fills: Infill
) -> Prompted:
    """Return the prompt, as much of it as there is room for beside the answer.

    An answer without a limit is left a quarter of the context.
    """
    longest = service.engine.capabilities.max_model_len
    answer = longest // 4 if params.max_tokens is None else params.max_tokens
    most = longest if body.only_prompt else longest - answer
    prefix = body.input_prefix + (body.prompt or "")
    extras = [
        Extra(UNNAMED if one.filename is None else one.filename, one.text)
        for one in body.input_extra or ()
    ]
    for text in (prefix, body.input_suffix, *(part for extra in extras for part in extra)):
        service.tokenizer.check_length(text, MOST_TRUNCATED)
    token_ids, is_cut = fills.in_project(prefix, body.input_suffix, extras, most)
    return Prompted(token_ids, is_cut=is_cut)
