"""Texts that call in sections, each call by itself, and texts that nearly do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from onnxport.serving.http.tool_formats.base import ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from onnxport.serving.http.tool_formats.gigachat3 import GIGACHAT3, GIGACHAT31
from onnxport.serving.http.tool_formats.invoke_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    MINICPM5,
    MINIMAX_M2,
)
from onnxport.serving.http.tool_formats.kimi_k2 import KIMI_K2
from onnxport.serving.http.tool_formats.kimi_k3 import KIMI_K3
from onnxport.serving.http.tool_formats.minimax import MINIMAX
from onnxport.serving.http.tool_formats.minimax_m3 import MINIMAX_M3, SIGN

FUNCTIONS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "t": {"type": "string"},
            "l": {"type": "array", "items": {"type": "integer"}},
            "o": {"$ref": "#/$defs/o"},
            "u": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        },
        "$defs": {"o": {"type": "object", "properties": {"is": {"type": "boolean"}}}},
    },
    "add_all": {"type": "object"},
}
ADD = ParsedCall("add", '{"a": 1}')
ALL = ParsedCall("add_all", "{}")
V3_ADD = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
V3_ALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add_all\n```json\n{}\n```<｜tool▁call▁end｜>"
V31_ADD = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
K_BEGIN, K_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K_ADD = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
K_ALL = "<|tool_call_begin|>functions.add_all:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI = [replace(ADD, id="functions.add:0"), replace(ALL, id="functions.add_all:1")]
M2 = "<minimax:tool_call>\n{}</minimax:tool_call>"
M2_ADD = '<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
M2_ALL = '<invoke name="add_all">\n</invoke>\n'
DSML = "<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>"
D_ADD = (
    '<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
C_ADD = '<function name="add"><param name="a">1</param></function>'
M3_ADD = f'{SIGN}<invoke name="add">{SIGN}<a>1{SIGN}</a>{SIGN}</invoke>\n'
M3 = f"{SIGN}<tool_call>\n{{}}{SIGN}</tool_call>"
K3 = "<|open|>tools<|sep|>{}<|close|>tools<|sep|>"
J_ADD = '{"name": "add", "arguments": {"a": 1}}'


def dsml(name: str, is_text: str, value: str) -> str:
    """Return a call with one argument in DSML."""
    told = f'<｜DSML｜parameter name="{name}" string="{is_text}">{value}</｜DSML｜parameter>'
    return DSML.format(f'<｜DSML｜invoke name="add">\n{told}\n</｜DSML｜invoke>\n')


def m3(name: str, value: str) -> str:
    """Return a call with one argument in MiniMax M3's tags, `[` for what is before each."""
    return f'[<invoke name="add">[<{name}>{value}[</{name}>[</invoke>'.replace("[", SIGN)


def k3(kind: str, value: str) -> str:
    """Return a call with one argument in Kimi K3's sections."""
    return (
        '<|open|>call tool="add" index="1"<|sep|>'
        f'<|open|>argument key="{"t" if kind == "string" else "a"}" type="{kind}"<|sep|>{value}'
        "<|close|>argument<|sep|><|close|>call<|sep|>"
    )


def of(**arguments: Any) -> list[ParsedCall]:
    """Return a call with some arguments."""
    return [ParsedCall("add", json.dumps(arguments))]


