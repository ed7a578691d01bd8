"""What `LLM` takes: prompts in each form, and what goes with one or with all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

from onnxport.errors import RequestError
from onnxport.serving.chat import check_variables

T = TypeVar("T")


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | TextPrompt | TokensPrompt


def text_or_ids(prompt: Prompt) -> str | list[int]:
    """Return the text or the token ids of a prompt."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping) and prompt.keys() == {"prompt"}:
        return cast(TextPrompt, prompt)["prompt"]
    if isinstance(prompt, Mapping) and prompt.keys() == {"prompt_token_ids"}:
        ids: Any = cast(TokensPrompt, prompt)["prompt_token_ids"]
        if not isinstance(ids, str | bytes):
            return cast(list[int], ids)
        raise RequestError(
            f"prompt_token_ids is {type(ids).__name__}; it must be a list of token ids", "prompt"
        )
    found = f"keys {sorted(prompt)}" if isinstance(prompt, Mapping) else type(prompt).__name__
    raise RequestError(
        f"a prompt has {found}; it must be text, {{'prompt': text}} or {{'prompt_token_ids': ids}}",
        "prompt",
    )


def variables_of(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return variables of a chat template as keywords, none of which `render` has itself."""
    variables = dict(given or {})
    if strange := [name for name in variables if not isinstance(name, str)]:
        raise RequestError(
            f"chat_template_kwargs has the name {strange[0]!r}; names are text",
            "chat_template_kwargs",
        )
    check_variables(variables)
    return variables


def one_for_each(given: T | Sequence[T] | None, default: T, number: int, name: str) -> Sequence[T]:
    """Return `number` values: those given, or one for all."""
    if given is None or isinstance(given, type(default)):
        return [default if given is None else given] * number
    kind = type(default)
    several: Any = given
    whole = isinstance(several, Sequence) and not isinstance(several, str)
    if not whole or not all(one is None or isinstance(one, kind) for one in several):
        raise RequestError(f"{name} must be {kind.__name__}, or a list of these", name)
    if len(several) != number:
        raise RequestError(
            f"{len(several)} {name} for {number} prompts; give one, or one for each", name
        )
    return [default if one is None else one for one in several]
