"""Prompts that are cut: what stands around a text stays, and the text loses one of its ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

from onnxport.errors import CapacityError, RequestError

Side = Literal["left", "right"]
SIDES: Final[tuple[Side, ...]] = get_args(Side)


@dataclass(frozen=True, slots=True)
class Around:
    """Tokens around a text that stay where the text is cut: the model's prompt, special tokens.

    Attributes:
        num_ahead: of them, the first of a prompt.
        num_behind: likewise, the last.
    """

    num_ahead: int = 0
    num_behind: int = 0

    @classmethod
    def of(cls, prompt: Sequence[int], bare: Sequence[int]) -> Self:
        """Find them in a prompt, by what that is without its text."""
        shorter = min(len(prompt), len(bare))
        ahead = next((at for at in range(shorter) if prompt[at] != bare[at]), shorter)
        left = shorter - ahead
        behind = next((at for at in range(left) if prompt[-1 - at] != bare[-1 - at]), left)
        return cls(ahead, behind)


def check_truncation(num_tokens: int | None) -> None:
    """Raise RequestError where it is no number of tokens, nor -1 for as many as have room."""
    if num_tokens is None or (type(num_tokens) is int and (num_tokens > 0 or num_tokens == -1)):
        return
    raise RequestError(
        f"truncate_prompt_tokens is {num_tokens!r}; use 1 or more, or -1 for as many as have room",
        "truncate_prompt_tokens",
    )


def cut(prompt: list[int], most_tokens: int, around: Around, side: Side | None = None) -> list[int]:
    """Return a prompt without the beginning or the end of its text, as far as need be.

    Args:
        prompt: token ids.
        most_tokens: that it may have.
        around: what stays of it in any case.
        side: which is cut away; None: the left one.

    Raises:
        CapacityError: nothing of the text would be left.
    """
    if len(prompt) <= most_tokens:
        return prompt
    first, behind = around.num_ahead, around.num_behind
    room = most_tokens - first - behind
    if room < 1:
        raise CapacityError(
            f"the prompt that goes ahead of a text, and special tokens, are {first + behind} "
            f"tokens, and a prompt is to have {most_tokens} at most, so that nothing of the text "
            "would be left; allow more"
        )
    end = len(prompt) - behind
    start = first if side == "right" else end - room
    return prompt[:first] + prompt[start : start + room] + prompt[end:]
