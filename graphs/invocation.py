"""The invocation tokens of an aLoRA ("activated" LoRA): what it begins to act at.

It changes these tokens, where they are last in a prompt, and all that follow; those before are the
base model's. Source: PEFT's `LoraConfig`, and "Activated LoRA", https://arxiv.org/abs/2504.12397.
"""

from __future__ import annotations

from typing import Any, Final

from onnxport.errors import AdapterError
from onnxport.graphs.spec import ArchSpec

MOST_TOKENS: Final = 1000  # of an invocation, which is looked for in every prompt


def read_invocation(where: str, value: Any, base: ArchSpec) -> tuple[int, ...]:
    """Return the invocation tokens that a file gives; none: the adapter acts on all tokens.

    Args:
        where: names the file and its field, for errors.
        value: of the field; None where there is none.
        base: the model, which has to have such tokens.

    Raises:
        AdapterError: it is no list of the model's tokens.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise AdapterError(
            f"{where} is {_shown(value)}; it must be a list of token ids, at most {MOST_TOKENS}, "
            "or null for a LoRA that acts on all tokens"
        )
    if len(value) > MOST_TOKENS:
        raise AdapterError(
            f"{where} has {len(value)} tokens; at most {MOST_TOKENS} are looked for in prompts"
        )
    if unknown := [one for one in value if not 0 <= one < base.vocab_size]:
        raise AdapterError(
            f"{where} is {_shown(value)}, and the model has the tokens 0 to "
            f"{base.vocab_size - 1}, not {unknown[0]}; the adapter was made for another model"
        )
    return tuple(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
