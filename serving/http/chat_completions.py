"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from onnxport.serving.http import sse
from onnxport.serving.http.chat_request import ChatRequest
from onnxport.serving.http.chat_turn import Turn
from onnxport.serving.http.controls import controlled
from onnxport.serving.http.generation import collect, generate, unless_disconnected
from onnxport.serving.http.intervals import spaced
from onnxport.serving.http.job import Collected, Header, Run, token_logprobs
from onnxport.serving.http.logprobs import chat_logprobs, prompt_entries
from onnxport.serving.http.reasoning import DeltaSplitter, Thinking
from onnxport.serving.http.request_ids import take_id
from onnxport.serving.http.service import Service
from onnxport.serving.http.timings import prompt_progress
from onnxport.serving.http.tool_calls import Parsed, ToolCallParser
from onnxport.serving.http.tool_formats.base import ParsedCall
from onnxport.serving.outputs import CompletionDelta, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Told:
    """What a request decides about how its answer is told."""

    parser: Callable[[], ToolCallParser | None]  # see `Turn.parser`
    named: bool  # whether `tool_choice` has the name of one
    top: int | None  # log probabilities of each position; None: none are told
    named_tokens: tuple[int, ...]  # whose log probabilities are told with them
    ids: bool  # whether token ids are told
    by_id: bool  # whether tokens of log probabilities are named by their ids
    thinking: Thinking
    echo: str  # what the content begins with, whatever was generated

    def logprobs(
        self, service: Service, tokens: Sequence[tuple[int, TokenLogprobs]]
    ) -> dict[str, Any] | None:
        """Return the log probabilities of tokens; None where none are told."""
        if self.top is None:
            return None
        return chat_logprobs(
            service.tokenizer, tokens, self.top, named=self.named_tokens, by_id=self.by_id
        )

    def finish_reason(self, reason: str | None, called: bool) -> str | None:
        """Return why a choice ended, which OpenAI, and vLLM after it, tells by how it was asked.

        A call of the one function that may be called is a "stop", any other one is "tool_calls".
        What was cut stays as it is: calls may be missing.
        """
        return "tool_calls" if called and not self.named and reason == "stop" else reason


async def respond(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer one request, as a whole or as a stream."""
    name = f"chatcmpl-{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    body = body.with_usage() if service.forces_usage else body
    turn = await Turn.of(service, request, body, name, adapter)
    job, params = turn.job, turn.job.params
    told = Told(
        partial(turn.parser, service),
        body.named_function is not None,
        params.logprobs,
        params.logprob_token_ids or (),
        bool(body.return_token_ids),
        bool(body.return_tokens_as_token_ids),
        turn.thinking,
        body.echoed,
    )
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    header = Header.new(name, kind, turn.model, service.fingerprint)
    control: AbstractContextManager[None] = nullcontext()
    if body.reasoning_control:
        control = controlled(service, request, name, job)
    if body.stream:
        chunks = _chunks(service, turn, header, told, body, control)
        interval_s = body.ping_interval_s(service.ping_interval_s)
        return await sse.respond(request, chunks, interval_s)
    usage = told.thinking.usage(job, service.tokenizer)

    async def whole() -> dict[str, Any]:
        with control:
            async with aclosing(generate(service.engine, job)) as deltas:
                results = await collect(deltas, usage)
        more: dict[str, Any] = {
            "prompt_logprobs": prompt_entries(results[0].prompt_logprobs)
            if params.prompt_logprobs is not None
            else None,
            "prompt_token_ids": list(job.prompts[0]) if told.ids else None,
            "prompt_text": turn.prompt_text,
        }
        if body.timings_per_token:
            more["timings"] = usage.timings()
        choices = [
            _whole(service, index, each, told)
            for index, each in enumerate(results)
            if not each.is_missing
        ]
        return header.body(choices, usage=usage.body(), **more)

    return JSONResponse(await unless_disconnected(request, whole()))


def _whole(service: Service, index: int, result: Collected, told: Told) -> dict[str, Any]:
    """Return a choice that has ended."""
    message, called = _message(service, result.text, told)
    if told.echo:
        message["content"] = told.echo + (message["content"] or "")
    return {
        "index": index,
        "message": message,
        "logprobs": told.logprobs(service, result.logprobs),
        "finish_reason": told.finish_reason(result.finish_reason, called),
        "stop_reason": result.stop_reason,
        "token_ids": result.token_ids if told.ids else None,
    }


def _message(service: Service, text: str, told: Told) -> tuple[dict[str, Any], bool]:
    """Return the assistant's message, and whether it calls tools."""
    reasoning, text = told.thinking.parted(text)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text or (None if reasoning else ""),
        "refusal": None,
        **told.thinking.fields(reasoning),
    }
    parser = told.parser()
    if parser is None:
        return message, False
    parsed = parser.take(text, is_last=True)
    if not parsed.calls:
        message["content"] = parsed.content or (None if reasoning else "")
        return message, False
    message["content"] = parsed.content or None
    message["tool_calls"] = [_tool_call(service, call) for call in parsed.calls]
    return message, True


