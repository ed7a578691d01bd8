"""What a request gets, computed as slowly and simply as possible.

For every token the whole sequence is computed anew, from its first token and in one row, in blocks
that nobody else uses; the request is made anew too, so that rules and grammars start from nothing.
There is no batch, no cache, no draft and no scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxport.kv.table import blocks_for
from onnxport.providers.base import Model
from onnxport.serving.numpy_sampler import row_logprobs
from onnxport.serving.outputs import FinishReason
from onnxport.serving.request import Request
from onnxport.serving.sampler import sample
from onnxport.serving.sampling import Position, row_params
from onnxport.serving.tokenizer import Tokenizer
from tests.conformance.models import step
from tests.serving.beams import Logits, search


def logits_after(model: Model, token_ids: list[int], slot: int) -> NDArray[np.float32]:
    """Return the logits after the last token, float32 [1, vocab]."""
    length = len(token_ids)
    columns = range(blocks_for(length, model.capabilities.block_size))
    inputs = step(
        [(token_ids, 0, columns)],
        model.capabilities,
        logits_indices=np.array([length - 1], np.int32),
        adapter_slots=np.array([slot], np.int32) if slot else None,
    )
    return model.run(inputs).copy()


@dataclass(frozen=True, slots=True)
class Expected:
    """One completion."""

    token_ids: list[int]
    # Of its tokens, each with those of the tokens that the request names; empty unless it asks.
    logprobs: list[float]
    reason: FinishReason


def completions(model: Model, make: Callable[[], Request], tokenizer: Tokenizer) -> list[Expected]:
    """Return all completions of a request.

    Args:
        model: whose whole cache may be overwritten.
        make: makes the request; called for every token.
        tokenizer: tells the text, in which stop strings are looked for.
    """
    if make().params.use_beam_search:
        return _beams(model, make)
    number = len([make(), *make().siblings])
    return [_completion(model, make, tokenizer, index) for index in range(number)]


def _completion(
    model: Model, make: Callable[[], Request], tokenizer: Tokenizer, index: int
) -> Expected:
    output: list[int] = []
    logprobs: list[float] = []
    feedback = None  # what tokens say of the next one is not made of them alone
    while True:
        first = make()
        request = [first, *first.siblings][index]
        request.tokens.extend(output)
        if request.feedback is not None:
            feedback = request.feedback = feedback or request.feedback
        if output and (reason := _ended(request, output, tokenizer)):
            return Expected(output, logprobs, reason)
        # Loaded into an empty model, one after the other: each has the slot of its number.
        slot = request.adapter.number if request.adapter else 0
        logits = logits_after(model, request.tokens.tolist(), slot)
        mask = request.grammar.masks(request.tokens)[0] if request.grammar else None
        sampled = sample(logits, [row_params(Position(request, (), mask))])
        assert not sampled.invalid
        output += sampled.token_ids
        if feedback is not None:
            assert sampled.surprises is not None
            feedback.note(sampled.surprises[0])
        logprobs += [one.logprob for one in sampled.logprobs or () if one is not None]
        named = request.params.logprob_token_ids or ()
        logprobs += [row_logprobs(logits[0], token_id, 0).logprob for token_id in named]


def _beams(model: Model, make: Callable[[], Request]) -> list[Expected]:
    """Return the texts of a beam search that changes no logits and has no stop strings."""
    first = make()
    params, num_prompt = first.params, first.num_prompt_tokens
    ends, prompt = first.stop_token_ids, first.prompt_token_ids
    slot = first.adapter.number if first.adapter else 0

    def with_output(output: tuple[int, ...]) -> Request:
        request = make()
        request.tokens.extend(output)
        return request

    def masked(logits: Logits, output: tuple[int, ...]) -> Logits:
        request = with_output(output)
        if request.grammar is None:
            return logits
        mask = request.grammar.masks(request.tokens)[0]
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
        return np.where(bits == 1, logits, -np.inf)

    def is_whole(output: tuple[int, ...]) -> bool:
        request = with_output(output)
        return request.grammar is not None and request.grammar.is_complete(request.tokens)

    texts = search(
        lambda token_ids: logits_after(model, list(token_ids), slot)[0].astype(np.float64),
        prompt,
        params.num_sequences,
        first.max_total_tokens - num_prompt,
        ends=sorted(ends),
        length_penalty=params.length_penalty,
        edit=masked,
        is_whole=is_whole,
    )
    found = [
        Expected(
            list(text.tokens),
            [],
            "stop" if text.tokens[-1] in ends or is_whole(text.tokens) else "length",
        )
        for text in texts
    ]
    missing = params.num_sequences - len(found)
    return [*found, *(Expected([], [], "stop") for _ in range(missing))]


def _ended(request: Request, output: list[int], tokenizer: Tokenizer) -> FinishReason | None:
    text = tokenizer.decode(output)
    if output[-1] in request.stop_token_ids or any(stop in text for stop in request.params.stop):
        return "stop"
    if request.grammar is not None and request.grammar.is_complete(request.tokens):
        return "stop"
    return "length" if len(request.tokens) >= request.max_total_tokens else None
