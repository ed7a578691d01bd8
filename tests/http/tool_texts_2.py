"""Texts with calls, and nearly with calls, in the formats that few models write."""

from __future__ import annotations

import json

from onnxport.serving.http.tool_formats.apertus import APERTUS
from onnxport.serving.http.tool_formats.base import ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.cohere import COHERE3, COHERE4, COHERE_FENCE
from onnxport.serving.http.tool_formats.functionary import FUNCTIONARY_MESSAGE, FUNCTIONARY_TAG
from onnxport.serving.http.tool_formats.gemma import FUNCTION_GEMMA, GEMMA4
from onnxport.serving.http.tool_formats.hunyuan import HUNYUAN
from onnxport.serving.http.tool_formats.hy3 import HY3
from onnxport.serving.http.tool_formats.llama3_json import LLAMA3_JSON
from onnxport.serving.http.tool_formats.mistral import MISTRAL_ID
from onnxport.serving.http.tool_formats.nemotron import NEMOTRON
from onnxport.serving.http.tool_formats.solar import SOLAR
from onnxport.serving.http.tool_formats.xlam import XLAM

ADD = ParsedCall("add", '{"a": 1}')
EMPTY = ParsedCall("add_all", "{}")
ARGS = '{"x": [1, "y]};<|"]}'
ALL = ParsedCall("add_all", ARGS)
J_ADD = '{"name": "add", "arguments": {"a": 1}}'
J_ALL = f'{{"name": "add_all", "arguments": {ARGS}}}'
OTHER = '{"name": "sub", "arguments": {}}'
C_ADD = '{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}'
C_ALL = f'{{"tool_name": "add_all", "parameters": {ARGS}}}'
G_ADD = "<|tool_call>call:add{a:1}<tool_call|>"
S_ADD = '<|tool_call:begin|>x1<|tool_call:name|>add<|tool_call:args|>{"a": 1}<|tool_call:end|>'
HY_ADD = """<tool_call:opensource>add<tool_sep:opensource>
<arg_key:opensource>a</arg_key:opensource>
<arg_value:opensource>1</arg_value:opensource>
</tool_call:opensource>"""
HY_OPEN, HY_CLOSE = "<tool_calls:opensource>", "</tool_calls:opensource>"


def values(**arguments: object) -> ParsedCall:
    return ParsedCall("add", json.dumps(arguments))


