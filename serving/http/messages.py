"""`POST /v1/messages` and `/v1/messages/count_tokens`: turns of chats, told as Anthropic does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response

from onnxport.errors import RequestError
from onnxport.serving.channels import BREAK
from onnxport.serving.http import anthropic, sse, tokens
from onnxport.serving.http.chat_turn import Turn, events_of
from onnxport.serving.http.errors import JSON, ApiError
from onnxport.serving.http.generation import unless_disconnected
from onnxport.serving.http.messages_blocks import CALL_ID
from onnxport.serving.http.messages_request import CountRequest, MessagesRequest, as_chat, renamed
from onnxport.serving.http.reasoning import DeltaSplitter
from onnxport.serving.http.request_ids import take_id
from onnxport.serving.http.service import Service
from onnxport.serving.http.tool_calls import Parsed
from onnxport.serving.http.tool_formats.base import ParsedCall
from onnxport.serving.outputs import CUT, CompletionDelta

Event = dict[str, Any]
PING: Final = sse.event({"type": "ping"}, is_named=True)


async def respond(service: Service, request: Request, body: MessagesRequest) -> Response:
    """Answer one request, as a whole or as a stream."""
    chat = as_chat(body, service)
    name = f"msg_{take_id(request, body.request_id)}"
    adapter = await service.pick_adapter(body.model)
    try:
        turn = await Turn.of(service, request, chat, name, adapter)
    except RequestError as error:
        raise renamed(error) from error
    told = Told(service, turn, name)
    events = events_of(service, told.turn.job, told.take, renamed)
    if body.stream:
        interval_s = service.ping_interval_s
        return await sse.respond(request, events, interval_s, failed, PING)

    async def whole() -> dict[str, Any]:
        async for _ in events:
            pass
        return told.message()

    # Inputs of calls may have halves of characters, which are written as such in ASCII alone.
    return Response(json.dumps(await unless_disconnected(request, whole())), media_type=JSON)


async def count(service: Service, body: CountRequest) -> dict[str, int]:
    """Return how many tokens a prompt has."""
    await service.pick_adapter(body.model)
    try:
        return {"input_tokens": await tokens.count(service, as_chat(body, service))}
    except RequestError as error:
        raise renamed(error) from error


def failed(error: ApiError) -> Event:
    """Return the event of an error; the last one."""
    return anthropic.error(anthropic.status_of(error.status), error.message)


class Told:
    """A message as it comes, in events.

    Attributes:
        turn: what is run for it.
    """

    def __init__(self, service: Service, turn: Turn, name: str) -> None:
        self.turn = turn
        self._service = service
        self._id = name
        self._parser = turn.parser(service)
        self._splitter = DeltaSplitter(turn.thinking)
        self._usage = turn.thinking.usage(turn.job, service.tokenizer)
        self._content: list[dict[str, Any]] = []
        self._is_open = False  # the last block: more of it may come
        self._has_begun = False
        self._reason: str | None = None
        self._sequence: str | None = None

    def take(self, delta: CompletionDelta) -> Iterator[Event]:
        """Yield what one delta adds."""
        runs = self._usage.add(0, delta)
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self.message()}
        for is_thought, piece in self._splitter.take(delta, runs):
            if not is_thought:
                yield from self._answer(piece)
            elif piece.text and self.turn.thinking.is_told:
                yield from self._think(piece.text)

    def message(self) -> dict[str, Any]:
        """Return the message as it is now."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.turn.model,
            "content": list(self._content),
            "stop_reason": self._reason,
            "stop_sequence": self._sequence,
            "usage": self._usage_body(),
        }

    def _usage_body(self) -> dict[str, Any]:
        """Return the counts; a token that was in the cache is no token of the input here."""
        usage = self._usage.body()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told: dict[str, Any] = {}
        if (details := usage.get("completion_tokens_details")) is not None:
            told["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            **told,
        }

    def _answer(self, delta: CompletionDelta) -> Iterator[Event]:
        """Yield what a delta adds to the answer."""
        is_last = delta.finish_reason is not None
        if self._parser is None:
            yield from self._parts(Parsed((delta.text,) if delta.text else ()))
        else:
            yield from self._parts(self._parser.take(delta.text, is_last=is_last))
        if is_last:
            yield from self._end(delta)

    def _parts(self, parsed: Parsed) -> Iterator[Event]:
        """Yield texts and calls of the answer."""
        for part in parsed.parts:
            if isinstance(part, ParsedCall):
                yield from self._call(part)
            else:
                yield from self._more("text", part, "text_delta")

    def _think(self, text: str) -> Iterator[Event]:
        """Yield reasoning."""
        if self._parser is not None and not self._goes_on("thinking"):
            yield from self._parts(self._parser.settle())
        yield from self._more("thinking", text, "thinking_delta")

    def _goes_on(self, kind: str) -> bool:
        return self._is_open and self._content[-1]["type"] == kind

    def _more(self, kind: str, text: str, delta: str) -> Iterator[Event]:
        """Yield text of a block, which begins with it if none of its kind is open.

        Args:
            kind: of the block, and the name of its text.
            text: the next one.
            delta: the type of the event's delta.
        """
        if not self._goes_on(kind):
            text = self._first(kind, text)
            signed = {"signature": ""} if kind == "thinking" else {}
            yield from self._close()
            yield from self._start({"type": kind, kind: "", **signed})
            self._is_open = True
        self._content[-1][kind] += text
        yield self._delta({"type": delta, kind: text})

    def _first(self, kind: str, text: str) -> str:
        """Return a text that begins a block, without what parts it from an earlier one's."""
        if not any(block["type"] == kind for block in self._content):
            return text
        around_call = kind == "text" and self._content[-1]["type"] == "tool_use"
        return text.removeprefix(self._service.tools.format.between if around_call else BREAK)

    def _call(self, call: ParsedCall) -> Iterator[Event]:
        """Yield a call of a tool."""
        yield from self._close()
        new_id = f"{CALL_ID}{self._service.tools.format.id_of(call)}"
        yield from self._start({"type": "tool_use", "id": new_id, "name": call.name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        self._content[-1]["input"] = json.loads(call.arguments)
        yield self._stop()

    def _start(self, block: dict[str, Any]) -> Iterator[Event]:
        index = len(self._content)
        self._content.append(dict(block))  # another one: this goes on
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": len(self._content) - 1}

    def _close(self) -> Iterator[Event]:
        """Yield the end of the block that is being told, if one is."""
        if not self._is_open:
            return
        self._is_open = False
        if self._content[-1]["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield self._stop()

    def _end(self, delta: CompletionDelta) -> Iterator[Event]:
        """Yield the end of the message."""
        yield from self._close()
        self._reason = "max_tokens" if delta.finish_reason in CUT else "end_turn"
        if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
            self._reason, self._sequence = "stop_sequence", delta.stop_reason
        if self._reason != "max_tokens" and any(b["type"] == "tool_use" for b in self._content):
            self._reason, self._sequence = "tool_use", None
        told = {"stop_reason": self._reason, "stop_sequence": self._sequence}
        yield {"type": "message_delta", "delta": told, "usage": self._usage_body()}
        yield {"type": "message_stop"}
