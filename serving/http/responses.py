"""`POST /v1/responses`: a turn of a chat, told as OpenAI's newer API tells it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from onnxport.errors import RequestError
from onnxport.serving.channels import BREAK
from onnxport.serving.http import sse, tokens
from onnxport.serving.http.chat_turn import Turn, events_of
from onnxport.serving.http.errors import ApiError
from onnxport.serving.http.generation import unless_disconnected
from onnxport.serving.http.job import token_logprobs
from onnxport.serving.http.logprobs import chat_logprobs
from onnxport.serving.http.placed_logprobs import PlacedLogprobs, Token
from onnxport.serving.http.reasoning import DeltaSplitter
from onnxport.serving.http.request_ids import take_id
from onnxport.serving.http.responses_request import ResponsesRequest, as_chat, renamed
from onnxport.serving.http.responses_tools import called
from onnxport.serving.http.service import Service
from onnxport.serving.http.tool_calls import Parsed
from onnxport.serving.http.tool_formats.base import ParsedCall
from onnxport.serving.outputs import CUT, CompletionDelta
from onnxport.serving.split import places

Event = dict[str, Any]
Entry = dict[str, Any]  # of one token
NO_REASONING: Final = {"reasoning_tokens": 0}


async def respond(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """Answer one request, as a whole or as a stream."""
    chat = as_chat(body, service.tools.format.between)
    name = f"resp_{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    try:
        turn = await Turn.of(service, request, chat, name, adapter)
    except RequestError as error:
        raise renamed(error) from error
    told = Told(service, body, turn, name)
    events = events_of(service, told.job, told.take, renamed)
    if body.stream:
        return await sse.respond(request, events, service.ping_interval_s, told.fail)

    async def whole() -> dict[str, Any]:
        async for _ in events:
            pass
        return told.response()

    return JSONResponse(await unless_disconnected(request, whole()))


async def count(service: Service, body: ResponsesRequest) -> dict[str, str | int]:
    """Return how many tokens the prompt of a response has."""
    chat = as_chat(body, service.tools.format.between)
    await service.pick_adapter(body.model)
    try:
        return tokens.counted(await tokens.count(service, chat))
    except RequestError as error:
        raise renamed(error) from error


class Told:
    """A response as it comes, in events.

    Attributes:
        job: what is run for it.
    """

    def __init__(self, service: Service, body: ResponsesRequest, turn: Turn, name: str) -> None:
        job, thinking = turn.job, turn.thinking
        self.job = job
        self._id = name
        self._model = turn.model
        self._has_begun = False
        self._service = service
        self._body = body
        self._parser = turn.parser(service)
        self._names = called(body.tools or ())
        self._is_told = thinking.is_told
        self._splitter = DeltaSplitter(thinking)
        self._usage = thinking.usage(job, service.tokenizer)
        self._created_s = int(time.time())
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._message: _Message | None = None  # that is being told
        self._reasoning: _Reasoning | None = None  # that is being told
        pieces = service.tokenizer.detokenizer(
            job.prompts[0],
            skip_special_tokens=job.params.skip_special_tokens,
            spelled=job.params.spelled_token_ids,
        )
        self._logprobs = PlacedLogprobs(pieces)  # of tokens whose text is not told yet
        self._num_parsed = 0  # characters of the answer
        self._num_told = 0  # likewise, those of calls with them
        self._status = "in_progress"

    def take(self, delta: CompletionDelta) -> list[Event]:
        """Return what one delta adds, with the last of it `timings` if these are asked for."""
        events = list(self._take(delta))
        if events and self._body.timings_per_token:
            events[-1]["timings"] = self._usage.timings()
        return events

    def _take(self, delta: CompletionDelta) -> Iterator[Event]:
        runs = self._usage.add(0, delta)
        if not self._has_begun:
            self._has_begun = True
            yield self._event("response.created", response=self.response())
            yield self._event("response.in_progress", response=self.response())
        if self.job.params.logprobs is not None:
            self._logprobs.add(token_logprobs(delta))
        pieces = self._splitter.take(delta, runs)
        self._logprobs.settle(self._splitter.stretches, self._splitter.num_read)
        for is_thought, piece in pieces:
            if not is_thought:
                yield from self._answer(piece)
            elif piece.text and self._is_told:
                yield from self._think(piece.text)

    def _answer(self, delta: CompletionDelta) -> Iterator[Event]:
        """Yield what a delta adds to the answer."""
        yield from self._tell_parts(self._parse(delta))
        if delta.finish_reason:
            yield from self._end("incomplete" if delta.finish_reason in CUT else "completed")

    def _tell_parts(self, parsed: Parsed) -> Iterator[Event]:
        """Yield texts and calls of the answer."""
        if parsed.parts:
            yield from self._end_reasoning("completed")
        for part, end in zip(parsed.parts, parsed.ends, strict=True):
            tokens = self._take_tokens(end)
            if isinstance(part, str):
                yield from self._tell(part, self._entries(tokens))
                continue
            yield from self._end_message("completed")
            yield from self._call(part)

    def _take_tokens(self, end: int) -> list[Token]:
        """Return those of the answer up to a character."""
        ranges = places(self._splitter.stretches, self._num_told, end)
        self._num_told = end
        return self._logprobs.take(ranges[-1][1]) if ranges else []

    def _entries(self, tokens: Sequence[Token]) -> list[Entry]:
        """Return what is told of tokens."""
        params, tokenizer = self.job.params, self._service.tokenizer
        named = params.logprob_token_ids or ()
        told = chat_logprobs(tokenizer, tokens, params.logprobs or 0, named=named)
        entries: list[Entry] = told["content"]
        return entries

    def fail(self, error: ApiError) -> Event:
        """Return the event of an error; the last one."""
        found = error.body()["error"]
        flat = {name: found[name] for name in ("code", "message", "param")}
        return self._event("error", **flat, error=found)

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        body, params, ended = self._body, self.job.params, self._status != "in_progress"
        asked = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        text = {"format": {"type": "text"}, "verbosity": "medium", **asked}
        cut = self._status == "incomplete"
        timings = body.timings_per_token and ended
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": self._usage_body() if ended else None,
            "user": body.user,
            **({"timings": self._usage.timings()} if timings else {}),
        }

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage.body()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", NO_REASONING),
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _parse(self, delta: CompletionDelta) -> Parsed:
        if self._parser is None:
            self._num_parsed += len(delta.text)
            return Parsed((delta.text,), (self._num_parsed,)) if delta.text else Parsed()
        return self._parser.take(delta.text, is_last=delta.finish_reason is not None)

    def _think(self, text: str) -> Iterator[Event]:
        """Yield reasoning, whose item begins with it if there is none."""
        if self._reasoning is None:
            if self._parser is not None:
                yield from self._tell_parts(self._parser.settle())
            yield from self._end_message("completed")
            text = self._first("reasoning", text)
            self._reasoning = _Reasoning(f"rs_{uuid.uuid4().hex}", len(self._output))
            yield self._item("added", self._reasoning.item("in_progress", []))
            yield self._part("added", self._reasoning, _thought(""))
        self._reasoning.text += text
        place = self._reasoning.place
        yield self._event("response.reasoning_text.delta", delta=text, **place)

    def _end_reasoning(self, status: str) -> Iterator[Event]:
        """Yield the end of the reasoning that is being told, if any is."""
        if self._reasoning is None:
            return
        told, self._reasoning = self._reasoning, None
        part = _thought(told.text)
        yield self._event("response.reasoning_text.done", text=told.text, **told.place)
        yield self._part("done", told, part)
        yield self._item("done", told.item(status, [part]))

    def _tell(self, text: str, logprobs: list[Entry]) -> Iterator[Event]:
        """Yield text of a message, which begins with it if there is none.

        Args:
            text: the next one.
            logprobs: of its tokens.
        """
        if self._message is None:
            text = self._first("message", text)
            self._message = _Message(f"msg_{uuid.uuid4().hex}", len(self._output))
            yield self._item("added", self._message.item("in_progress", []))
            yield self._part("added", self._message, _text("", []))
        message = self._message
        message.text += text
        message.logprobs += logprobs
        fields = {"delta": text, "logprobs": logprobs, **message.place}
        yield self._event("response.output_text.delta", **fields)

    def _first(self, kind: str, text: str) -> str:
        """Return a text that begins an item, without what parts it from an earlier one's."""
        if not any(item["type"] == kind for item in self._output):
            return text
        around_call = kind == "message" and self._output[-1]["type"] == "function_call"
        return text.removeprefix(self._service.tools.format.between if around_call else BREAK)

    def _end_message(self, status: str) -> Iterator[Event]:
        """Yield the end of the message that is being told, if one is."""
        if self._message is None:
            return
        message, self._message = self._message, None
        part = _text(message.text, message.logprobs)
        fields = {"text": message.text, "logprobs": message.logprobs, **message.place}
        yield self._event("response.output_text.done", **fields)
        yield self._part("done", message, part)
        yield self._item("done", message.item(status, [part]))

    def _call(self, call: ParsedCall) -> Iterator[Event]:
        """Yield a call of a function."""
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": self._service.tools.format.id_of(call),
            **self._names.get(call.name, {"name": call.name}),
        }
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._item("added", {**item, "arguments": "", "status": "in_progress"})
        name = "response.function_call_arguments"
        yield self._event(f"{name}.delta", delta=call.arguments, **place)
        yield self._event(f"{name}.done", arguments=call.arguments, name=item["name"], **place)
        yield self._item("done", {**item, "arguments": call.arguments, "status": "completed"})

    def _end(self, status: str) -> Iterator[Event]:
        yield from self._end_reasoning(status)
        if self._message is None and not self._output:
            yield from self._tell("", [])  # an empty answer is one, too
        yield from self._end_message(status)
        self._status = status
        yield self._event(f"response.{status}", response=self.response())

    def _item(self, what: str, item: dict[str, Any]) -> Event:
        index = len(self._output)
        if what == "done":
            self._output.append(item)
        return self._event(f"response.output_item.{what}", output_index=index, item=item)

    def _part(self, what: str, told: _Message | _Reasoning, part: dict[str, Any]) -> Event:
        return self._event(f"response.content_part.{what}", part=part, **told.place)


class _Message:
    """A message that is being told."""

    def __init__(self, item_id: str, index: int) -> None:
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self.place = {"item_id": item_id, "output_index": index, "content_index": 0}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.place["item_id"],
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


class _Reasoning:
    """Reasoning that is being told."""

    def __init__(self, item_id: str, index: int) -> None:
        self.text = ""
        self.place = {"item_id": item_id, "output_index": index, "content_index": 0}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.place["item_id"],
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": status,
        }


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
