"""What chat templates are given: messages, tools, and variables in the forms that they take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate

HELLO = {"role": "user", "content": "Hello"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "add")
]


def test_a_variable_that_nothing_sets_is_named() -> None:
    template = ChatTemplate({"default": "{{ persona.name }}{{ messages[0].content }}"})
    with pytest.raises(RequestError, match=r"'persona'.*chat_template_kwargs") as caught:
        template.render([HELLO])
    assert caught.value.param == "chat_template_kwargs"
    assert template.render([HELLO], persona={"name": "A"}) == "AHello"


def test_a_template_of_tools_alone_renders_without_any() -> None:
    """Hermes's `tool_use` goes through the tools, whether there are any or not."""
    template = ChatTemplate({"default": "{% for t in tools %}{{ t }}{% endfor %}."})
    assert template.render([HELLO]) == "."
    asks = ChatTemplate({"default": "{{ tools is none }}"})
    assert asks.render([HELLO]) == "True"
    broken = ChatTemplate({"default": "{% for t in tools %}{{ t }}{% endfor %}{{ 'a' + 1 }}"})
    with pytest.raises(RequestError, match="NoneType"):
        broken.render([HELLO])


def test_tools_are_given_as_text_to_a_template_that_reads_functions() -> None:
    template = ChatTemplate({"default": "{{ functions + ' ' + datetime }}"})
    text, _, time = template.render([HELLO], TOOLS).rpartition("]")
    assert json.loads(f"{text}]") == [tool["function"] for tool in TOOLS]
    assert len(time.split()) == 2
    assert template.render([HELLO], TOOLS, functions="a", datetime="b") == "a b"
    assert ChatTemplate({"default": "{{ tools | length }} {{ functions }}"}).render([HELLO], TOOLS)


def test_what_a_filter_gives_bit_by_bit_is_a_list_in_json() -> None:
    source = "{{ messages | map(attribute='role') | tojson }}"
    assert ChatTemplate({"default": source}).render([HELLO, HELLO]) == '["user", "user"]'


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_earlier_reasoning_has_each_name_that_templates_have_for_it(name: str) -> None:
    message = {"role": "assistant", "content": "Hi.", name: "hm"}
    for read in ("reasoning_content", "reasoning", "thinking"):
        template = ChatTemplate({"default": f"{{{{ messages[0].{read} }}}}"})
        assert template.render([message]) == "hm"


def test_earlier_reasoning_is_a_part_of_the_content_where_a_template_has_such() -> None:
    """Ministral's; `transformers` leaves the reasoning out."""
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for block in m.content %}{% if block['type'] == 'thinking' %}[{{ block['thinking'] }}]"
        "{% else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
    )
    thinks = {"role": "assistant", "reasoning_content": "hm"}
    messages = [HELLO, {**thinks, "content": "Hi."}, {**thinks, "content": None}]
    assert ChatTemplate({"default": source}).render(messages) == "Hello|[hm]Hi.|[hm]|"
    knows = ChatTemplate({"default": source + "{{ messages[1].reasoning_content }}"})
    assert knows.render(messages) == "Hello|Hi.||hm"


def test_a_template_may_queue_in_its_own_lists() -> None:
    """Kimi K2's do; nothing that several requests share changes by that."""
    own = "{% set x = [] %}{% for m in messages %}{% set _ = x.append(m.role) %}{% endfor %}"
    own += "{{ x.pop(0) }}{{ x }}"
    assert ChatTemplate({"default": own}).render([HELLO, HELLO]) == "user['user']"
    given = "{% set _ = words.append(1) %}{% set _ = messages.append(1) %}{{ words | length }}"
    template, messages = ChatTemplate({"default": given}, {}, {"words": [0]}), [HELLO]
    assert template.render(messages) == template.render(messages) == "2"
    assert messages == [HELLO]
    assert template.variables == {"words": [0]}