async def _chunks(
    service: Service,
    turn: Turn,
    header: Header,
    told: Told,
    body: ChatRequest,
    control: AbstractContextManager[None],
) -> sse.Chunks:
    """Yield the chunks of a stream, each of one choice, and the usage at the end if asked for."""
    job = turn.job
    usage = told.thinking.usage(job, service.tokenizer)
    more: dict[str, Any] = {"usage": None} if body.include_usage else {}
    choices = [_Streamed(service, index, told) for index in range(job.num_choices)]
    first: dict[str, Any] = {"prompt_token_ids": list(job.prompts[0])} if told.ids else {}
    if turn.prompt_text is not None:
        first["prompt_text"] = turn.prompt_text

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        nonlocal first
        if body.continuous_usage:
            more["usage"] = usage.so_far()
        if body.timings_per_token:
            more["timings"] = usage.timings()
        made = header.body([choice], **more, **first)
        first = {}
        return made

    with control:
        async with aclosing(spaced(service.engine, job)) as deltas:
            async for index, delta in deltas:
                if delta.is_missing:
                    continue
                for choice in choices[index].begin():
                    yield chunk(choice)
                runs = usage.add(index, delta)
                if progress := prompt_progress(delta, len(job.prompts[0])):
                    yield chunk(choices[index].nothing()) | progress
                    continue
                for choice in choices[index].take(delta, runs):
                    yield chunk(choice)
    if body.include_usage:
        yield header.body([], **{**more, "usage": usage.body()})


class _Streamed:
    """One choice of a stream: role, reasoning, content and calls, the finish reason."""

    def __init__(self, service: Service, index: int, told: Told) -> None:
        self._service = service
        self._index = index
        self._told = told
        self._splitter = DeltaSplitter(told.thinking)
        self._parser = told.parser()
        self._num_calls = 0
        self._started = False

    def begin(self) -> Iterator[dict[str, Any]]:
        """Yield what comes before the first token, the role and what is echoed; later nothing."""
        if self._started:
            return
        self._started = True
        yield self._choice({"role": "assistant", "content": ""})
        if self._told.echo:
            yield self._choice({"content": self._told.echo})

    def nothing(self) -> dict[str, Any]:
        """Return a chunk without anything of the answer."""
        return self._choice({})

    def take(self, delta: CompletionDelta, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
        """Yield what one delta adds, a chunk each; `runs` of its tokens may be reasoning."""
        for is_thought, piece in self._splitter.take(delta, runs):
            if is_thought:
                told = self._told.thinking.fields(piece.text) if piece.text else {}
                yield from self._piece(told if any(told.values()) else {}, piece)
            else:
                yield from self._answer(piece)

    def _answer(self, delta: CompletionDelta) -> Iterator[dict[str, Any]]:
        """Yield what a piece of the answer adds."""
        parsed = self._parse(delta)
        yield from self._piece({"content": parsed.content} if parsed.content else {}, delta)
        for call in parsed.calls:
            numbered = {"index": self._num_calls, **_tool_call(self._service, call)}
            self._num_calls += 1
            yield self._choice({"tool_calls": [numbered]})
        if delta.finish_reason:
            reason = self._told.finish_reason(delta.finish_reason, self._num_calls > 0)
            yield {**self._choice({}, finish_reason=reason), "stop_reason": delta.stop_reason}

    def _piece(self, told: dict[str, Any], delta: CompletionDelta) -> Iterator[dict[str, Any]]:
        """Yield a piece of text with its tokens, if there is anything."""
        logprobs = None
        if delta.logprobs:
            logprobs = self._told.logprobs(self._service, token_logprobs(delta))
        ids = {"token_ids": list(delta.token_ids)} if self._told.ids and delta.token_ids else {}
        if told or logprobs or ids:
            yield self._choice(told or {"content": ""}, logprobs) | ids

    def _parse(self, delta: CompletionDelta) -> Parsed:
        if self._parser is None:
            return Parsed((delta.text,))
        return self._parser.take(delta.text, is_last=delta.finish_reason is not None)

    def _choice(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def _tool_call(service: Service, call: ParsedCall) -> dict[str, Any]:
    return {
        "id": service.tools.format.id_of(call),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
