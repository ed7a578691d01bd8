r"""Log probabilities as both endpoints tell them: OpenAI's two forms, and vLLM's of a prompt.

A token may be a part of a character, and is no text then. Its name tells its bytes as OpenAI does:
`bytes:\xe2\x82` in the lists of completions, `\xe2\x82` in a chat, where `bytes` has them, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from onnxport.serving.detokenizer import REPLACEMENT
from onnxport.serving.http.service import Tokenizer
from onnxport.serving.outputs import Logprob, TokenLogprobs
from onnxport.serving.params import SamplingParams

LEAST_LOGPROB = -9999.0  # what is told of -inf, which JSON lacks; vLLM's
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")  # OpenAI's, of completions


class CompletionLogprobs:
    """Builds the four parallel lists of one choice of `/v1/completions`, from its start on.

    `text_offset` counts the characters of the text before a token; special tokens that are not in
    the text have none. A part of a character is where that character begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int] = (),
        echo: str = "",
        *,
        skip_special_tokens: bool = True,
        by_id: bool = False,
    ) -> None:
        """Begin with the text.

        Args:
            tokenizer: names tokens.
            before: tokens of the sequence before those that are told, which are not in the text.
            echo: the text of a prompt whose tokens are told. It may spell special tokens out.
            skip_special_tokens: whether the text of what was generated has none.
            by_id: whether tokens are called by their ids, as vLLM does where it is asked to.
        """
        self._tokenizer = tokenizer
        self._offset = 0
        self._pieces = tokenizer.detokenizer(before, skip_special_tokens=skip_special_tokens)
        self._echo = echo
        self._by_id = by_id

    def first(self, token_id: int) -> dict[str, Any]:
        """Return the lists for the first token of a prompt, which nothing predicts."""
        text = self._tokenizer.token_text(token_id)
        name = _id_name(token_id) if self._by_id else self._name(token_id, text)
        return _lists([name], [None], [None], [self._advance(token_id, text)])

    def body(self, tokens: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """Return the lists for the next tokens, each with its candidates."""
        names: list[str] = []
        values: list[float] = []
        top: list[dict[str, float]] = []
        offsets: list[int] = []
        for token_id, candidates in tokens:
            sampled = candidates[token_id]
            called = self._names(token_id, candidates)
            names.append(called[token_id])
            values.append(_value(sampled))
            top.append({called[one]: _value(entry) for one, entry in candidates.items()})
            offsets.append(self._advance(token_id, sampled.decoded_token))
        return _lists(names, values, top, offsets)

    def _names(self, token_id: int, candidates: TokenLogprobs) -> dict[int, str]:
        """Return the names of a position's tokens, no two the same, for they are keys.

        Where several tokens have one text, such as those beyond a tokenizer's, which have none, it
        names the token that was sampled, or else the likeliest. Others are called as vLLM does
        where it tells ids.
        """
        if self._by_id:
            return {one: _id_name(one) for one in candidates}
        found: dict[int, str] = {}
        taken: set[str] = set()
        for one in (token_id, *(other for other in candidates if other != token_id)):
            name = self._name(one, candidates[one].decoded_token)
            found[one] = _id_name(one) if name in taken else name
            taken.add(name)
        return found

    def _name(self, token_id: int, text: str) -> str:
        return _name(self._tokenizer, token_id, text, "bytes:")

    def _advance(self, token_id: int, text: str) -> int:
        """Move on by a token; returns where it began."""
        piece = self._pieces.add(token_id)
        if not piece and REPLACEMENT not in text and self._echo.startswith(text, self._offset):
            piece = text
        start = self._offset
        self._offset += len(piece)
        if REPLACEMENT not in text and piece.endswith(text):  # behind a broken character, if any
            return self._offset - len(text)
        return start


def no_logprobs() -> dict[str, Any]:
    """Return the lists of completions without an entry."""
    return _lists([], [], [], [])


def extend(logprobs: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Append lists of completions to others."""
    for name, values in more.items():
        logprobs[name] += values


def _lists(
    names: list[str],
    values: Sequence[float | None],
    top: Sequence[dict[str, float] | None],
    offsets: list[int],
) -> dict[str, Any]:
    return dict(zip(LISTS, (names, values, top, offsets), strict=True))


def chat_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[tuple[int, TokenLogprobs]],
    top: int,
    *,
    named: Collection[int] = (),
    by_id: bool = False,
) -> dict[str, Any]:
    """Return OpenAI's log probabilities of a chat.

    Args:
        tokenizer: names tokens.
        tokens: each with its candidates.
        top: how many of the likeliest of each position are told.
        named: tokens that are told with them.
        by_id: whether tokens are called by their ids.
    """
    content = []
    for token_id, candidates in tokens:
        ranked = _ranked(candidates)
        chosen = [one for place, one in enumerate(ranked) if place < top or one in named]
        likeliest = [_entry(tokenizer, one, candidates[one], by_id) for one in chosen]
        told = _entry(tokenizer, token_id, candidates[token_id], by_id)
        content.append({**told, "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def completion_probabilities(
    tokenizer: Tokenizer, tokens: Sequence[tuple[int, TokenLogprobs]], top: int
) -> list[dict[str, Any]]:
    """Return llama.cpp's list of that name: what a chat tells of each token, and its id.

    Args:
        tokenizer: names tokens.
        tokens: each with its candidates.
        top: how many of the likeliest of each position are told.
    """

    def entry(token_id: int, candidates: TokenLogprobs) -> dict[str, Any]:
        return {"id": token_id, **_entry(tokenizer, token_id, candidates[token_id], by_id=False)}

    return [
        {
            **entry(token_id, candidates),
            "top_logprobs": [entry(one, candidates) for one in _ranked(candidates)[:top]],
        }
        for token_id, candidates in tokens
    ]


def drawn(entries: Sequence[dict[str, Any]], params: SamplingParams) -> list[dict[str, Any]]:
    """Return llama.cpp's list with probabilities of what was drawn from, `post_sampling_probs`.

    What could not come is left out.

    Args:
        entries: of `completion_probabilities`, whose log probabilities are of that.
        params: where the likeliest token is always taken it is the only one that could come.
    """

    def one(entry: Mapping[str, Any], prob: float) -> dict[str, Any]:
        kept = {name: value for name, value in entry.items() if name in ("id", "token", "bytes")}
        return {**kept, "prob": prob}

    found = []
    for entry in entries:
        if params.greedy:
            found.append({**one(entry, 1.0), "top_probs": [one(entry, 1.0)]})
            continue
        top = [one(each, math.exp(each["logprob"])) for each in entry["top_logprobs"]]
        top = [each for each in top if each["prob"] > 0.0]
        found.append({**one(entry, math.exp(entry["logprob"])), "top_probs": top})
    return found


def _ranked(candidates: TokenLogprobs) -> list[int]:
    """Return the tokens of a position, the likeliest first."""
    return sorted(candidates, key=lambda one: candidates[one].rank)


def _entry(tokenizer: Tokenizer, token_id: int, one: Logprob, by_id: bool) -> dict[str, Any]:
    """Return a token with its bytes."""
    return {
        "token": _id_name(token_id) if by_id else _name(tokenizer, token_id, one.decoded_token, ""),
        "logprob": _value(one),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def prompt_entries(
    prompt_logprobs: Sequence[TokenLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's form of a prompt's log probabilities; None unless they were asked for."""
    if prompt_logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {
                "logprob": _value(one),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in entry.items()
        }
        for entry in prompt_logprobs
    ]


def _value(one: Logprob) -> float:
    """Return a log probability as JSON can have it."""
    return max(one.logprob, LEAST_LOGPROB)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _name(tokenizer: Tokenizer, token_id: int, text: str, prefix: str) -> str:
    """Return what a token is called: its text, or its bytes after `prefix` where they are none."""
    if REPLACEMENT not in text:
        return text
    known = tokenizer.token_bytes(token_id)
    try:
        known.decode()
    except UnicodeDecodeError:
        return prefix + "".join(map(_spelled, known))
    return text


def _spelled(byte: int) -> str:
    r"""Return a byte as ASCII has it, or else as `\xe2`; a backslash is doubled."""
    if byte == ord("\\"):
        return "\\\\"
    return chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}"
