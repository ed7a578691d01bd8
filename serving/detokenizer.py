"""Tokens to text, one token at a time.

Two ways to the same text. Where a token is simply a run of bytes (byte-level BPE) the bytes are
decoded as they come. Any other decoder looks at neighbouring tokens, so there the text is the
difference between decoding a short window with and without its newest token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 5  # prompt tokens decoded with the first ones, for decoders that look back
MAX_HELD_TOKENS = 16  # after so many, an incomplete character is taken for a broken one


class ByteDetokenizer:
    """Decodes tokens that are runs of UTF-8 bytes; exact for every sequence of bytes."""

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty."""
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """Return what was kept back; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes with any decoder; pieces of valid text join to the text of the whole.

    Text is the difference of two decodings that begin at the same token: what a token looks like
    depends on those before it (spaces, byte fallback), but only on a few. The window moves on
    with every piece, so the cost of a token does not depend on how many came before.
    """

    __slots__ = ("_decode", "_ids", "_known", "_read")

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        """Begin after `prompt`; `decode` gives the text of a list of tokens."""
        self._decode = decode
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._read = len(self._ids)  # self._ids[: self._read] is text already, namely _known
        self._known = decode(self._ids) if self._ids else ""

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT):
            return "" if len(self._ids) - self._read < MAX_HELD_TOKENS else self._give_up(text)
        piece = self._new_part(text)
        if piece:
            self._ids = self._ids[self._read :]
            self._read = len(self._ids)
            self._known = self._decode(self._ids)
        return piece

    def finish(self) -> str:
        """Return what was kept back; an incomplete character becomes U+FFFD."""
        return self._give_up(self._decode(self._ids)) if len(self._ids) > self._read else ""

    def _give_up(self, text: str) -> str:
        """Release everything as it is and begin again, so that nothing is decoded twice."""
        piece = self._new_part(text)
        self._ids, self._read, self._known = [], 0, ""
        return piece

    def _new_part(self, text: str) -> str:
        """Return what the newest tokens add to `text`.

        A broken byte may spoil the whole run of bytes that it ends, known ones included; then
        the newest tokens are decoded by themselves.
        """
        if text.startswith(self._known):
            return text[len(self._known) :]
        return self._decode(self._ids[self._read :])
