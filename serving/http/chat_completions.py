"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from onnxport.serving.http import sse
from onnxport.serving.http.generation import (
    Header,
    Service,
    Usage,
    collect,
    generate,
    token_logprobs,
    unless_disconnected,
)
from onnxport.serving.http.protocol import ChatRequest
from onnxport.serving.http.tool_calls import Parsed, ParsedCall, ToolCallParser
from onnxport.serving.outputs import Logprob, TokenLogprobs
from onnxport.serving.params import SamplingParams


async def respond(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer one request, as a whole or as a stream."""
    service.check_model(body.model)
    params = body.sampling_params(service.defaults)
    tools = body.offered_tools()
    names = {tool["function"]["name"] for tool in tools}
    prompt = await asyncio.to_thread(_encode, service, body, tools)
    if body.stream:
        header = Header.new("chatcmpl", "chat.completion.chunk", service.model_name)
        chunks = _chunks(service, prompt, params, header, names, body.include_usage)
        return await sse.respond(request, chunks)
    header = Header.new("chatcmpl", "chat.completion", service.model_name)
    usage = Usage(len(prompt))

    async def whole() -> dict[str, Any]:
        async with aclosing(generate(service.engine, [prompt], params, header.id)) as deltas:
            [result] = await collect(deltas, 1, usage)
        message, called = _message(result.text, names)
        logprobs = None if params.logprobs is None else _logprobs(result.logprobs, params.logprobs)
        reason = "tool_calls" if called else result.finish_reason
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    choice = await unless_disconnected(request, whole())
    return JSONResponse(header.body([choice], usage=usage.body()))


def _encode(service: Service, body: ChatRequest, tools: list[dict[str, Any]]) -> list[int]:
    """Return the prompt of a conversation."""
    text = service.template.render(
        [message.plain() for message in body.messages],
        tools,
        body.add_generation_prompt,
        **(body.chat_template_kwargs or {}),
    )
    return service.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)


def _message(text: str, names: set[str]) -> tuple[dict[str, Any], bool]:
    """Return the assistant's message, and whether it calls tools."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if not names:
        return message, False
    parser = ToolCallParser(names)
    first, last = parser.feed(text), parser.finish()
    calls = first.calls + last.calls
    if not calls:
        return message, False
    message["content"] = first.content + last.content or None
    message["tool_calls"] = [_tool_call(call) for call in calls]
    return message, True


async def _chunks(
    service: Service,
    prompt: list[int],
    params: SamplingParams,
    header: Header,
    names: set[str],
    include_usage: bool,
) -> sse.Chunks:
    """Yield the chunks of a stream: the role, the content, the finish reason, the usage."""
    usage = Usage(len(prompt))
    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
    parser = ToolCallParser(names) if names else None
    num_calls = 0
    started = False
    async with aclosing(generate(service.engine, [prompt], params, header.id)) as deltas:
        async for index, delta in deltas:
            usage.add(index, delta)
            if not started:
                started = True
                yield header.body([_choice({"role": "assistant", "content": ""})], **no_usage)
            logprobs = None
            if delta.logprobs and params.logprobs is not None:
                logprobs = _logprobs(token_logprobs(delta), params.logprobs)
            parsed = parser.feed(delta.text) if parser else Parsed(delta.text)
            if delta.finish_reason and parser:
                parsed = _joined(parsed, parser.finish())
            if parsed.content or logprobs:
                yield header.body([_choice({"content": parsed.content}, logprobs)], **no_usage)
            for call in parsed.calls:
                told = {"index": num_calls, **_tool_call(call)}
                num_calls += 1
                yield header.body([_choice({"tool_calls": [told]})], **no_usage)
            if delta.finish_reason:
                reason = "tool_calls" if num_calls else delta.finish_reason
                yield header.body([_choice({}, finish_reason=reason)], **no_usage)
    if include_usage:
        yield header.body([], usage=usage.body())


def _joined(first: Parsed, second: Parsed) -> Parsed:
    return Parsed(first.content + second.content, first.calls + second.calls)


def _choice(
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _tool_call(call: ParsedCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _logprobs(tokens: Sequence[tuple[int, TokenLogprobs]], top: int) -> dict[str, Any]:
    """Return OpenAI's log probabilities of a chat, with the `top` likeliest of each position."""
    content = []
    for token_id, candidates in tokens:
        ranked = sorted(candidates.values(), key=lambda one: one.rank)
        likeliest = [_token(one) for one in ranked[:top]]
        content.append({**_token(candidates[token_id]), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def _token(one: Logprob) -> dict[str, Any]:
    """Return a token with its bytes; null where the token is a part of a character."""
    text = one.decoded_token
    known = "\ufffd" not in text
    return {
        "token": text,
        "logprob": one.logprob,
        "bytes": list(text.encode()) if known else None,
    }
