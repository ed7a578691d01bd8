"""The artifact's tokenizer: text to tokens and back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnxport.errors import ArtifactError, CapacityError, RequestError
from onnxport.serving.detokenizer import (
    REPLACEMENT,
    ByteDetokenizer,
    WindowDetokenizer,
    pending_bytes,
)
from onnxport.serving.text import HALF, Pieces, is_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
INFILL_TOKENS = "infill_tokens"  # of the configuration; the exporter writes it for GGUF files
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # how byte fallback spells a byte


class Tokenizer:
    """A thin wrapper around a `tokenizers.Tokenizer`; safe to share between threads.

    Attributes:
        eos_token_ids: the tokens that end a generation.
        vocab_size: how many tokens there are, added ones included.
        infill_tokens: tokens to fill in by that its files name, see `infill.InfillNames`.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        eos_token_ids: frozenset[int] = frozenset(),
        infill_tokens: Mapping[str, object] | None = None,
    ) -> None:
        from tokenizers import decoders

        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self.eos_token_ids = eos_token_ids
        self.infill_tokens = infill_tokens or {}
        self.vocab_size: int = fast.get_vocab_size()
        self._is_byte_level = isinstance(fast.decoder, decoders.ByteLevel)
        self._alphabet = byte_alphabet()
        # Of the tokens that were met so far.
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._before: list[int] | None = None  # a token that others can follow, if they need one
        self._special: frozenset[int] | None = None
        self._texts_like_bytes: frozenset[int] | None = None
        self._longest: float | None = None

    @classmethod
    def from_folder(
        cls, folder: Path, eos_token_ids: frozenset[int], texts: Collection[str] = ()
    ) -> Tokenizer:
        """Read the tokenizer of an artifact, whose manifest names the end tokens.

        Args:
            folder: the artifact.
            eos_token_ids: the end tokens.
            texts: tokens of these spellings are text, also where the file calls them special.

        Raises:
            ArtifactError: `tokenizer.json` is missing or not valid, or `tokenizer_config.json` is
                not what it should be.
        """
        from tokenizers import Tokenizer as FastTokenizer

        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ArtifactError(
                f"{folder} has no {TOKENIZER_FILE}, so text cannot be turned into tokens; "
                "export the model again from a checkpoint that has one"
            )
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"{path} is not a valid tokenizer: {error}") from error
        return cls(_with_texts(fast, texts), eos_token_ids, _infill_tokens(folder / CONFIG_FILE))

    def to_json(self) -> str:
        """Return the content of `tokenizer.json`, without truncation and padding."""
        text: str = self._fast.to_str()
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of `text`; special tokens that `text` spells out are recognized.

        Args:
            text: what to encode.
            add_special_tokens: whether to add what the tokenizer puts around a text (such as a
                beginning-of-text token). A chat template writes those itself.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the tokens of each text; see `encode`.

        Other threads of Python run meanwhile: the library keeps its lock while it encodes one text,
        and gives it away while it encodes several.

        Raises:
            RequestError: a text holds half of a character.
        """
        for text in texts:
            if not is_whole(text):
                raise RequestError(f"the text {HALF}")
        encoded = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [one.ids for one in encoded]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the tokens of two texts, with what the tokenizer puts around and between them.

        Raises:
            RequestError: a text holds half of a character.
        """
        if not is_whole(first) or not is_whole(second):
            raise RequestError(f"the text {HALF}")
        [encoded] = self._fast.encode_batch_fast([(first, second)])
        ids: list[int] = encoded.ids
        return ids

    def check_length(self, text: str, most_tokens: int) -> None:
        """Refuse a text of more characters than so many tokens can have, before it is encoded.

        Raises:
            CapacityError: says how many characters there are, and how many there may be.
        """
        if len(text) <= most_tokens:
            return
        if self._longest is None:
            self._longest = self._read_longest()
        if len(text) > most_tokens * self._longest:
            raise CapacityError(
                f"the text has {len(text)} characters, and {most_tokens} tokens, as many as there "
                f"is room for, have {most_tokens * self._longest:.0f} at most; shorten it"
            )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        if self._accented():  # which the library takes for bytes
            bytes_of = self._bytes_of if skip_special_tokens else self._spelled_bytes
            return b"".join(map(bytes_of, token_ids)).decode(errors="replace")
        text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return what one token adds to a text, special tokens included.

        Decoders that join words drop the space before the first one, so there it is what the token
        adds to a token before it.
        """
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._read_text(token_id)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token by itself, which may be a part of a character."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        return self._raw_bytes(token_id) or text.encode()

    def byte_token(self, byte: int) -> int | None:
        """Return the token of one byte that is a part of a character; None: there is none."""
        if self._is_byte_level:
            return self.token_to_id(next(c for c, one in self._alphabet.items() if one == byte))
        return self.token_to_id(f"<0x{byte:02X}>")

    def pending(self, token_ids: Iterable[int]) -> bytes:
        """Return the part of a character that tokens end with, of which the last comes first."""
        return pending_bytes(map(self._raw_bytes, token_ids))

    def token_spelling(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it, None where there is none of this id."""
        spelled: str | None = self._fast.id_to_token(token_id)
        return spelled

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text, so that `decode` leaves it out."""
        if self._special is None:
            added = self._fast.get_added_tokens_decoder()
            self._special = frozenset(one for one, token in added.items() if token.special)
        return token_id in self._special

    def special_spellings(self) -> list[str]:
        """Return the special tokens as texts spell them."""
        added = self._fast.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def without_special(self, spellings: Collection[str]) -> Tokenizer:
        """Return a tokenizer that takes what spells a special token for text like any other.

        Args:
            spellings: of tokens that count as special, also where the file does not call them so.
        """
        described = json.loads(self._fast.to_str())
        for one in described["added_tokens"]:
            one["special"] = one["special"] or one["content"] in spellings
        changed = type(self._fast).from_str(json.dumps(described))
        changed.encode_special_tokens = True
        return Tokenizer(changed, self.eos_token_ids)

    def vocabulary(self) -> dict[str, int]:
        """Return every token as it is spelled, added ones included, and its id."""
        found: dict[str, int] = self._fast.get_vocab(with_added_tokens=True)
        return found

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, None if there is none."""
        token_id: int | None = self._fast.token_to_id(token)
        return token_id

    def detokenizer(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spelled: Collection[int] = (),
    ) -> Pieces:
        """Return a detokenizer for what follows `prompt`.

        Args:
            prompt: token ids.
            skip_special_tokens: whether special tokens are left out of the text.
            spelled: special tokens that are in it all the same.
        """
        pending = self.pending(reversed(prompt))
        if self._is_byte_level:
            bytes_of = self._bytes_of if skip_special_tokens else self._spelled_bytes
            if skip_special_tokens and spelled:
                bytes_of = partial(self._bytes_with, frozenset(spelled))
            return ByteDetokenizer(bytes_of, pending)
        decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
        if skip_special_tokens and spelled:
            decode = partial(self._decode_with, frozenset(spelled))

        def is_left_out(token_id: int) -> bool:
            return skip_special_tokens and token_id not in spelled and self.is_special(token_id)

        return WindowDetokenizer(decode, prompt, len(pending), is_left_out)

    def _bytes_with(self, spelled: Collection[int], token_id: int) -> bytes:
        return (self._spelled_bytes if token_id in spelled else self._bytes_of)(token_id)

    def _decode_with(self, spelled: Collection[int], token_ids: Sequence[int]) -> str:
        """Return the text of tokens, of the special ones with those that are spelled out alone."""
        kept = [one for one in token_ids if one in spelled or not self.is_special(one)]
        return self.decode(kept, skip_special_tokens=False)

    def decode_prompt(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a prompt as `detokenizer` goes on with it.

        What it ends with of a character belongs to the text behind it.
        """
        pending = self.pending(reversed(token_ids))
        if not pending:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        count, end = 0, b""
        while len(end) < len(pending):
            count += 1
            end = (self._raw_bytes(token_ids[-count]) or b"") + end
        told = self.decode(token_ids[:-count], skip_special_tokens=skip_special_tokens)
        return told + end[: -len(pending)].decode(errors="replace")

    def _raw_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that may be a part of a character; None of one that is text."""
        if self._is_byte_level:
            return self._bytes_of(token_id)
        spelled = _BYTE.fullmatch(self.token_spelling(token_id) or "")
        return bytes([int(spelled[1], 16)]) if spelled else None

    def _read_text(self, token_id: int) -> str:
        """Return `token_text` of a token that was not met before."""
        if self._before is None:
            self._before = [] if self._is_byte_level else self._letter()
        before = self.decode(self._before) if self._before else ""
        text = self.decode([*self._before, token_id], skip_special_tokens=False)
        return text.removeprefix(before) if text.startswith(before) else self._alone(token_id)

    def _read_longest(self) -> float:
        """Return how many characters of a text one token can stand for; infinity: who knows."""
        from tokenizers import models, normalizers

        # Others may make one token of a long unknown word, or none.
        if not isinstance(self._fast.model, models.BPE) or not (
            self._is_byte_level or self._fast.model.byte_fallback
        ):
            return math.inf
        added = self._fast.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):  # with any amount of space
            return math.inf
        composing = (normalizers.NFC, normalizers.NFKC)  # make one character of at most four
        if self._fast.normalizer is not None and not isinstance(self._fast.normalizer, composing):
            return math.inf
        longest = max(map(len, self.vocabulary()), default=0)
        return longest if self._fast.normalizer is None else 4 * longest

    def _alone(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def _letter(self) -> list[int]:
        """Return a token that is one letter, with nothing around it; none if there is no such."""
        for letter in "abcdefghijklmnopqrstuvwxyz":
            token_id = self.token_to_id(letter)
            if token_id is not None and self._alone(token_id) == letter:
                return [token_id]
        return []

    def _bytes_of(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._read_bytes(token_id)
        return found

    def _accented(self) -> frozenset[int]:
        """Return added tokens that would spell bytes if they were others: DeepSeek Coder's ü."""
        if self._texts_like_bytes is None:
            added = self._fast.get_added_tokens_decoder() if self._is_byte_level else {}
            self._texts_like_bytes = frozenset(
                one
                for one, token in added.items()
                if not token.content.isascii() and self._alphabet.keys() >= set(token.content)
            )
        return self._texts_like_bytes

    def _spelled_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, of a special one those of its name."""
        if self.is_special(token_id):
            return (self.token_spelling(token_id) or "").encode()
        return self._bytes_of(token_id)

    def _read_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a byte-level token; none for special and unknown ones."""
        token: str | None = self._fast.id_to_token(token_id)
        if token is None or self.is_special(token_id):
            return b""
        if token_id in self._accented():
            return token.encode()
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:  # an added token, spelled as it is
            return token.encode()


def _infill_tokens(path: Path) -> Mapping[str, object]:
    """Return the tokens to fill in by that a configuration names, if there is one and it does."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from error
    found = config.get(INFILL_TOKENS, {}) if isinstance(config, dict) else None
    if not isinstance(found, dict):
        raise ArtifactError(
            f"{path} has no JSON object, or none as {INFILL_TOKENS!r}; export the model again"
        )
    return found


def _with_texts(fast: FastTokenizer, texts: Collection[str]) -> FastTokenizer:
    """Return a tokenizer whose tokens of these spellings are not special."""
    if not texts:
        return fast
    described = json.loads(fast.to_str())
    hidden = [
        one for one in described["added_tokens"] if one["special"] and one["content"] in texts
    ]
    if not hidden:
        return fast
    for one in hidden:
        one["special"] = False
    changed: FastTokenizer = type(fast).from_str(json.dumps(described))
    return changed


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable character of each byte: itself, or the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