FOUND: list[tuple[ToolFormat, str, str, list[ParsedCall]]] = [
    (DEEPSEEK_V3, f"{BEGIN}{V3_ADD}\n{V3_ALL}{END}", "", [ADD, ALL]),
    (DEEPSEEK_V3, f"See.\n{BEGIN}{V3_ADD}{V3_ALL}{END}", "See.", [ADD, ALL]),
    (DEEPSEEK_V3, f"{BEGIN}\n{V31_ADD}\n{END} so", " so", [ADD]),
    (DEEPSEEK_V3, V3_ADD.replace("\n```<", "```<"), "", [ADD]),
    (DEEPSEEK_V3, BEGIN + V3_ADD.partition("\n```<")[0], "", [ADD]),
    (DEEPSEEK_V3, BEGIN + V3_ADD.replace("```json", "```"), "", [ADD]),
    (DEEPSEEK_V3, BEGIN + V3_ADD.replace("```json\n", "").replace("\n```", ""), "", [ADD]),
    (DEEPSEEK_V3, BEGIN + V3_ALL.replace("{}\n", ""), "", [ALL]),
    (DEEPSEEK_V31, f"a{BEGIN}{V31_ADD}{V31_ADD}{END}", "a", [ADD, ADD]),
    (DEEPSEEK_V31, f"{BEGIN}{V3_ADD}{END}", "", [ADD]),
    (DEEPSEEK_V31, V31_ADD.removesuffix("<｜tool▁call▁end｜>"), "", [ADD]),
    (DEEPSEEK_V31, f"{BEGIN}{V31_ADD}<｜tool▁calls", "", [ADD]),  # cut
    (KIMI_K2, f"{K_BEGIN}{K_ADD}{K_ALL}{K_END}", "", KIMI),
    (KIMI_K2, f"See. {K_BEGIN} {K_ADD}\n{K_ALL}\n{K_END}", "See.", KIMI),
    (KIMI_K2, f"{K_ADD}{K_ALL}", "", KIMI),
    (KIMI_K2, f"{K_ADD}{K_ALL}".replace("<|tool_call_end|>", ""), "", KIMI),
    (KIMI_K2, K_ADD + K_ADD, "", [KIMI[0], ADD]),  # an id that one has already
    (KIMI_K2, K_ADD.replace("functions.", ""), "", [replace(ADD, id="add:0")]),
    (KIMI_K2, K_ALL.replace("{}", ""), "", KIMI[1:]),
    (MINIMAX_M2, M2.format(M2_ADD + M2_ALL), "", [ADD, ALL]),
    (MINIMAX_M2, f"See.\n\n{M2.format(M2_ADD)}\n", "See.", [ADD]),
    (MINIMAX_M2, M2.format(M2_ADD).replace("\n", ""), "", [ADD]),
    (MINIMAX_M2, M2_ADD, "", [ADD]),
    (MINIMAX_M2, M2.format(M2_ADD).removesuffix("_call>"), "", [ADD]),  # cut
    (MINIMAX_M2, M2.format('<invoke name="add">{"a": 1}</invoke>'), "", [ADD]),
    (DEEPSEEK_V32, DSML.format(D_ADD + D_ADD), "", [ADD, ADD]),
    (DEEPSEEK_V32, f"See.\n\n{D_ADD}", "See.", [ADD]),
    (DEEPSEEK_V32, dsml("a", "true", "1"), "", [ADD]),
    (DEEPSEEK_V32, dsml("t", "true", "1\n"), "", of(t="1\n")),
    (DEEPSEEK_V32, dsml("t", "false", "12"), "", of(t="12")),
    (DEEPSEEK_V32, dsml("t", "false", '"12"'), "", of(t="12")),
    (DEEPSEEK_V32, dsml("t", "true", '"12"'), "", of(t='"12"')),
    (DEEPSEEK_V32, dsml("x", "true", "[1]"), "", of(x="[1]")),
    (DEEPSEEK_V32, dsml("x", "false", "[1]"), "", of(x=[1])),
    (DEEPSEEK_V32, dsml("x", "false", "so"), "", of(x="so")),
    (DEEPSEEK_V32, dsml("x", "false", "1").replace(' string="false"', ""), "", of(x=1)),
    (DEEPSEEK_V32, dsml("arguments", "false", '{"a": 1}'), "", [ADD]),
    (DEEPSEEK_V32, dsml("arguments", "false", '{"b": 1}'), "", of(arguments={"b": 1})),
    (DEEPSEEK_V4, dsml("a", "false", "1").replace("function_calls", "tool_calls"), "", [ADD]),
    (MINICPM5, f"See. {C_ADD}\n{C_ADD}", "See.", [ADD, ADD]),
    (MINICPM5, C_ADD.replace('"a">1', '"t">1 < 2'), "", of(t="1 < 2")),
    (MINICPM5, C_ADD.replace('"a">1', '"t"><![CDATA[</param>\n]] ]]>'), "", of(t="</param>\n]] ")),
    (MINICPM5, C_ADD.replace('"a">1', '"t"> <![CDATA[a]]>'), "", of(t="a")),
    (MINICPM5, C_ADD.replace('"a">1', '"l">[1]'), "", of(l=[1])),
    (MINIMAX_M3, M3.format(M3_ADD + M3_ADD), "", [ADD, ADD]),
    (MINIMAX_M3, f"See.{M3_ADD}", "See.", [ADD]),
    (MINIMAX_M3, m3("t", "a\n[<b>"), "", of(t=f"a\n{SIGN}<b>")),
    (MINIMAX_M3, m3("o", "\n[<is>true[</is>\n"), "", of(o={"is": True})),
    (MINIMAX_M3, m3("o", ""), "", of(o={})),
    (MINIMAX_M3, m3("l", "[<item>1[</item>[<item>2[</item>"), "", of(l=[1, 2])),
    (MINIMAX_M3, m3("l", ""), "", of(l=[])),
    (MINIMAX_M3, m3("u", "1"), "", of(u="1")),
    (MINIMAX_M3, m3("u", "[<item>1[</item>"), "", of(u=[1])),
    (MINIMAX_M3, m3("x", "[<item>1[</item>[<item>a[</item>"), "", of(x=[1, "a"])),
    (MINIMAX_M3, m3("x", "[<y>1[</y>[<y>2[</y>"), "", of(x={"y": [1, 2]})),
    (MINIMAX_M3, m3("x", "[<z>[<w>3[</w>[</z>"), "", of(x={"z": {"w": 3}})),
    (MINIMAX_M3, f'{SIGN}<invoke name="add">{{"a": 1}}{SIGN}</invoke>', "", [ADD]),
    (KIMI_K3, K3.format(k3("number", "1") + k3("number", "1")), "", [ADD, ADD]),
    (KIMI_K3, f"See. {k3('number', '1')}", "See.", [ADD]),
    (KIMI_K3, k3("string", "1 <|close|>call<|sep|>\n"), "", of(t="1 <|close|>call<|sep|>\n")),
    (
        KIMI_K3,
        '<|open|>call tool="add"<|sep|><|open|>json type="object"<|sep|>{"a": 1}'
        "<|close|>json<|sep|><|close|>call<|sep|>",
        "",
        [ADD],
    ),
    (MINIMAX, f"<tool_calls>\n{J_ADD}\n{J_ADD}\n</tool_calls>", "", [ADD, ADD]),
    (MINIMAX, f"See. <tool_calls>{J_ADD}", "See.", [ADD]),
    (MINIMAX, f"<tool_calls>{J_ADD}\n</tool_ca", "", [ADD]),
    (GIGACHAT3, f"See.<|message_sep|>\n\nfunction call<|role_sep|>\n{J_ADD}", "See.", [ADD]),
    (GIGACHAT3, f"function call<|role_sep|>{J_ADD}<|message_sep|>", "", [ADD]),
    (GIGACHAT31, f"See.<|function_call|>{J_ADD}<|message_sep|>", "See.", [ADD]),
    (GIGACHAT31, f"<|message_sep|>\n\nfunction call<|role_sep|>\n{J_ADD}", "", [ADD]),
]

