"""Small chat templates with what those of each family ask of a model that calls tools."""

from __future__ import annotations

_TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"

HERMES = f"""{_TOOLS}Answer with <tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>{_TURNS}"""
LLAMA31 = f"""{{% if tools %}}Environment: ipython
Respond in the format {{"name": function name, "parameters": dictionary of argument name and its
value}}.{{% endif %}}{_TOOLS}{_TURNS}{{{{ '<|python_tag|>' if builtin_tools else '' }}}}"""
LLAMA32 = LLAMA31.replace("<|python_tag|>", "")
PYTHONIC = f"""{_TOOLS}Environment: ipython
Respond in the format [func_name1(params_name1=params_value1), func_name2(params)]{_TURNS}"""
MISTRAL = """{% for m in messages %}
{%- if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- if m.tool_calls %}[TOOL_CALLS] [
    {%- for call in m.tool_calls %}
        {%- if call.id | length != 9 %}{{ raise_exception("ids have length 9") }}{% endif %}
        {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
    {%- endfor %}]</s>
{%- elif m.role == "tool" %}
    {%- if m.tool_call_id | length != 9 %}{{ raise_exception("ids have length 9") }}{% endif %}
    {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}' }}
{%- else %}[INST] {{ m.content }}[/INST]{% endif %}
{%- endfor %}"""
MISTRAL_ARGS = """{% for m in messages %}
{%- if loop.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for call in m.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]
    {%- set given = call.function.arguments %}
    {{- given if given is string else given | tojson }}
{%- else %}[INST]{{ m.content }}[/INST]{% endfor %}
{%- endfor %}"""
GRANITE3 = f"""<|start_of_role|>system<|end_of_role|>When a tool is required, respond only with
<|tool_call|> followed by a JSON list of tools used.{_TOOLS}{_TURNS}"""
GRANITE31 = GRANITE3.replace("<|tool_call|>", "<tool_call>")
GRANITE4 = f"<|start_of_role|>system<|end_of_role|>{HERMES}"
PHI4_MINI = """{% for m in messages %}{% if m.role == 'system' and 'tools' in m %}
{{- m.content + '<|tool|>' + m['tools'] + '<|/tool|>' }}{% else %}<|{{ m.role }}|>{{ m.content }}
{%- endif %}<|end|>{% endfor %}"""
PHI4_MINI_WORD = f"""{_TOOLS}All function calls should be generated in a single JSON list formatted
as functools[{{"name": [function name], "arguments": [function arguments as JSON]}}, ...]{_TURNS}"""
LFM2 = """{%- if tools %}<|im_start|>system\nList of tools: <|tool_list_start|>[
{%- for t in tools %}{{ t | tojson }}{% if not loop.last %}, {% endif %}{% endfor -%}
]<|tool_list_end|><|im_end|>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"""
LFM25 = LFM2.replace("<|tool_list_start|>", "").replace("<|tool_list_end|>", "")
GLM4 = f"""{_TOOLS}在调用上述函数时，请使用 Json 格式表示调用的参数。{_TURNS}"""
GLM45 = f"""{_TOOLS}<tool_call>{{function-name}}
<arg_key>{{arg-key-1}}</arg_key>
<arg_value>{{arg-value-1}}</arg_value>
</tool_call>{_TURNS}"""
SEED_OSS = f"""{_TOOLS}<seed:tool_call>
<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
</function>
</seed:tool_call>{_TURNS}"""
QWEN3_CODER = SEED_OSS.replace("seed:", "")
GEMMA4 = f"""{_TOOLS}{{{{ '<|tool_call>call:name{{a:<|"|>x<|"|>}}<tool_call|>' }}}}{_TURNS}"""
KIMI_K2 = f"""{_TOOLS}{{% for m in messages %}}{{% for call in m.tool_calls or [] %}}
{{{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}}}
{{{{- call.function.arguments | tojson + '<|tool_call_end|>' }}}}{{% endfor %}}
{{{{- '## Return of ' + m.tool_call_id if m.role == 'tool' else m.content }}}}{{% endfor %}}"""
NO_TOOLS = _TURNS
