"""How much a model is to think, as the variables that its chat template has for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.reasoning import AnyFormat
from onnxport.serving.thoughts import Thought

NO_EFFORT: Final = "none"
# Whether a model thinks at all: the values for that, and for not. DeepSeek V3.1, Granite 3.3 and
# Kimi K3 have `thinking`, MiniMax M3 `thinking_mode`.
SWITCHES: Final[Mapping[str, tuple[Any, Any]]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
}
# How much it thinks; Muse has a strength, and Kimi K3 `thinking_effort`.
LEVELS: Final = ("reasoning_effort", "reasoning_strength", "thinking_effort")
# What templates that have a level alone call it not to think; the first one that ends the thought
# counts. Cohere's, Hunyuan's, Solar's.
_OFF: Final = (NO_EFFORT, "no_think", "minimal")
_PROBE: Final = ({"role": "user", "content": "hello"},)


def effort_variables(
    template: ChatTemplate, reasoning: AnyFormat | None, effort: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the variables of a request that asks for an effort.

    Args:
        template: of the model.
        reasoning: how the model writes it, where that is known.
        effort: "none", or how much.
        given: the variables that it sets itself. Its switches go before the effort.

    Raises:
        RequestError: the template has no variable for it.
    """
    switches = switched(template, effort != NO_EFFORT, {})
    variables = switched(template, effort != NO_EFFORT, given)
    levels = known_levels(template)
    if not switches and not levels:
        raise RequestError(
            f"reasoning_effort is {effort!r}, and the model's chat template has no variable for "
            "it, nor one for whether to think; leave it out",
            "reasoning_effort",
        )
    if effort != NO_EFFORT or not switches:
        level = effort if effort != NO_EFFORT else _off(template, reasoning, levels)
        variables |= dict.fromkeys(levels, level)
    return variables


def known_levels(template: ChatTemplate) -> list[str]:
    """Return the variables for how much to think that a template reads."""
    return [name for name in LEVELS if template.knows(name)]


def switched(template: ChatTemplate, is_on: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables of a request with the switches that its template reads.

    Args:
        template: of the model.
        is_on: whether it is to think.
        given: what the request sets; if it sets a switch, that counts, by whatever name.
    """
    known = {name: on if is_on else off for name, (on, off) in SWITCHES.items()}
    switches = {name: value for name, value in known.items() if template.knows(name)}
    return dict(given) if switches.keys() & given.keys() else {**given, **switches}


def is_switched_on(variables: Mapping[str, Any]) -> bool:
    """Whether variables of a template say that the model is to think."""
    return any(
        bool(variables.get(name)) and variables[name] != off for name, (_, off) in SWITCHES.items()
    )


def _off(template: ChatTemplate, reasoning: AnyFormat | None, levels: list[str]) -> str:
    """Return the level at which the prompt ends the thought; "none" where none does."""
    for level in _OFF:
        variables: dict[str, Any] = dict.fromkeys(levels, level)
        try:
            prompt = template.render(_PROBE, None, True, **variables)
        except RequestError:  # it does not know this one
            continue
        thought = None if reasoning is None else reasoning.thought(prompt)
        if thought is None or (isinstance(thought, Thought) and thought.is_past):
            return level
    return NO_EFFORT