FOUND: list[tuple[ToolFormat, str, str, list[ParsedCall]]] = [
    *(
        case
        for syntax, opening, closing in (
            (HUNYUAN, "<tool_calls>", "</tool_calls>"),
            (NEMOTRON, "<TOOLCALL>", "</TOOLCALL>"),
        )
        for case in (
            (syntax, f"{opening}[{J_ADD}, {J_ALL}]{closing}", "", [ADD, ALL]),
            (syntax, f"So: \n{opening}\n[{J_ADD}]\n{closing}\nand", "So:\nand", [ADD]),
            (syntax, f"{opening}{J_ADD}{closing}", "", [ADD]),
            (syntax, f"{opening}[{J_ADD}]", "", [ADD]),  # the end token came
            (syntax, f"{opening}[{J_ADD}, {J_ALL[:-9]}", f", {J_ALL[:-9]}", [ADD]),  # cut
        )
    ),
    (LLAMA3_JSON, "<|python_tag|>add.call(a=1)", "", [ADD]),
    (LLAMA3_JSON, 'So.\n<|python_tag|>add.call(t="x, (y)", a=2)', "So.", [values(t="x, (y)", a=2)]),
    (XLAM, f"[{J_ADD}, {J_ALL}]", "", [ADD, ALL]),
    (XLAM, f"\n```json\n[{J_ADD}]\n```", "", [ADD]),
    (XLAM, f"[TOOL_CALLS] [{J_ADD}]", "", [ADD]),
    (XLAM, f"Hm.<tool_call>[{J_ADD}]</tool_call>", "Hm.", [ADD]),
    (XLAM, f"So:\n```json\n[{J_ADD}]\n```", "So:", [ADD]),
    (APERTUS, f'<|tools_prefix|>[{{"add": {{"a": 1}}}}, {{"add_all": {ARGS}}}]', "", [ADD, ALL]),
    (APERTUS, 'Hm.<|tools_prefix|>[{"add_all": {}}]<|tools_suffix|>', "Hm.", [EMPTY]),
    (APERTUS, '<|tools_prefix|> [{"add_all": null}] <|tools_suffix|>', "", [EMPTY]),
    (
        COHERE3,
        f"<|START_ACTION|>[\n    {C_ADD},\n    {C_ALL}\n]<|END_ACTION|>",
        "",
        [ADD, ALL],
    ),
    (COHERE4, f"<|START_ACTION|>[{C_ADD}]", "", [ADD]),
    (
        COHERE3,
        f"<|START_ACTION|>[\n    {C_ADD},\n    {C_ALL[:9]}",
        f",\n    {C_ALL[:9]}",
        [ADD],
    ),
    (COHERE_FENCE, f"Action:\n```json\n[\n{C_ADD},\n{C_ALL}\n]```\n", "", [ADD, ALL]),
    (COHERE_FENCE, f"Hm.\nAction: ```json\n[{C_ALL}]\n```", "Hm.", [ALL]),
    (COHERE_FENCE, f"Action:```json[{C_ADD}]", "", [ADD]),
    (SOLAR, f"<|tool_calls|>{S_ADD}{S_ADD}<|calls|>", "", [ADD, ADD]),
    (SOLAR, f"{S_ADD} \n<|calls|>", "", [ADD]),
    (SOLAR, f"Hm.<|begin|>assistant<|tool_calls|>{S_ADD}<|calls|>", "Hm.", [ADD]),
    (SOLAR, S_ADD.removesuffix("<|tool_call:end|>"), "", [ADD]),
    (HY3, f"{HY_OPEN}\n{HY_ADD}\n{HY_ADD}\n{HY_CLOSE}", "", [ADD, ADD]),
    (HY3, f"Hm.{HY_OPEN}{HY_ADD}", "Hm.", [ADD]),
    (HY3, f"{HY_ADD}\n{HY_CLOSE}\n", "", [ADD]),
    (HY3, f"{HY_OPEN}<tool_call:opensource>{J_ADD}</tool_call:opensource>", "", [ADD]),
    (FUNCTIONARY_TAG, '<function=add>{"a": 1}</function>', "", [ADD]),
    (FUNCTIONARY_TAG, f"Hm.\n<function=add_all>\n{ARGS}\n</function>", "Hm.", [ALL]),
    (
        FUNCTIONARY_TAG,
        f'<function=add_all>{ARGS}</function><function=add>{{"a": 1}}',
        "",
        [ALL, ADD],
    ),
    (FUNCTIONARY_MESSAGE, 'add\n{"a": 1}', "", [ADD]),
    (FUNCTIONARY_MESSAGE, f'>>>add\n{{"a": 1}}>>>add_all\n{ARGS}', "", [ADD, ALL]),
    (FUNCTIONARY_MESSAGE, f"all\nHm. >>> x\n>>>add_all\n{ARGS}", "Hm. >>> x", [ALL]),
    (MISTRAL_ID, '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [ADD]),
    (GEMMA4, G_ADD, "", [ADD]),
    (GEMMA4, f"{G_ADD}<|tool_call>call:add_all{{}}<tool_call|>Hm.", "Hm.", [ADD, EMPTY]),
    (GEMMA4, "Hm.\n<|tool_call>:add{a:1}<tool_call|>", "Hm.", [ADD]),
    (GEMMA4, "<|tool_call> call: add { a : 1 } <tool_call|>", "", [ADD]),
    (GEMMA4, "<|tool_call>call:add{a:1}", "", [ADD]),
    (GEMMA4, f"<|tool_call>call:add_all{ARGS}<tool_call|>", "", [ALL]),
    (
        GEMMA4,
        '<|tool_call>call:add{t:<|"|>"x", {y}: <tool_call|>\n<|"|>,<|"|>k<|"|>:{n:null,m:None,'
        'l:[true,-1.5,<|"|>z<|"|>,[]]},w:so so}<tool_call|>',
        "",
        [
            values(
                t='"x", {y}: <tool_call|>\n',
                k={"n": None, "m": None, "l": [True, -1.5, "z", []]},
                w="so so",
            )
        ],
    ),
    (GEMMA4, '<|tool_call>call:add{t:12,a:<|"|>1<|"|>}<tool_call|>', "", [values(t="12", a=1)]),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:add{t:<escape>12<escape>,a:<escape>1<escape>,"
        "d:<escape>{'x': [1]}<escape>,e:2}<end_function_call>",
        "",
        [values(t="12", a=1, d={"x": [1]}, e=2)],
    ),
]
NO_CALLS: list[tuple[ToolFormat, str]] = [
    (HUNYUAN, f"<tool_calls>[{J_ADD}, {OTHER}]</tool_calls>"),
    (HUNYUAN, "<tool_calls>none</tool_calls>"),
    (HUNYUAN, f"[{J_ADD}]"),
    (NEMOTRON, f"<TOOLCALL>[{OTHER}]</TOOLCALL>"),
    (LLAMA3_JSON, "<|python_tag|>sub.call(a=1)"),
    (LLAMA3_JSON, "<|python_tag|>add.call(1)"),
    (LLAMA3_JSON, "<|python_tag|>add(a=1)"),
    (XLAM, "[1, 2]"),
    (XLAM, f"So: [{J_ADD}]"),
    (XLAM, '```json\n{"a": 1}\n```'),
    (APERTUS, '<|tools_prefix|>[{"add": {}, "add_all": {}}]<|tools_suffix|>'),
    (APERTUS, f"<|tools_prefix|>[{J_ADD}]<|tools_suffix|>"),
    (COHERE3, f"<|START_ACTION|>[{J_ADD}]<|END_ACTION|>"),
    (COHERE3, "<|START_ACTION|>[\n    "),
    (COHERE_FENCE, "Action: none"),
    (COHERE_FENCE, "Action:\n```json\n[]\n```"),
    (COHERE_FENCE, f"[{C_ADD}]"),
    (SOLAR, "<|tool_calls|>none<|calls|>"),
    (SOLAR, S_ADD.replace("add", "sub")),
    (SOLAR, S_ADD.replace("x1", "x 1")),
    (SOLAR, "<|tool_call:begin|>x1"),
    (HY3, f"{HY_OPEN}none{HY_CLOSE}"),
    (HY3, HY_ADD.replace("add", "sub")),
    (HY3, HY_ADD[:90]),
    (FUNCTIONARY_TAG, "<function=sub>{}</function>"),
    (FUNCTIONARY_TAG, "<function=add>1</function>"),
    (FUNCTIONARY_TAG, "<function=add_al"),
    (FUNCTIONARY_MESSAGE, "add one"),
    (FUNCTIONARY_MESSAGE, ">>>add\nnumbers"),
    (GEMMA4, "<|tool_call>call:sub{}<tool_call|>"),
    (GEMMA4, "<|tool_call>call:add no brace<tool_call|>"),
    (GEMMA4, "<|tool_call>call:add{a:1<tool_call|>"),
    (GEMMA4, "<|tool_call>call:add{a}<tool_call|>"),
    (GEMMA4, "<|tool_call>call:add{a:}<tool_call|>"),
    (GEMMA4, "<|tool_call>call:add{a:1 b:2}x<tool_call|>"),
    (GEMMA4, '<|tool_call>call:add{t:<|"|>London'),
    (GEMMA4, "<|tool_call>call:add{a:" + "[" * 300),
    (FUNCTION_GEMMA, "<start_function_call>call:add{t:<escape>London<escape>"),
]
CODE = 'if a[i] > b(c): {"k": (1, [2])}  # ]})>\n' * 100
J_CODE = json.dumps({"name": "add", "arguments": {"t": CODE, "l": [[1], {"k": [2]}] * 100}})
T_CODE = f'{{"t": {json.dumps(CODE)}}}'
LONG: list[tuple[ToolFormat, str]] = [
    (HUNYUAN, f"<tool_calls>[{J_CODE}]</tool_calls>"),
    (NEMOTRON, f"<TOOLCALL>[{J_CODE}]</TOOLCALL>"),
    (XLAM, f"[{J_CODE}]"),
    (APERTUS, f'<|tools_prefix|>[{{"add": {T_CODE}}}]<|tools_suffix|>'),
    (COHERE3, f'<|START_ACTION|>[{{"tool_name": "add", "parameters": {T_CODE}}}]'),
    (COHERE_FENCE, f'Action:\n```json\n[{{"tool_name": "add", "parameters": {T_CODE}}}]```'),
    (SOLAR, S_ADD.replace('{"a": 1}', T_CODE)),
    (HY3, HY_ADD.replace(">a<", ">t<").replace(">1<", f">{CODE}<")),
    (FUNCTIONARY_TAG, f"<function=add>{T_CODE}</function>"),
    (FUNCTIONARY_MESSAGE, f"add\n{T_CODE}"),
    (GEMMA4, f'<|tool_call>call:add{{t:<|"|>{CODE}<|"|>}}<tool_call|>'),
    (
        FUNCTION_GEMMA,
        f"<start_function_call>call:add{{t:<escape>{CODE}<escape>}}<end_function_call>",
    ),
]
