"""Text to tokens and back, and chats to text: vLLM's routes and fields, and llama.cpp's.

`POST /tokenize`, `/detokenize` and `/apply-template`, and `GET /tokenizer_info`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
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
from onnxport.serving.http.chat_request import ChatRequest
from onnxport.serving.http.chat_turn import encode
from onnxport.serving.http.fields import are_ids, check_json
from onnxport.serving.http.protocol import MOST_DOCUMENTS, MOST_MESSAGES, MOST_TOOLS
from onnxport.serving.http.service import Service, Tokenizer
from onnxport.serving.http.strict import Strict

LLAMA_CPP: Final = ("add_special", "parse_special", "with_pieces")
MOST_TOKENS: Final = 1 << 20  # that are encoded: more than a context, for whoever counts a document


def _ids(value: Any) -> Any:
    if are_ids(value):
        return value
    raise PydanticCustomError("list", "should be a list of token ids")


class TokenizeRequest(Strict):
    """The body of `/tokenize`: a text, or a conversation as `/v1/chat/completions` has it.

    A text is `prompt` with vLLM, and `content` with llama.cpp, whose further fields go with it.
    """

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None  # false unless told otherwise
    parse_special: bool | None = None  # true: special tokens that a text spells out are tokens
    with_pieces: bool | None = None
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
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise RequestError(
                "send either prompt, a text, or messages, a conversation; or content, a text as "
                "llama.cpp calls it",
                "prompt",
            )
        if self.content is None:
            self._check_alone(LLAMA_CPP, "content")
        else:
            self._check_alone(("add_special_tokens", "return_token_strs"), "prompt or messages")
        if self.add_special and self.parse_special is False:
            raise RequestError(
                "add_special goes with parse_special true; what is put around a text is special "
                "tokens. Send one of them as false, or leave it out.",
                "add_special",
            )
        fields = (
            *("tools", "add_generation_prompt", "continue_final_message"),
            *("chat_template_kwargs", "documents"),
        )
        if self.messages is None:
            self._check_alone(fields, "messages")
        check_variables(self.chat_template_kwargs)
        return self

    def _check_alone(self, fields: Sequence[str], other: str) -> None:
        """Refuse fields without the one that they go with."""
        if alone := [name for name in fields if getattr(self, name) is not None]:
            raise RequestError(
                f"{alone[0]} goes with {other}; send that, or leave it out", alone[0]
            )


class DetokenizeRequest(Strict):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_ids)]


def add_routes(app: FastAPI, service: Service) -> None:
    """Add these endpoints."""

    @cache
    def plain() -> Tokenizer:  # made where it is asked for, for that takes a second
        return service.tokenizer.without_special(service.tokenizer.special_spellings())

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        await service.pick_adapter(body.model)
        return await asyncio.to_thread(_tokenize, service, body, plain)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        await service.pick_adapter(body.model)
        text = await asyncio.to_thread(_detokenize, service, body.tokens)
        return {"prompt": text, "content": text}  # as vLLM and as llama.cpp call it

    @app.post("/apply-template")
    async def apply_template(body: ChatRequest) -> dict[str, str]:
        await service.pick_adapter(body.model)
        return {"prompt": await asyncio.to_thread(_prompt, service, body)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str]:
        source = service.template.source(with_tools=False)
        told = {"chat_template": source} if source else {}
        return {**service.template.special_tokens, **told}


def _prompt(service: Service, body: ChatRequest) -> str:
    """Return the text that the model would be given for a chat."""
    if body.truncate_prompt_tokens is not None:
        raise RequestError(
            "truncate_prompt_tokens is about tokens, and this is about their text; leave it out",
            "truncate_prompt_tokens",
        )
    if body.add_special_tokens:
        raise RequestError(
            "add_special_tokens is about tokens, and this is about their text, which has only what "
            "the chat template writes; leave it out, or send the conversation to /tokenize",
            "add_special_tokens",
        )
    chat = body.with_effort(service.template, service.reasoning)
    return encode(service, chat.messages, chat.offered_tools(), chat, MOST_TOKENS).text


async def count(service: Service, body: ChatRequest) -> int:
    """Return how many tokens the prompt of a chat has.

    Raises:
        RequestError: the chat has none.
    """
    chat = body.with_effort(service.template, service.reasoning)
    tools = chat.offered_tools()
    encoded = await asyncio.to_thread(encode, service, chat.messages, tools, chat, MOST_TOKENS)
    prompt = encoded.token_ids
    if chat.truncate_prompt_tokens is not None:
        params = chat.sampling_params(service.defaults, service.tools)
        longest = service.engine.capabilities.max_model_len
        prompt = chat.truncated(prompt, longest, params.max_tokens)
    return len(prompt)


def counted(num_tokens: int) -> dict[str, str | int]:
    """Return OpenAI's answer to how many tokens a prompt has."""
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


def _tokenize(
    service: Service, body: TokenizeRequest, plain: Callable[[], Tokenizer]
) -> dict[str, Any]:
    """Return the tokens of a text or a conversation; `plain` makes none of what is spelled."""
    tokenizer = service.tokenizer
    if body.content is not None:
        if body.parse_special is False:
            tokenizer = plain()
        tokenizer.check_length(body.content, MOST_TOKENS)
        special = bool(body.add_special)
        tokens = tokenizer.encode(body.content, add_special_tokens=special)
        return {"tokens": _pieces(service, tokens) if body.with_pieces else tokens}
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


def _pieces(service: Service, tokens: list[int]) -> list[dict[str, Any]]:
    """Return tokens with their texts; one that is a part of a character has its bytes."""
    known = {one: service.tokenizer.token_bytes(one) for one in set(tokens)}
    return [{"id": one, "piece": _text_or_bytes(known[one])} for one in tokens]


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _detokenize(service: Service, tokens: list[int]) -> str:
    vocab_size = service.engine.capabilities.vocab_size
    if beyond := next((one for one in tokens if one >= vocab_size), None):
        raise RequestError(
            f"tokens has {beyond}; the model's tokens are 0 to {vocab_size - 1}", "tokens"
        )
    return service.tokenizer.decode(tokens, skip_special_tokens=False)
