"""Conversations as the chat template of gpt-oss takes them (`serving/channels.py`).

It has one name for reasoning, one call a message, whose result follows at once, and one message of
instructions, the first. What else a conversation has it would leave out, or refuse.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from onnxport.errors import RequestError
from onnxport.serving.channels import BREAK

INSTRUCTIONS: Final = ("system", "developer")
REASONING: Final = ("reasoning_content", "reasoning")  # as requests call it
THINKING: Final = "thinking"  # as the template does

Plain = dict[str, Any]


def for_channels(messages: Sequence[Plain]) -> list[Plain]:
    """Return plain messages as the template takes them.

    Raises:
        RequestError: instructions stand behind other messages, where the template has no place.
    """
    count = next((at for at, one in enumerate(messages) if not _instructs(one)), len(messages))
    if any(map(_instructs, messages[count:])):
        raise RequestError(
            "a message of role system or developer stands behind others, and the model's chat "
            "template takes them at the beginning alone; put it there",
            "messages",
        )
    told = list(messages[:1] if count else ())
    if count > 1:
        told = [{**messages[0], "content": BREAK.join(one["content"] for one in messages[:count])}]
    rest = deque(_joined([_with_thinking(one) for one in messages[count:]]))
    while rest:
        calling, results = _taken(rest, _calls), _taken(rest, _answers)
        told += _one_by_one(calling, results) if calling else results or [rest.popleft()]
    return told


def with_description(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with a description, which the template joins to other text."""
    return {**tool, "function": {"description": "", **tool["function"]}}


def _instructs(message: Plain) -> bool:
    return message["role"] in INSTRUCTIONS


def _calls(message: Plain) -> bool:
    return message["role"] == "assistant" and bool(message.get("tool_calls"))


def _answers(message: Plain) -> bool:
    return bool(message["role"] == "tool")


def _taken(messages: deque[Plain], are: Callable[[Plain], bool]) -> list[Plain]:
    """Take those of one kind that come first."""
    taken = []
    while messages and are(messages[0]):
        taken.append(messages.popleft())
    return taken


def _with_thinking(message: Plain) -> Plain:
    """Return a message with its reasoning by the template's name.

    What is told before a call is given to the model as reasoning, as the template does it; of both
    it takes one alone.
    """
    texts = [message[name] for name in REASONING if name in message][:1]
    if not texts or THINKING in message:
        return message
    if not (message.get("tool_calls") and message["content"]):
        return {**message, THINKING: texts[0]}
    return {**message, THINKING: BREAK.join((*texts, message["content"])), "content": ""}


def _joined(messages: Sequence[Plain]) -> list[Plain]:
    """Return messages where what an assistant says right before a message that calls is in that.

    The template would take it for an answer, and leave out the reasoning before.
    """
    told: list[Plain] = []
    for message in messages:
        said = told[-1] if told else {"role": ""}
        is_before = said["role"] == "assistant" and "tool_calls" not in said
        if is_before and message["role"] == "assistant" and "tool_calls" in message:
            texts = [one.get(name) for one in (said, message) for name in (THINKING, "content")]
            thinking = BREAK.join(text for text in texts if text)
            told[-1] = {**message, THINKING: thinking, "content": ""}
        else:
            told.append(message)
    return told


def _one_by_one(calling: Sequence[Plain], results: Sequence[Plain]) -> Iterator[Plain]:
    """Yield messages that call and the results behind them: each call with its own, one a message.

    Results say by their id to which call they belong; those that do not come in their order. The
    template calls a result by the last call before it, so what belongs to none is the last one's.
    """
    left = list(results)
    for message in calling:
        first = message
        for call in message["tool_calls"]:
            yield {**first, "tool_calls": [call]}
            first = {"role": message["role"], "content": ""}
            ids = [one.get("tool_call_id") for one in left]
            if left and call.get("id") in ids:
                yield left.pop(ids.index(call.get("id")))
            elif left and ids[0] is None:
                yield left.pop(0)
    yield from left
