"""What an effort is in the variables of a chat template."""

from __future__ import annotations

from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.effort import effort_variables, is_switched_on
from onnxport.serving.reasoning_formats import FORMATS

THINK = FORMATS["qwen3"]
NAMED = "{{ reasoning_effort }}<think>{% if reasoning_effort == 'no_think' %}</think>{% endif %}"
STRICT = (
    "{% if reasoning_effort not in ['no_think', 'high'] %}{{ raise_exception('what?') }}{% endif %}"
)


def variables(source: str, effort: str, **given: Any) -> dict[str, Any]:
    return effort_variables(ChatTemplate({"default": source}), THINK, effort, given)


@pytest.mark.parametrize(
    ("source", "high", "none"),
    [
        ("{{ enable_thinking }}", {"enable_thinking": True}, {"enable_thinking": False}),
        ("{{ thinking }}", {"thinking": True}, {"thinking": False}),
        ("{{ thinking_mode }}", {"thinking_mode": "enabled"}, {"thinking_mode": "disabled"}),
        (
            "{{ enable_thinking }}{{ reasoning_effort }}",
            {"enable_thinking": True, "reasoning_effort": "high"},
            {"enable_thinking": False},
        ),
        (
            "{{ thinking }}{{ thinking_effort }}",
            {"thinking": True, "thinking_effort": "high"},
            {"thinking": False},
        ),
        (
            "{{ reasoning_strength }}",
            {"reasoning_strength": "high"},
            {"reasoning_strength": "none"},
        ),
        (NAMED, {"reasoning_effort": "high"}, {"reasoning_effort": "no_think"}),
        (STRICT + NAMED, {"reasoning_effort": "high"}, {"reasoning_effort": "no_think"}),
    ],
)
def test_each_variable_has_its_own_values(
    source: str, high: dict[str, Any], none: dict[str, Any]
) -> None:
    assert variables(source, "high") == high
    assert variables(source, "none") == none


def test_what_a_request_sets_goes_before() -> None:
    source = "{{ enable_thinking }}{{ thinking }}{{ reasoning_effort }}"
    asked = variables(source, "low", thinking=False, mood="calm")
    assert asked == {"thinking": False, "mood": "calm", "reasoning_effort": "low"}


@pytest.mark.parametrize(
    "source",
    ["no", "{{ messages[0].thinking }}", "{% set thinking = 1 %}{{ thinking }}", "{# thinking #}"],
)
def test_a_template_without_one_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="has no variable for it") as caught:
        variables(source, "low")
    assert caught.value.param == "reasoning_effort"
    assert str(caught.value).count("reasoning_effort") == 1  # other APIs call each otherwise


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        ({}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False, "thinking": True}, True),
        ({"thinking": False, "mood": True}, False),
        ({"thinking_mode": "disabled"}, False),
        ({"thinking_mode": "adaptive"}, True),
    ],
)
def test_variables_say_whether_a_model_is_to_think(given: dict[str, Any], is_on: bool) -> None:
    assert is_switched_on(given) == is_on
