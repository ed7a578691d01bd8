"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from onnxport.errors import ArtifactError, RequestError
from onnxport.serving.chat import ChatTemplate, check_variables

USER = {"role": "user", "content": "Is <b>5 > 3</b> & \"so\" on? 'é' 你好"}
TURNS = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Yes.\n"},
    {"role": "user", "content": "Why?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <what> the sky does",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}

CHATML = """{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- '<|im_start|>system\nDefault<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + m['role'] + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
BLOCKS = """
{# a comment #}
{% if messages[0].role == 'system' %}
  {% set system = messages[0].content | trim %}
    [SYS]{{ system }}[/SYS]
{% endif %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {{ bos_token }}[{{ message.role | upper }}] {{ message.content | trim }} {{ eos_token }}
{% endfor %}
"""
WITH_TOOLS = """{{ bos_token }}{% if tools %}{% for t in tools %}{{ t | tojson }}
{% endfor %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{{ m.role }}:
{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}
{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}
{% endif %}{% endfor %}{{ strftime_now('%Y') }}"""
NAMESPACE = """{% set ns = namespace(last=-1, texts=[]) %}{% for m in messages %}
{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{% macro show(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}
{% for m in messages[::-1] %}{{ show(m) }}{{ '*' if loop.revindex0 == ns.last }}{% endfor %}
{{ thinking | default(false) }}{{ tools is none }}
{{ documents is defined }}{{ nothing is defined }}"""
GENERATION = """{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}
{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
RETRIEVAL = """{% if documents %}{% for d in documents %}[{{ loop.index }}] {{ d.title }}:
{{ d['text'] }}
{% endfor %}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""

TEMPLATES = [CHATML, BLOCKS, WITH_TOOLS, NAMESPACE, GENERATION]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def reference() -> Any:
    """Return transformers' tokenizer, with the tokens that the templates use."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=fast, **TOKENS)


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize(
    ("messages", "tools"),
    [([USER], None), (TURNS, None), ([USER], TOOLS), ([USER, CALL, RESULT], TOOLS)],
)
def test_same_text_as_transformers(
    reference: Any, source: str, prompted: bool, messages: list[Any], tools: list[Any] | None
) -> None:
    expected = reference.apply_chat_template(
        messages,
        tools=tools,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=prompted,
        thinking=True,
    )
    template = ChatTemplate({"default": source}, TOKENS)
    assert template.render(messages, tools, prompted, thinking=True) == expected


def test_arguments_reach_the_template_as_objects() -> None:
    call = json.loads(json.dumps(CALL))
    call["tool_calls"][0]["function"]["arguments"] = '{"city": "Zürich", "days": 2}'
    template = ChatTemplate({"default": WITH_TOOLS}, TOKENS)
    assert template.render([USER, call]) == template.render([USER, CALL])
    call["tool_calls"][0]["function"]["arguments"] = "{broken"
    with pytest.raises(RequestError, match=r"weather.*not JSON"):
        template.render([USER, call])


def test_content_parts_are_joined_and_others_refused() -> None:
    template = ChatTemplate({"default": CHATML})
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo<|im_end|>" in template.render([{"role": "user", "content": parts}])
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(RequestError, match="image_url"):
        template.render([{"role": "user", "content": image}])


# Of models that read images, shortened: contents are texts, or parts of them.
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- if message['content'] is string %}
            {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
        {%- else %}
            {{- '[SYSTEM_PROMPT]' + message['content'][0]['text'] + '[/SYSTEM_PROMPT]' }}
        {%- endif %}
    {%- elif message['role'] == 'user' %}
        {%- if message['content'] is string %}
            {{- '[INST]' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST]' }}
            {%- for block in message['content'] %}
                {%- if block['type'] == 'text' %}
                    {{- block['text'] }}
                {%- elif block['type'] in ['image', 'image_url'] %}
                    {{- '[IMG]' }}
                {%- else %}
                    {{- raise_exception('Only text and image blocks are supported!') }}
                {%- endif %}
            {%- endfor %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""
PARTS_ALONE = """{% for message in messages %}<{{ message.role }}>
{%- for part in message.content %}{% if part['type'] == 'text' %}{{ part.text }}{% endif %}
{%- endfor %}</s>{% endfor %}"""


@pytest.mark.parametrize("source", [GEMMA, MISTRAL, PARTS_ALONE])
def test_templates_of_models_that_read_images_take_texts_and_parts(
    reference: Any, source: str
) -> None:
    in_parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TURNS]
    expected = reference.apply_chat_template(
        in_parts if source == PARTS_ALONE else TURNS,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert all(one["content"].strip() in expected for one in TURNS)
    template = ChatTemplate({"default": source}, TOKENS)
    assert template.render(TURNS) == template.render(in_parts) == expected
    goes_on = template.render(TURNS, None, False, continue_final_message=True)
    assert goes_on.endswith("Why?")
    image = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(RequestError, match="this model reads text alone"):
        template.render([{"role": "user", "content": image}])


@pytest.mark.parametrize("source", [GEMMA, MISTRAL, PARTS_ALONE])
def test_several_texts_of_a_user_are_left_to_a_template_that_goes_through_them(
    reference: Any, source: str
) -> None:
    texts = [{"type": "text", "text": text} for text in ("one ", "two", "three")]
    asked = [{"role": "user", "content": texts}]
    expected = reference.apply_chat_template(
        asked, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert "twothree" in expected
    template = ChatTemplate({"default": source}, TOKENS)
    assert template.render(asked) == expected
    assert "twothree" in template.render([*asked, {"role": "assistant", "content": "yes"}, *asked])
    goes_on = template.render(asked, None, False, continue_final_message=True)
    assert "twothree" in goes_on
    assert goes_on.endswith("three")
    said = {"role": "assistant", "content": [{"type": "text", "text": "yes"}, texts[0]]}
    goes_on = template.render([*asked, said], None, False, continue_final_message=True)
    assert goes_on.rstrip().endswith("yes\none")
    assert [part["text"] for part in texts] == ["one ", "two", "three"]  # as they were


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.content is not string and m.role == 'tool' %}"
        "{% for p in m.content %}{{ p.text }}"
        "{% endfor %}{% else %}<{{ m.content }}>{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content is not string and m.role == 'tool' %}"
        "{% for p in m.content %}{{ p.text }}"
        "{% endfor %}{% else %}{{ '<' + m.content + '>' }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% set text = m.content if m.content is string else '' %}"
        "{% if m.role == 'tool' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
        "<{{ text }}>{% endfor %}",
    ],
)
def test_several_texts_are_joined_where_a_template_goes_through_those_of_others(
    source: str,
) -> None:
    texts = [{"type": "text", "text": text} for text in ("one", "two")]
    template = ChatTemplate({"default": source}, TOKENS)
    found = template.render([{"role": "user", "content": texts}])
    assert "one\ntwo" in found.replace("\\n", "\n")


def test_null_content_is_empty_text() -> None:
    template = ChatTemplate({"default": CHATML})
    text = template.render([USER, {"role": "assistant", "content": None}])
    assert "assistant\n<|im_end|>" in text


def test_calls_have_no_content_where_the_template_asks_for_that() -> None:
    call = {**CALL, "content": None}
    asks = ChatTemplate({"default": "{{ messages[0]['content'] is none }}"})
    assert asks.render([call]) == "True"
    assert asks.render([{**CALL, "content": "x"}]) == "False"
    assert asks.render([{"role": "assistant", "content": None}]) == "False"
    joins = ChatTemplate({"default": "{{ 'a' + messages[0].content }}"})
    assert joins.render([call]) == "a"
    other = (
        "{% if messages[0].reasoning_content is not none %}x{% endif %}{{ messages[0].content }}"
    )
    assert ChatTemplate({"default": other}).render([call]) == "x"  # asks for another content
    both = "{{ messages[0].content is none }}{{ 'a' + messages[0].content }}"
    split = "{{ messages[0].content is none }}{{ messages[0].content.split('x') }}"
    assert ChatTemplate({"default": split}).render([call]) == "False['']"
    refuses = "{% if messages[0].content is none %}{{ raise_exception('needs text') }}{% endif %}"
    with pytest.raises(RequestError, match="needs text"):
        ChatTemplate({"default": refuses}).render([call])
    assert ChatTemplate({"default": both}).render([call]) == "Falsea"  # asks, and needs a text


def test_calls_are_told_rather_than_an_empty_text() -> None:
    """Where a template takes arguments as text, and leaves out calls beside a content."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    calling = {"role": "assistant", "tool_calls": [{"id": "x", "function": function}]}
    picky = ChatTemplate(
        {
            "default": "{% for m in messages %}{% if m.content is none %}"
            "{{ 'calls ' + m.tool_calls[0].function.arguments }}"
            "{% else %}{{ 'says ' + m.content }}{% endif %}{% endfor %}"
        }
    )
    assert picky.render([calling]) == 'calls {"a": 1}'
    assert picky.render([{**calling, "content": ""}]) == 'calls {"a": 1}'
    assert picky.render([{**calling, "content": "yes"}]) == "says yes"
    assert picky.render([{"role": "assistant", "content": ""}]) == "says "


def test_what_a_template_appends_to_is_its_own() -> None:
    """It may be rendered again: in another form, with other documents, for another request."""
    appends = (
        "{% set _ = tools[0].function.parameters.required.append('x') %}{% set _ = mine.append(1) "
        "%}{% set _ = documents[0].texts.append('x') %}{% set _ = of_all.append(1) %}"
        "{{ tools[0].function.parameters.required }}{{ mine }}{{ documents[0].texts }}{{ of_all }}"
    )
    fails = "{% if messages[0].content is none %}{{ 1 + 'a' }}{% endif %}"
    function = {"name": "f", "parameters": {"type": "object", "required": []}}
    calling = {"id": "x", "function": {"name": "f", "arguments": "{}"}}
    given = (
        [{"role": "assistant", "tool_calls": [calling]}],
        [{"type": "function", "function": function}],
    )
    more: dict[str, Any] = {"documents": [{"texts": []}], "mine": []}
    template = ChatTemplate({"default": appends + fails}, variables={"of_all": []})
    before = deepcopy((given, more))
    for _ in range(2):
        assert template.render(*given, **more) == "['x'][1]['x'][1]"
    assert (given, more) == before


def test_developer_is_system_unless_the_template_knows_it() -> None:
    message = {"role": "developer", "content": "Be brief."}
    assert "<|im_start|>system\nBe" in ChatTemplate({"default": CHATML}).render([message])
    knows = ChatTemplate({"default": "{# ['system', 'developer'] #}" + CHATML})
    assert "<|im_start|>developer\nBe" in knows.render([message])
    has_token = ChatTemplate({"default": "{{ '<|developer_start|>' }}" + CHATML})
    assert "<|im_start|>system\nBe" in has_token.render([message])


def test_the_templates_refusal_is_told() -> None:
    template = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"})
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render([USER])


@pytest.mark.parametrize(
    "source",
    ["{{ 'a' + 1 }}", "{{ messages.at.all }}", "{{ messages[9].content.x }}", "{{ 1 // 0 }}"],
)
def test_a_failing_template_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template cannot render"):
        ChatTemplate({"default": source}).render([USER])


def test_the_template_runs_in_a_sandbox() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.clear() }}",
        "{{ messages.append.__self__.clear() }}",
        "{{ messages[0].update(role='x') }}",
        "{{ x.append(1) }}",
    ):
        with pytest.raises(RequestError):
            ChatTemplate({"default": source}).render([USER])


def test_no_template_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="the model has none"):
        ChatTemplate({}).render([USER])
    assert not ChatTemplate({})


def test_bad_syntax_is_a_request_error() -> None:
    with pytest.raises(RequestError, match=r"not valid Jinja.*line 1"):
        ChatTemplate({"default": "{% if %}"}).render([USER])


def test_reserved_variables_are_refused() -> None:
    with pytest.raises(RequestError, match="documents"):
        check_variables({"documents": []})


def test_documents_are_what_transformers_makes_of_them(reference: Any) -> None:
    template = ChatTemplate({"default": RETRIEVAL}, TOKENS)
    documents = [{"title": "Rome", "text": "It is old."}, {"title": "Oslo", "text": "It is not."}]
    for given in (None, documents):
        for goes_on in (False, True):
            turns = [USER, {"role": "assistant", "content": "so"}] if goes_on else [USER]
            expected = reference.apply_chat_template(
                turns,
                documents=given,
                chat_template=RETRIEVAL,
                tokenize=False,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
            )
            found = template.render(
                turns, None, not goes_on, continue_final_message=goes_on, documents=given
            )
            assert found == expected
    assert template.render([USER], documents=[]) == template.render([USER])


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_read_prefers_the_jinja_file(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "config", "eos_token": {"content": "E"}})
    assert ChatTemplate.read(tmp_path).render([USER]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}", encoding="utf-8")
    assert ChatTemplate.read(tmp_path).render([USER]) == "file E"


def test_read_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, tokenizer_config={"chat_template": named, "bos_token": None})
    template = ChatTemplate.read(tmp_path)
    assert template.render([USER]) == "plain"
    assert template.render([USER], TOOLS) == "tools"
    assert template.render([USER], []) == "plain"


def test_read_additional_templates(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert ChatTemplate.read(tmp_path).render([USER], TOOLS) == "tools"


def test_additional_templates_need_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert ChatTemplate.read(tmp_path).render([USER], TOOLS) == "tools"
    with pytest.raises(RequestError, match=r"only templates named \['tool_use'\]"):
        ChatTemplate.read(tmp_path).render([USER])
    write(tmp_path, tokenizer_config={"chat_template": "plain"})
    assert ChatTemplate.read(tmp_path).render([USER]) == "plain"
    assert ChatTemplate.read(tmp_path).render([USER], TOOLS) == "tools"


def test_read_nothing(tmp_path: Path) -> None:
    assert not ChatTemplate.read(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_read_refuses_a_broken_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ArtifactError, match="tokenizer_config"):
        ChatTemplate.read(tmp_path)


def test_read_refuses_a_template_of_another_kind(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": 5})
    with pytest.raises(ArtifactError, match="named templates"):
        ChatTemplate.read(tmp_path)
