"""Tokens to text, one token at a time.

Two ways to the same text. Where a token is simply a run of bytes (byte-level BPE) the bytes are
decoded as they come. Any other decoder looks at neighbouring tokens, so there the text is the
difference between decoding a short window with and without its newest token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from copy import copy

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 5  # prompt tokens decoded with the first ones, for decoders that look back
MAX_CONTEXT_TOKENS = 24  # if fewer begin in the middle of a character
MAX_CHARACTER = 4  # bytes
MAX_HELD_TOKENS = 16  # after so many, an incomplete character is taken for a broken one


class ByteDetokenizer:
    """Decodes tokens that are runs of UTF-8 bytes; exact for every sequence of bytes."""

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, bytes_of: Callable[[int], bytes], pending: bytes = b"") -> None:
        """Begin behind a prompt that ends with `pending`, a part of a character."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(pending)

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty."""
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """Return what was kept back; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def fork(self) -> ByteDetokenizer:
        """Return one that goes on from here on its own."""
        return ByteDetokenizer(self._bytes_of, self._decoder.getstate()[0])


class WindowDetokenizer:
    """Decodes with any decoder; pieces of valid text join to the text of the whole.

    Text is the difference of two decodings that begin at the same token: what a token looks like
    depends on those before it (spaces, byte fallback), but only on a few. The window moves on
    with every piece, so the cost of a token does not depend on how many came before.
    """

    __slots__ = ("_decode", "_ids", "_is_left_out", "_known", "_read")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int] = (),
        pending: int = 0,
        is_left_out: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Begin after a prompt.

        Args:
            decode: gives the text of a list of tokens.
            prompt: what was before.
            pending: how many of its last tokens are a part of a character.
            is_left_out: tells tokens that `decode` leaves out, as if they were not there.
        """
        self._decode = decode
        self._is_left_out = is_left_out
        end = len(prompt) - pending
        context = _context(decode, list(prompt[max(0, end - MAX_CONTEXT_TOKENS) : end]))
        self._ids = [*context, *prompt[end:]]
        self._read = len(context)  # self._ids[: self._read] is text already, namely _known
        self._known = decode(context) if context else ""

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes; may be empty."""
        if self._is_left_out(token_id):  # any number of them may come, and none moves the window
            return ""
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

    def fork(self) -> WindowDetokenizer:
        """Return one that goes on from here on its own."""
        other = copy(self)
        other._ids = self._ids.copy()
        return other

    def _give_up(self, text: str) -> str:
        """Release everything as it is and begin again, so that nothing is decoded twice.

        A token that was whole stays, for decoders that drop the first one's space.
        """
        piece = self._new_part(text)
        first = self._ids[: min(self._read, 1)]
        known = self._decode(first) if first else ""
        if REPLACEMENT in known:
            first, known = [], ""
        self._ids, self._read, self._known = first, len(first), known
        return piece

    def _new_part(self, text: str) -> str:
        """Return what the newest tokens add to `text`.

        A broken byte may spoil the whole run of bytes that it ends, known ones included; then
        the newest tokens are decoded by themselves.
        """
        if text.startswith(self._known):
            return text[len(self._known) :]
        return self._decode(self._ids[self._read :])


def _context(decode: Callable[[Sequence[int]], str], prompt: list[int]) -> list[int]:
    """Return the last tokens of a prompt, to be decoded with those that follow.

    A decoder of bytes gives nothing of a run of them that begins in the middle of a character, and
    one of words needs a word before. So they are as few as are a text without a broken character,
    or else with the fewest.
    """

    def broken(count: int) -> int:
        text = decode(prompt[-count:])
        return text.count(REPLACEMENT) + (not text)

    least, most = min(len(prompt), CONTEXT_TOKENS), len(prompt)
    if least == most or broken(least) == 0:
        return prompt[most - least :]
    return prompt[-min(range(least, most + 1), key=broken) :]


def pending_bytes(pieces: Iterable[bytes | None]) -> bytes:
    """Return the part of a character that a text ends with, if it does.

    Args:
        pieces: the bytes of its tokens, the last one first; None: of one that is text.
    """
    end = b""
    for piece in pieces:
        if piece is None or len(end) >= MAX_CHARACTER:
            break
        end = piece + end
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(end)
    return decoder.getstate()[0]
