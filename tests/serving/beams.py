"""Beam search as vLLM has it, slow and by itself: what the engine's is tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from tests.serving.helpers import null_engine, run, submit

Logits = NDArray[np.float64]
LogitsOf = Callable[[tuple[int, ...]], Logits]  # of what follows some tokens
Edit = Callable[[Logits, tuple[int, ...]], Logits]  # of the logits behind an output


class Text(NamedTuple):
    """An output, without the prompt, and its log probability."""

    tokens: tuple[int, ...]
    logprob: float


def beams(width: int, max_tokens: int = 8, **more: object) -> SamplingParams:
    """Parameters of a search."""
    return SamplingParams(
        temperature=0.0,
        n=width,
        max_tokens=max_tokens,
        use_beam_search=True,
        **more,  # type: ignore[arg-type]
    )


def search(
    logits_of: LogitsOf,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    *,
    ends: Sequence[int] = (),
    length_penalty: float = 1.0,
    temperature: float = 0.0,
    edit: Edit = lambda logits, output: logits,
    is_whole: Callable[[tuple[int, ...]], bool] = lambda output: False,
) -> list[Text]:
    """Return the best texts, the best first, without stopping early.

    Args:
        logits_of: the model.
        prompt: token ids.
        width: how many beams there are.
        max_tokens: of an output.
        ends: tokens that end a text.
        length_penalty: see `SamplingParams`.
        temperature: of what texts are compared by; 0 is 1.
        edit: changes logits; what it makes -inf is left out.
        is_whole: whether an output ends as it is.
    """
    live, done = [Text((), 0.0)], []
    for _ in range(max_tokens):
        following = []
        for beam in live:
            logits = edit(logits_of((*prompt, *beam.tokens)), beam.tokens)
            logits = logits / (temperature or 1.0)
            logprobs = logits - logits.max()
            logprobs = logprobs - np.log(np.exp(logprobs).sum())
            ordered = np.argsort(-logprobs, kind="stable").tolist()
            count = 2 * width
            while count < len(ordered) and sum(one not in ends for one in ordered[:count]) < width:
                count *= 2  # which vLLM, with one end token, has no need of
            likeliest = ordered[:count]
            for token_id in likeliest:
                if logprobs[token_id] > -np.inf:
                    logprob = beam.logprob + float(logprobs[token_id])
                    longer = Text((*beam.tokens, token_id), logprob)
                    (done if token_id in ends else following).append(longer)
        live = []
        for text in sorted(following, key=lambda one: -one.logprob):
            if len(live) < width:
                (done if is_whole(text.tokens) else live).append(text)
        if not live:
            break

    def score(text: Text) -> float:
        length = len(prompt) + len(text.tokens) - (text.tokens[-1] in ends)
        return text.logprob / length**length_penalty

    return sorted([*done, *live], key=score, reverse=True)[:width]


@cache
def null_logits(
    tokens: tuple[int, ...], windows: tuple[int | None, ...] = (None,), vocab_size: int = 512
) -> Logits:
    """The logits of the null model behind some tokens, of an engine that does nothing else."""
    engine = _asked(windows, vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    submit(engine, "logits", tokens, params)
    [delta] = run(engine)["logits"]
    assert delta.logprobs is not None
    [found] = delta.logprobs
    return np.array([found[one].logprob for one in range(vocab_size)])


@cache
def _asked(windows: tuple[int | None, ...], vocab_size: int) -> Engine:
    return null_engine(
        num_blocks=512,
        max_num_batched_tokens=512,
        windows=windows,
        one_table=True,
        vocab_size=vocab_size,
        enable_prefix_caching=False,
        max_logprobs=None,
        logprobs_mode="raw_logits",
    )
