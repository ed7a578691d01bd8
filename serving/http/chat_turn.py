"""What every API that tells a turn of a chat makes of its request, and how such a turn is run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request

from onnxport.errors import RequestError
from onnxport.serving.http import sse
from onnxport.serving.http.adapters import scales_of
from onnxport.serving.http.chat_messages import ChatMessage, Rendering
from onnxport.serving.http.chat_request import ChatRequest
from onnxport.serving.http.intervals import spaced
from onnxport.serving.http.job import Job
from onnxport.serving.http.middleware import key_tenant
from onnxport.serving.http.reasoning import Thinking
from onnxport.serving.http.request_ids import unique
from onnxport.serving.http.service import Service
from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import Functions
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.template_messages import plain_text


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a chat that can be run.

    Attributes:
        job: what the engine is asked.
        functions: that were offered.
        thinking: what is done about reasoning.
        model: the name that answers tell.
        prompt_text: what the chat template made of the chat, or what is left of it; None: nobody
            asked.
    """

    job: Job
    functions: Functions
    thinking: Thinking
    model: str
    prompt_text: str | None

    def parser(self, service: Service) -> ToolCallParser | None:
        """Return what finds calls in the answer; None: it has none, and no headers.

        No functions were offered then, and the format has no headers that are not told.
        """
        if not self.functions and not service.tools.format.headers:
            return None
        params = self.job.params
        return service.tools.parser(
            self.functions,
            skip_special_tokens=params.skip_special_tokens,
            is_formed=params.structured_outputs is not None,
        )

    @classmethod
    async def of(
        cls, service: Service, request: Request, chat: ChatRequest, name: str, adapter: str | None
    ) -> Turn:
        """Return the turn that a chat asks for.

        Args:
            service: that answers.
            request: that the chat came with.
            chat: what is asked.
            name: the id of the answer.
            adapter: that the chat picks; None: the model itself.

        Raises:
            RequestError: it cannot be run; names the field of the chat.
        """
        limits = service.engine.capabilities
        chat = chat.with_effort(service.template, service.reasoning)
        chat = chat.with_counts(service.engine.max_logprobs, limits.vocab_size)
        params = chat.sampling_params(service.defaults, service.tools)
        scales = scales_of(service, chat.lora, adapter)
        options = chat.options(key_tenant(request), service.request_timeout_s, adapter, scales)
        tools, functions = chat.offered_tools(), chat.functions()
        longest = limits.max_model_len
        most = chat.most_prompt_tokens or longest
        encoded = await asyncio.to_thread(encode, service, chat.messages, tools, chat, most)
        prompt = chat.truncated(encoded.token_ids, longest, params.max_tokens)
        text, continued = encoded.text, encoded.continued
        left, ends_early = text, chat.truncation_side == "right"
        is_cut = len(prompt) < len(encoded.token_ids)
        if is_cut and (ends_early or chat.return_prompt_text):
            decode = service.tokenizer.decode
            left = await asyncio.to_thread(decode, prompt, skip_special_tokens=False)
            text, continued = (left, None) if ends_early else (text, continued)
        thinking = Thinking.of(
            service,
            text,
            continued,
            is_told=chat.tells_reasoning,
            functions=functions,
            skip_special_tokens=params.skip_special_tokens,
            is_limited=chat.thinking_token_budget is None,
            is_parted=chat.reasoning_format != "none",
        )
        if chat.reasoning_control and service.closes_thoughts:
            thinking = replace(thinking, is_closed=True)
        if params.structured_outputs is None:  # a form begins behind a closing tag
            thinking = thinking.ending_with(service.tools.format if functions else None)
        told = left if chat.return_prompt_text else None
        interval = chat.stream_interval or service.stream_interval
        job = Job([prompt], thinking.before(params), options, unique(name), interval)
        return cls(job, functions, thinking, adapter or service.model_name, told)


async def events_of(
    service: Service,
    job: Job,
    take: Callable[[CompletionDelta], Iterable[dict[str, Any]]],
    renamed: Callable[[RequestError], RequestError],
) -> sse.Chunks:
    """Run a turn of one answer; yields its events.

    Args:
        service: that answers.
        job: of the turn.
        take: returns the events that a delta makes.
        renamed: returns what a chat refused by the names of the API that was asked.
    """
    try:
        async with aclosing(spaced(service.engine, job)) as deltas:
            async for _, delta in deltas:
                for event in take(delta):
                    yield event
    except RequestError as error:
        if type(error) is RequestError:
            raise renamed(error) from error
        raise


@dataclass(frozen=True, slots=True)
class Encoded:
    """The prompt of a conversation."""

    text: str
    token_ids: list[int]
    continued: str | None  # the text of the message that goes on, if one does


def _differs(text: str, render: Callable[[], str]) -> bool:
    """Whether a prompt is another one than what `render` returns, or that is none."""
    try:
        return text != render()
    except RequestError:
        return True


def encode(
    service: Service,
    messages: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]],
    how: Rendering,
    most_tokens: int,
) -> Encoded:
    """Return the prompt of a conversation; text that so many tokens cannot hold is refused."""
    begins, goes_on = how.add_generation_prompt, bool(how.continue_final_message)
    plain = [message.plain() for message in messages]
    render = partial(
        service.template.render,
        plain,
        tools,
        not goes_on if begins is None else begins,
        continue_final_message=goes_on,
        **(how.chat_template_kwargs or {}),
    )
    text = render(documents=how.documents)
    if how.documents and not _differs(text, render):
        raise RequestError(
            "documents were given, and the model's chat template does not tell the model of any; "
            "put them into a message, or leave them out",
            "documents",
        )
    service.tokenizer.check_length(text, most_tokens)
    ids = service.tokenizer.encode(text, add_special_tokens=bool(how.add_special_tokens))
    return Encoded(text, ids, plain_text(plain[-1].get("content", "")) if goes_on else None)
