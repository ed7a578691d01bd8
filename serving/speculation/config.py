"""What a user may choose about speculation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from onnxport.errors import CapacityError
from onnxport.serving.speculation.vllm_keys import understood

MOST = 2**31  # of any count
# Tokens that are guessed at once, each of them a series of the metrics; and of an n-gram that is
# looked up at least. Where each is right 98 times in a hundred, which is the most that is believed,
# all of so many are once in 170 times.
MOST_GUESSED = 256
# Tokens of answers that are kept, of 44 bytes each; below the least no answer would have room.
MOST_KEPT, LEAST_KEPT = 1 << 28, 1 << 10
USUAL_GUESSES = 5  # at once, where the method has no better measure
SpeculationMethod = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar"]
LONGEST_NGRAM, SHORTEST_NGRAM = 4, 2  # where nobody says
_SUFFIX = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_cached_tokens",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
_NGRAM = ("prompt_lookup_max", "prompt_lookup_min")
_MODEL = ("model", "provider", "threads", "kv_cache_tokens", "kv_cache_dtype", "max_model_len")
_KEYS: Mapping[str, tuple[str, ...]] = {  # that a method has for itself
    "ngram": _NGRAM,
    "suffix": _SUFFIX,
    "draft_model": _MODEL,
    "eagle3": _MODEL,
    "mtp": _MODEL,
    "grammar": (),
}


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are guessed, with vLLM's names where it has them.

    Attributes:
        method: "grammar" takes what the form of a request's output demands. "ngram" does, too, and
            elsewhere takes what followed the last time that these tokens came in prompt and output;
            "suffix" what followed most often, there and in the answers to earlier requests.
            "draft_model" asks a smaller model; "eagle3" a head that reads what the model made of
            the tokens before; "mtp" the model's own layer of multi-token prediction, likewise.
        num_speculative_tokens: most tokens that are guessed at once; how many really are is
            chosen by what is measured to be right, and to pay. None: see `longest_draft`.
        prompt_lookup_max: the longest n-gram that is looked up; "ngram" only. None: 4, or
            `prompt_lookup_min` if that is more.
        prompt_lookup_min: the shortest; "ngram" only. None: 2, or `prompt_lookup_max` if less.
        suffix_decoding_max_tree_depth: most tokens that are compared and guessed, together;
            "suffix" only. For what follows likewise.
        suffix_decoding_max_cached_requests: answers that are kept; 0: none.
        suffix_decoding_max_cached_tokens: tokens of these answers, of 44 bytes each; not vLLM's.
        suffix_decoding_max_spec_factor: tokens that are guessed for each that was found again.
        suffix_decoding_min_token_prob: the least probability of a guess, by how often it followed.
        model: the artifact folder of the draft model, or of the head; "draft_model" and "eagle3",
            which need it, and "mtp", where None is in the model's own artifact. For what follows
            likewise.
        provider: what the draft model runs on; None: as the model it drafts for.
        threads: its compute threads; None: one for a model of up to 1 MiB, else the provider's
            choice.
        kv_cache_tokens: the size of its KV cache; None: a tenth of the free memory.
        kv_cache_dtype: what its KV cache holds; None: the provider's choice.
        max_model_len: longest sequence that it computes, in tokens; None: its context.
        num_speculative_tokens_per_batch_size: (first, last, most): steps of so many sequences guess
            at most so many tokens for each, 0 for none; between and behind these ranges it is as in
            the one before. None: as it pays, as it is below these limits.
        disable_by_batch_size: nothing is guessed in steps of more sequences; None: as it pays.

    Raises:
        CapacityError: a value is out of its range, or does not belong to the method.
    """

    method: SpeculationMethod
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_cached_tokens: int = 1 << 21
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    model: Path | None = None
    provider: str | None = None
    threads: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculationMethod):
            raise CapacityError(
                f"the speculation method is {self.method!r}; it must be one of "
                f"{', '.join(get_args(SpeculationMethod))}"
            )
        if self.num_speculative_tokens is not None:
            self._check_count("num_speculative_tokens", self.num_speculative_tokens, MOST_GUESSED)
        if self.prompt_lookup_min is not None:
            self._check_count("prompt_lookup_min", self.prompt_lookup_min, MOST_GUESSED)
        counts = ("prompt_lookup_max", "threads", "kv_cache_tokens", "max_model_len")
        for name in (*counts, "disable_by_batch_size"):
            if getattr(self, name) is not None:
                self._check_count(name, getattr(self, name))
        longest, shortest = self.ngrams
        if longest < shortest:
            raise CapacityError(
                f"prompt_lookup_max is {longest} and prompt_lookup_min {shortest}; raise the first "
                "or lower the second"
            )
        self._check_schedule()
        self._check_suffix()
        self._check_method()

    @property
    def longest_draft(self) -> int:
        """Most tokens that are guessed at once: what was given, or what suits the method.

        That is 5, and of "suffix", whose matches say how far to guess, its depth, as in vLLM.
        """
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return self.suffix_decoding_max_tree_depth if self.method == "suffix" else USUAL_GUESSES

    @property
    def ngrams(self) -> tuple[int, int]:
        """The longest n-gram that is looked up, and the shortest: what was given, or what suits."""
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if longest is None:
            longest = max(LONGEST_NGRAM, shortest or 1)
        return longest, min(SHORTEST_NGRAM, longest) if shortest is None else shortest

    def longest_at(self, num_sequences: int) -> int:
        """Most tokens that are guessed for each of so many sequences of a step; 0: none are."""
        most_rows = self.disable_by_batch_size
        if most_rows is not None and num_sequences > most_rows:
            return 0
        most = self.longest_draft
        for first, _, limit in reversed(self.num_speculative_tokens_per_batch_size or ()):
            if num_sequences >= first:
                return min(most, limit)
        return most

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the JSON object that `--speculative-config` takes.

        Raises:
            CapacityError: it is not one, a key is not known, or as the class.
        """
        try:
            given = json.loads(text)
        except ValueError as error:
            raise CapacityError(f"the speculative config is not JSON: {error}") from error
        return cls.of(given)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the config of these keys and values; see `parse`."""
        names = [one.name for one in fields(cls)]
        if isinstance(given, Mapping):
            given = understood(given)
        example = '{"method": "ngram", "num_speculative_tokens": 5}'
        if not isinstance(given, Mapping) or given.get("method") is None:
            raise CapacityError(
                f"the speculative config is {given!r}; it must be an object with a method, as in "
                f"{example}"
            )
        if unknown := sorted(set(given) - set(names)):
            raise CapacityError(
                f"the speculative config has {', '.join(map(repr, unknown))}, which is not known; "
                f"allowed are {', '.join(names)}"
            )
        for name in ("model", "provider", "kv_cache_dtype"):
            if not isinstance(given.get(name), str | Path | None):
                raise CapacityError(f"{name} is {given[name]!r}; it must be text")
        model = given.get("model")
        changed: dict[str, Any] = {"model": None if model is None else Path(model)}
        schedule = given.get("num_speculative_tokens_per_batch_size")
        if isinstance(schedule, list):
            ranges = [tuple(one) if isinstance(one, list) else one for one in schedule]
            changed["num_speculative_tokens_per_batch_size"] = tuple(ranges)
        return cls(**{**given, **changed})

    def _check_count(self, name: str, value: object, most: int = MOST, least: int = 1) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= cast(int, value) <= most:
            raise CapacityError(
                f"{name} is {value!r}; it must be a whole number from {least} to {most}"
            )

    def _check_schedule(self) -> None:
        """Check the ranges of batch sizes: one behind the other, the first from 1 on."""
        schedule = self.num_speculative_tokens_per_batch_size
        if schedule is None:
            return
        name = "num_speculative_tokens_per_batch_size"
        example = "[[1, 8, 5], [9, 32, 2], [33, 64, 0]]"
        if not isinstance(schedule, tuple) or not schedule:
            raise CapacityError(
                f"{name} is {schedule!r}; give ranges of batch sizes with the most guesses of "
                f"each, as in {example}"
            )
        end = 0
        for one in schedule:
            if not isinstance(one, tuple) or len(one) != 3:
                raise CapacityError(
                    f"{name} has {one!r}; each of it is the first and the last batch size and the "
                    f"most guesses, as in {example}"
                )
            first, last, limit = one
            self._check_count(f"a batch size of {name}", first)
            self._check_count(f"a batch size of {name}", last)
            self._check_count(f"a limit of {name}", limit, MOST_GUESSED, 0)
            if last < first or first <= end or (end == 0 and first != 1):
                raise CapacityError(
                    f"{name} has [{first}, {last}, {limit}] behind batch size {end}; give ranges "
                    f"that begin at 1 and follow one another, as in {example}"
                )
            end = last

    def _check_suffix(self) -> None:
        """Check what the method "suffix" takes."""
        for name, least, most in (
            ("suffix_decoding_max_tree_depth", 2, MOST_GUESSED),  # of one token nothing follows
            ("suffix_decoding_max_cached_requests", 0, MOST),
            ("suffix_decoding_max_cached_tokens", LEAST_KEPT, MOST_KEPT),
        ):
            self._check_count(name, getattr(self, name), most, least)
        factor, depth = self.suffix_decoding_max_spec_factor, self.suffix_decoding_max_tree_depth
        if not _is_number(factor) or not 1 / (depth - 1) <= factor <= MOST:
            raise CapacityError(
                f"suffix_decoding_max_spec_factor is {factor!r}; it must be a number from "
                f"1 / {depth - 1} to {MOST}: with less nothing would be guessed, for what was "
                f"found again has {depth - 1} tokens at most (suffix_decoding_max_tree_depth "
                f"{depth})"
            )
        least_probability = self.suffix_decoding_min_token_prob
        if not _is_number(least_probability) or not 0 <= least_probability <= 1:
            raise CapacityError(
                f"suffix_decoding_min_token_prob is {least_probability!r}; it must be a number "
                "from 0 to 1"
            )

    def _check_method(self) -> None:
        """Refuse what would be ignored."""
        own = _KEYS[self.method]
        if own is _MODEL and self.model is None and self.method != "mtp":
            needed = (
                "an artifact with the same tokenizer"
                if self.method == "draft_model"
                else "what `onnxport export HEAD FOLDER --target MODEL` made of a head"
            )
            raise CapacityError(
                f"the speculation method {self.method} needs a model: the folder of {needed}"
            )
        foreign = [name for name in (*_MODEL, *_NGRAM, *_SUFFIX) if name not in own]
        defaults = {one.name: one.default for one in fields(self)}
        given = [name for name in foreign if getattr(self, name) != defaults[name]]
        if given:
            raise CapacityError(
                f"the speculation method {self.method} does not use {', '.join(given)}; leave that "
                "out"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
