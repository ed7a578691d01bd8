"""Filling in: a prompt of what stands before and behind a gap, which the model goes on with.

Models that can were trained on texts in another order, whose parts begin with tokens of their own
(Bavarian et al., Efficient Training of Language Models to Fill in the Middle, 2022). Each family
spells these its own way, so they are looked for by name, as llama.cpp does; who knows better may
name them. Other files stand before that, as Qwen2.5-Coder has them (arXiv 2409.12186).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, NamedTuple, Protocol, Self

from onnxport.errors import CapacityError, RequestError
from onnxport.serving.params import SamplingParams

REPO, FILE = "myproject\n", "filename\n"  # llama.cpp's, for nobody tells what they are called
SNIPPET = "\n\n--- snippet ---\n\n"  # before a text, where no token begins a file
ANCHOR = "☺"  # a character that nothing is merged with
SPACES = ("▁", "Ġ")
ENDS: Final = (  # of texts, whatever the model's configuration says
    *("<EOT>", "▁<EOT>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>"),
    *("<|eom_id|>", "<end_of_turn>"),
)


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    @property
    def infill_tokens(self) -> Mapping[str, object]:
        """Tokens to fill in by that its files name, as `InfillNames` calls them."""
        ...

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it."""
        ...

    def token_spelling(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        ...

    def special_spellings(self) -> Sequence[str]:
        """Return the special tokens as they are spelled."""
        ...

    def without_special(self, spellings: Sequence[str]) -> Self:
        """Return a tokenizer to which these, and special tokens, are text like any other."""
        ...


@dataclass(frozen=True, slots=True)
class InfillNames:
    """The tokens that a model fills in by, as its vocabulary spells them.

    Attributes:
        prefix: begins what stands before the gap.
        suffix: begins what stands behind it.
        middle: begins what fills it; None: the prefix is last, and what follows goes on with it.
        pad: fills up training data, and ends a text; None: there is none.
        repo_name: begins the name of a project; None: there is none.
        file_separator: begins a file, and so ends the one before; None: there is none.
        suffix_first: whether the suffix comes before the prefix.

    Raises:
        RequestError: without `middle` the prefix would not be the last part.
    """

    prefix: str
    suffix: str
    middle: str | None = None
    pad: str | None = None
    repo_name: str | None = None
    file_separator: str | None = None
    suffix_first: bool = False

    def __post_init__(self) -> None:
        if self.middle is None and not self.suffix_first:
            raise RequestError(
                "the tokens of filling in have no middle, so the model would go on with the "
                "suffix; name the token, or let the suffix be first"
            )

    @classmethod
    def of(cls, given: Mapping[str, object], *, suffix_first: bool) -> Self:
        """Return names that were given by hand.

        Raises:
            RequestError: one is not known, is no text, or a needed one is missing.
        """
        known = [each.name for each in fields(cls) if each.name != "suffix_first"]
        listed = ", ".join(known)
        for name, token in given.items():
            if name not in known:
                raise RequestError(f"tokens of filling in have {name!r}; they are {listed}")
            if not isinstance(token, str) or not token:
                raise RequestError(
                    f"the token {name} is {token!r}; spell it as the vocabulary does, such as "
                    "'<|fim_prefix|>'"
                )
        if missing := [name for name in ("prefix", "suffix") if name not in given]:
            raise RequestError(f"tokens of filling in lack {missing[0]}; they are {listed}")
        told = {name: str(token) for name, token in given.items()}
        return cls(**told, suffix_first=suffix_first)


FAMILIES: Final = (
    InfillNames(  # Qwen2.5-Coder, Qwen3-Coder, Granite 4
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"),
        *("<|repo_name|>", "<|file_sep|>"),
    ),
    InfillNames(  # CodeGemma
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        file_separator="<|file_separator|>",
    ),
    InfillNames(  # StarCoder, StarCoder2, Granite 3
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"),
        *("<repo_name>", "<file_sep>"),
    ),
    InfillNames("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>"),  # SantaCoder
    InfillNames("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    InfillNames("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    InfillNames("<PRE>", "<SUF>", "<MID>", "<PAD>"),
    InfillNames("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    InfillNames("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon-H1's coder
    InfillNames("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)
_NEEDED: Final = ("prefix", "suffix", "middle")  # of a family; others are used where they are there


class Extra(NamedTuple):
    """A text from elsewhere that may help."""

    filename: str
    text: str


class Filling(NamedTuple):
    """A prompt."""

    token_ids: list[int]
    is_cut: bool  # whether there was not room for all


class _Ids(NamedTuple):
    """Token ids by the names of `InfillNames`."""

    prefix: int
    suffix: int
    middle: int | None
    pad: int | None
    repo_name: int | None
    file_separator: int | None


class Infill:
    """How one model fills in; any thread may use it.

    Attributes:
        names: of its tokens.
        ends: tokens that end what is filled in, beside the model's own end tokens.
    """

    def __init__(self, tokenizer: Encoder, names: InfillNames) -> None:
        """Take the tokens of these names.

        Raises:
            RequestError: the vocabulary lacks one.
        """
        self.names = names
        self._tokenizer = tokenizer
        self._ids = _Ids(*(self._id_of(getattr(names, name)) for name in _Ids._fields))  # type: ignore[arg-type]
        known = [tokenizer.token_to_id(name) for name in ENDS]
        self.ends = tuple(dict.fromkeys(one for one in (*self._ids, *known) if one is not None))
        [bare] = tokenizer.encode_all(["a"], add_special_tokens=False)
        [whole] = tokenizer.encode_all(["a"])
        self._begins = whole[: _place(bare, whole)]
        first = tokenizer.token_spelling(bare[0]) if bare else None
        self._adds_space = (first or "").startswith(SPACES)
        own = {token for name in _Ids._fields if (token := getattr(names, name)) is not None}
        self._special = sorted({*own, *tokenizer.special_spellings()})
        special = map(tokenizer.token_to_id, self._special)
        self._special_ids = frozenset(one for one in special if one is not None)

    @classmethod
    def find(cls, tokenizer: Encoder, *, suffix_first: bool = False) -> Self | None:
        """Return how a model fills in, by the names that its vocabulary has; None: it has none.

        What the tokenizer's files name goes first, and a family has what they do not.

        Args:
            tokenizer: of the model.
            suffix_first: whether the suffix comes first, also where the family has it last.
        """
        family = _family(tokenizer, suffix_first=suffix_first)
        told = tokenizer.infill_tokens
        if told:
            named: dict[str, object] = {**({} if family is None else _told(family)), **told}
            if "prefix" in named and "suffix" in named:
                is_first = suffix_first or "middle" not in named
                family = InfillNames.of(named, suffix_first=is_first)
        return None if family is None else cls(tokenizer, family)

    def ended(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of a text that ends where a filling does, if it obeys ends."""
        if params.ignore_eos:
            return params
        ends = tuple(dict.fromkeys((*params.stop_token_ids, *self.ends)))
        return replace(params, stop_token_ids=ends)

    def around(
        self, prefix: str, suffix: str, *, begins: bool = True, most: int | None = None
    ) -> Filling:
        """Return the prompt of a gap, by itself.

        Args:
            prefix: what stands before it.
            suffix: what stands behind it.
            begins: whether the prompt begins with what the tokenizer puts before a text.
            most: see `in_project`.
        """
        return self._filling([], [], prefix, suffix, most, begins=begins)

    def in_project(
        self, prefix: str, suffix: str, extras: Sequence[Extra], most: int | None = None
    ) -> Filling:
        """Return the prompt of a gap in a file among others.

        Where not all has room extras are left out, the first ones first and each as a whole. Then
        the prefix loses its beginning and the suffix its end: it keeps a quarter of the room, or
        what the prefix leaves of it.

        Args:
            prefix: what stands before the gap.
            suffix: what stands behind it.
            extras: the last ones stand nearest to it.
            most: tokens of the prompt; None: there is room for all.

        Raises:
            CapacityError: there is not even room for the tokens that hold it together.
        """
        head, chunks = [], []
        file, repo = self._ids.file_separator, self._ids.repo_name
        if repo is not None and file is not None:
            head = [repo, *self._encode(REPO)]
        for extra in extras:
            if file is not None:
                chunks.append(
                    [file, *self._encode(f"{extra.filename}\n"), *self._behind(extra.text)]
                )
            else:
                chunks.append(self._behind(SNIPPET + extra.text))
        own = [] if file is None else [file, *self._encode(FILE)]
        return self._filling(head, chunks, prefix, suffix, most, own=own)

    def _filling(
        self,
        head: Sequence[int],
        chunks: Sequence[Sequence[int]],
        prefix: str,
        suffix: str,
        most: int | None,
        *,
        own: Sequence[int] = (),
        begins: bool = True,
    ) -> Filling:
        before, behind = self._encode(prefix), self._behind(suffix)
        start = [*(self._begins if begins else []), *head]
        middle = [] if self._ids.middle is None else [self._ids.middle]
        held = len(start) + len(own) + 2 + len(middle)
        cut = (len(before), len(behind))
        kept = len(chunks)
        if most is not None:
            if most < held:
                raise CapacityError(
                    f"there is room for {most} tokens of prompt, and {held} hold it together; ask "
                    "for fewer tokens"
                )
            cut = shares(len(before), len(behind), most - held)
            kept = last_that_fit([len(chunk) for chunk in chunks], most - held - sum(cut))
        is_cut = cut != (len(before), len(behind)) or kept < len(chunks)
        before = before[len(before) - cut[0] :]
        parts = [[self._ids.prefix, *before], [self._ids.suffix, *behind[: cut[1]]]]
        if self.names.suffix_first:
            parts.reverse()
        others = [token for chunk in chunks[len(chunks) - kept :] for token in chunk]
        return Filling([*start, *others, *own, *parts[0], *parts[1], *middle], is_cut)

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text, none of which is special whatever it spells."""
        [tokens] = self._tokenizer.encode_all([text], add_special_tokens=False)
        if not self._special_ids.isdisjoint(tokens):
            [tokens] = self._plain.encode_all([text], add_special_tokens=False)
        return tokens

    def _behind(self, text: str) -> list[int]:
        """Return the same without the space that some tokenizers put before every text."""
        if not self._adds_space or not text:
            return self._encode(text)
        anchor, whole = self._encode(ANCHOR), self._encode(ANCHOR + text)
        return whole[len(anchor) :] if whole[: len(anchor)] == anchor else self._encode(text)

    @cached_property
    def _plain(self) -> Encoder:
        return self._tokenizer.without_special(self._special)

    def _id_of(self, name: str | None) -> int | None:
        found = None if name is None else self._tokenizer.token_to_id(name)
        if name is not None and found is None:
            raise RequestError(
                f"the vocabulary has no token {name!r} to fill in by; spell it as tokenizer.json "
                "does"
            )
        return found


def shares(num_prefix: int, num_suffix: int, room: int) -> tuple[int, int]:
    """Return how many tokens of prefix and suffix there is room for."""
    suffix = min(num_suffix, max(room // 4, room - num_prefix))
    return min(num_prefix, room - suffix), suffix


def last_that_fit(lengths: Sequence[int], room: int) -> int:
    """Return how many of the last lengths have a sum that fits."""
    count = 0
    for length in reversed(lengths):
        room -= length
        if room < 0:
            break
        count += 1
    return count


def _family(tokenizer: Encoder, *, suffix_first: bool) -> InfillNames | None:
    """Return the names of the family of which a vocabulary has most; None: of none all needed."""
    found = []
    for names in FAMILIES:
        told = _told(names)
        known = {
            name: token for name, token in told.items() if tokenizer.token_to_id(token) is not None
        }
        if all(name not in told or name in known for name in _NEEDED):
            is_first = suffix_first or names.suffix_first
            found.append(InfillNames(**known, suffix_first=is_first))
    return max(found, key=lambda names: len(_told(names)), default=None)


def _told(names: InfillNames) -> dict[str, str]:
    """Return the tokens that have a name."""
    found = {name: getattr(names, name) for name in _Ids._fields}
    return {name: token for name, token in found.items() if token is not None}


def _place(part: Sequence[int], whole: Sequence[int]) -> int:
    """Return where a part begins in a whole; 0 if it is not in it."""
    size = len(part)
    found = (at for at in range(len(whole) - size + 1) if list(whole[at : at + size]) == list(part))
    return next(found, 0)
