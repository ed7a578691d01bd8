"""A chat template that behaves as gpt-oss's does, and texts as that model writes them."""

from __future__ import annotations

from onnxport.serving.channels import MARKS

CONSTRAINED = "<|constrain|>json"
NEXT = "<|end|><|start|>assistant"
RETURN, CALL = "<|return|>", "<|call|>"
# What the published template does, too: it knows `thinking` alone, and `developer`; it joins the
# description of a tool to other text; it takes instructions from the first message, and no others;
# it writes the first call of a message, and calls results by the last one; what is said with a call
# is analysis, and both it refuses; it drops analysis that comes before an answer.
TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}
{%- if tools %}, calls go to commentary{% endif %}<|end|>
{%- if messages[0].role in ['system', 'developer'] %}
    {%- set said, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set said, rest = '', messages %}
{%- endif %}
{%- if said or tools %}<|start|>developer<|message|>{{ said }}
    {%- for tool in tools or [] %}{{ '// ' + tool.function.description + ':' }}
        {{- 'type ' + tool.function.name + ';' }}
    {%- endfor %}<|end|>
{%- endif %}
{%- set last = namespace(name='') %}
{%- for m in rest %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}
        {%- set answers = rest[loop.index:] | selectattr('role', 'equalto', 'assistant') | list %}
        {%- set told = answers | selectattr('tool_calls', 'undefined') | list %}
        {%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
        {%- set thought = m.thinking or m.content %}
        {%- if thought and not told %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
        {%- endif %}
        {%- set last.name = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {%- if not last.name %}{{ raise_exception('no call') }}{% endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
TAGS = tuple(MARKS)


def message(channel: str, text: str) -> str:
    """Return a message behind a header of the prompt or of `NEXT`."""
    return f"<|channel|>{channel}<|message|>{text}"


def call(name: str, arguments: str) -> str:
    """Return a call as the model mostly writes it."""
    return message(f"commentary to=functions.{name} {CONSTRAINED}", arguments)


def answer(*messages: str) -> str:
    """Return a whole answer."""
    return NEXT.join(messages)