NO_CALLS: list[tuple[ToolFormat, str]] = [
    (DEEPSEEK_V3, f"{BEGIN}{V3_ADD.replace('add', 'sub')}{END}"),
    (DEEPSEEK_V3, f"{BEGIN}say"),
    (DEEPSEEK_V3, f"{BEGIN}{V3_ADD.partition('}')[0]}"),
    (DEEPSEEK_V31, V31_ADD.replace('{"a": 1}', "[1]")),
    (KIMI_K2, K_ADD.replace("add", "sub")),
    (KIMI_K2, K_ADD.replace(":0", "")),
    (KIMI_K2, K_ADD.replace(":0", ":")),
    (KIMI_K2, K_BEGIN),
    (MINIMAX_M2, M2.format(M2_ADD.replace("add", "sub"))),
    (MINIMAX_M2, M2_ADD.partition("</invoke>")[0]),
    (MINIMAX_M2, M2.format(M2_ADD.replace("</parameter>", ""))),
    (DEEPSEEK_V32, D_ADD.replace("parameter", "argument")),
    (MINICPM5, C_ADD.replace("add", "sub")),
    (MINICPM5, C_ADD.replace("</param>", "")),
    (MINIMAX_M3, M3_ADD.replace("</a>", "</b>")),
    (MINIMAX_M3, m3("x", "[<y>" * 200 + "1" + "[</y>" * 200)),
    (KIMI_K3, k3("number", "1").replace("add", "sub")),
    (KIMI_K3, k3("number", "1").removesuffix("<|close|>call<|sep|>")),
    (MINIMAX, f"<tool_calls>{J_ADD} and </tool_calls>"),
    (MINIMAX, "<tool_calls> are calls"),
    (GIGACHAT3, "a function call is"),
    (GIGACHAT31, "<|function_call|>{}"),
]
