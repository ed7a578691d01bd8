"""What a user may choose about speculation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from onnxport.errors import CapacityError

MOST = 2**31  # of any count
# Tokens that are guessed at once, each of them a series of the metrics; and of an n-gram that is
# looked up at least. Where each is right 98 times in a hundred, which is the most that is believed,
# all of so many are once in 170 times.
MOST_GUESSED = 256
SpeculationMethod = Literal["ngram", "draft_model", "eagle3", "grammar"]


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are guessed, with vLLM's names where it has them.

    Attributes:
        method: "grammar" takes what the form of a request's output demands; "ngram" does, too, and
            elsewhere takes what followed the last time that these tokens came in prompt and output;
            "draft_model" asks a smaller model; "eagle3" a head that reads what the model made of
            the tokens before.
        num_speculative_tokens: most tokens that are guessed at once; how many really are is
            chosen by what is measured to be right, and to pay.
        prompt_lookup_max: the longest n-gram that is looked up; "ngram" only.
        prompt_lookup_min: the shortest; "ngram" only.
        model: the artifact folder of the draft model, or of the head; "draft_model" and "eagle3"
            only, which need it. For what follows likewise.
        provider: what the draft model runs on; None: as the model it drafts for.
        threads: its compute threads; None: one for a model of up to 1 MiB, else the provider's
            choice.
        kv_cache_tokens: the size of its KV cache; None: a tenth of the free memory.
        disable_by_batch_size: nothing is guessed in steps of more sequences; None: as it pays.

    Raises:
        CapacityError: a value is out of its range, or does not belong to the method.
    """

    method: SpeculationMethod
    num_speculative_tokens: int = 5
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    model: Path | None = None
    provider: str | None = None
    threads: int | None = None
    kv_cache_tokens: int | None = None
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculationMethod):
            raise CapacityError(
                f"the speculation method is {self.method!r}; it must be one of "
                f"{', '.join(get_args(SpeculationMethod))}"
            )
        for name in ("num_speculative_tokens", "prompt_lookup_min"):
            self._check_count(name, getattr(self, name), MOST_GUESSED)
        for name in ("threads", "kv_cache_tokens", "disable_by_batch_size"):
            if getattr(self, name) is not None:
                self._check_count(name, getattr(self, name))
        self._check_count("prompt_lookup_max", self.prompt_lookup_max)
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise CapacityError(
                f"prompt_lookup_max is {self.prompt_lookup_max} and prompt_lookup_min "
                f"{self.prompt_lookup_min}; raise the first or lower the second"
            )
        self._check_method()

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
        example = '{"method": "ngram", "num_speculative_tokens": 5}'
        if not isinstance(given, Mapping) or "method" not in given:
            raise CapacityError(
                f"the speculative config is {given!r}; it must be an object with a method, as in "
                f"{example}"
            )
        if unknown := sorted(set(given) - set(names)):
            raise CapacityError(
                f"the speculative config has {', '.join(map(repr, unknown))}, which is not known; "
                f"allowed are {', '.join(names)}"
            )
        for name in ("model", "provider"):
            if not isinstance(given.get(name), str | Path | None):
                raise CapacityError(f"{name} is {given[name]!r}; it must be text")
        model = given.get("model")
        return cls(**{**given, "model": None if model is None else Path(model)})

    def _check_count(self, name: str, value: object, most: int = MOST) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 1 <= cast(int, value) <= most:
            raise CapacityError(f"{name} is {value!r}; it must be a whole number from 1 to {most}")

    def _check_method(self) -> None:
        """Refuse what would be ignored."""
        foreign: tuple[str, ...] = ("model", "provider", "threads", "kv_cache_tokens")
        if self.method in ("draft_model", "eagle3"):
            if self.model is None:
                needed = (
                    "an artifact with the same tokenizer"
                    if self.method == "draft_model"
                    else "what `onnxport export HEAD FOLDER --target MODEL` made of a head"
                )
                raise CapacityError(
                    f"the speculation method {self.method} needs a model: the folder of {needed}"
                )
            foreign = ("prompt_lookup_max", "prompt_lookup_min")
        elif self.method == "grammar":
            foreign += ("prompt_lookup_max", "prompt_lookup_min")
        defaults = {one.name: one.default for one in fields(self)}
        given = [name for name in foreign if getattr(self, name) != defaults[name]]
        if given:
            raise CapacityError(
                f"the speculation method {self.method} does not use {', '.join(given)}; leave that "
                "out"
            )
