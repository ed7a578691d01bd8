"""`POST /tokenize` and `/detokenize`: text to tokens and back, with vLLM's routes and fields."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

from fastapi import FastAPI
from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from onnxport.errors import RequestError
from onnxport.serving.chat import check_variables
from onnxport.serving.http.chat_messages import (
    ChatMessage,
    ToolDefinition,
    told,
)
from onnxport.serving.http.chat_turn import encode
from onnxport.serving.http.fields import are_ids, check_json
from onnxport.serving.http.protocol import MOST_DOCUMENTS, MOST_MESSAGES, MOST_TOOLS
from onnxport.serving.http.service import Service
from onnxport.serving.http.strict import Strict

MOST_TOKENS: Final = 1 << 20  # that are encoded: more than a context, for whoever counts a document


def _ids(value: Any) -> Any:
    if are_ids(value):
        return value
    raise PydanticCustomError("list", "should be a list of token ids")


class TokenizeRequest(Strict):
    """The body of `/tokenize`: a text, or a conversation as `/v1/chat/completions` has it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)] | None = (
        None
    )
    tools: Annotated[list[ToolDefinition], Field(max_length=MOST_TOOLS)] | None = None
    add_generation_prompt: bool | None = None  # true, if the last message is not continued
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MOST_DOCUMENTS)] | None = None
    add_special_tokens: bool | None = None  # true of a text, false of a conversation
    return_token_strs: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_json(cls, body: Any) -> Any:
        if isinstance(body, dict):
            check_json(body)
        return body

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt, a text, or messages, a conversation", "prompt")
        fields = (
            *("tools", "add_generation_prompt", "continue_final_message"),
            *("chat_template_kwargs", "documents"),
        )
        alone = [name for name in fields if getattr(self, name) is not None]
        if self.messages is None and alone:
            raise RequestError(
                f"{alone[0]} is of conversations, and prompt is a text; send messages", alone[0]
            )
        check_variables(self.chat_template_kwargs)
        return self


class DetokenizeRequest(Strict):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_ids)]


def add_routes(app: FastAPI, service: Service) -> None:
    """Add both endpoints."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.adapter_of(body.model)
        return await asyncio.to_thread(_tokenize, service, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        service.adapter_of(body.model)
        return {"prompt": await asyncio.to_thread(_detokenize, service, body.tokens)}


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = service.tokenizer
    if body.messages is not None:
        tools = told(body.tools)
        tokens = encode(service, body.messages, tools, body, MOST_TOKENS).token_ids
    else:
        assert body.prompt is not None, "one of them is there"
        tokenizer.check_length(body.prompt, MOST_TOKENS)
        special = body.add_special_tokens is not False
        tokens = tokenizer.encode(body.prompt, add_special_tokens=special)
    spelled = [tokenizer.token_spelling(one) for one in tokens] if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": service.engine.capabilities.max_model_len,
        "tokens": tokens,
        "token_strs": spelled,
    }


def _detokenize(service: Service, tokens: list[int]) -> str:
    vocab_size = service.engine.capabilities.vocab_size
    if beyond := next((one for one in tokens if one >= vocab_size), None):
        raise RequestError(
            f"tokens has {beyond}; the model's tokens are 0 to {vocab_size - 1}", "tokens"
        )
    return service.tokenizer.decode(tokens, skip_special_tokens=False)
