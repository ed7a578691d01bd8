"""Tool calls as published templates have models write them: DeepSeek, Kimi, GLM, Qwen, others."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from onnxport.serving.http.tool_formats.forced import calls as forms_of
from onnxport.serving.structured.compiler import CompiledGrammar
from tests.serving.structured import accepts, compiled
from tests.tiers import every

from .calling import (
    CALLS,
    FLAT,
    ONE,
    PARALLEL,
    TOOLS,
    Said,
    answer,
    conversation,
    cuts,
    format_of,
    parts,
    plain,
    template,
    written,
)
from .places import needs_llama_cpp

pytestmark = needs_llama_cpp


@dataclass(frozen=True, slots=True)
class Model:
    """A published template.

    Attributes:
        name: of its file.
        format: that it asks for.
        end: of a turn.
        variables: with which it begins an answer as it writes an earlier one.
        several: whether it writes all calls of a turn.
        content: whether it writes content ahead of calls.
        thought: whether it writes the thought ahead of calls.
        in_python: whether it writes values of arguments as Python does, which are forced in JSON.
        in_ascii: whether it writes other characters as escapes, which JSON that is forced has for
            those alone that need one.
        has_nulls: whether it writes arguments that are null.
    """

    name: str
    format: str
    end: str
    variables: dict[str, Any] = field(default_factory=dict)
    several: bool = True
    content: bool = True
    thought: bool = True
    in_python: bool = False
    in_ascii: bool = False
    has_nulls: bool = True


IM_END, EOS_DEEPSEEK = "<|im_end|>", "<｜end▁of▁sentence｜>"
THINKS = {"enable_thinking": True}
R1 = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
MODELS = [
    Model(R1, "deepseek_v3", EOS_DEEPSEEK, content=False, thought=False),
    Model("deepseek-ai-DeepSeek-V3.1", "deepseek_v31", EOS_DEEPSEEK, thought=False),
    Model("deepseek-ai-DeepSeek-V3.2", "deepseek_v32", EOS_DEEPSEEK, THINKS),
    Model("deepseek-ai-DeepSeek-V4", "deepseek_v4", EOS_DEEPSEEK, THINKS),
    Model("deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek_v4", EOS_DEEPSEEK, THINKS),
    Model("moonshotai-Kimi-K2", "kimi_k2", IM_END, thought=False),
    Model("Kimi-K2-Instruct", "kimi_k2", IM_END, thought=False),
    Model("Kimi-K2-Thinking", "kimi_k2", IM_END),
    Model("Kimi-K3", "kimi_k3", "<|close|>message<|sep|>"),
    Model("GLM-4.6", "glm45", "<|observation|>"),
    Model("GLM-4.7-Flash", "glm45", "<|observation|>"),
    Model("MiniMax-M1", "minimax", "<end_of_sentence>", content=False, thought=False),
    Model("MiniMax-M2", "minimax_m2", "[e~["),
    Model("MiniMax-M3", "minimax_m3", "[e~[", {"thinking_mode": "enabled"}, has_nulls=False),
    Model("Qwen-Qwen2.5-7B-Instruct", "hermes", IM_END, thought=False),
    Model("Qwen-Qwen3-0.6B", "hermes", IM_END),
    Model("Qwen-QwQ-32B", "hermes", IM_END, thought=False),
    Model("Qwen3-Coder", "qwen3_coder", IM_END, thought=False),
    Model("Qwen3.5-4B", "qwen3_coder", IM_END),
    Model(
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "hermes",
        IM_END,
        content=False,
        thought=False,
    ),
    Model(
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "hermes",
        IM_END,
        content=False,
        thought=False,
    ),
    Model("ByteDance-Seed-OSS", "seed_oss", "<seed:eos>", in_python=True),
    Model("StepFun3.5-Flash", "qwen3_coder", IM_END),
    Model("inclusionai-ling-3.0-flash", "glm45", "<|role_end|>"),
    Model("Spark2.5", "glm45", EOS_DEEPSEEK),
    Model("poolside-Laguna-S-2.1", "glm45", "</assistant>"),
    Model("poolside-Laguna-XS-2.1", "glm45", "</assistant>", THINKS),
    Model("poolside-Laguna-XS.2", "glm45", "</assistant>", THINKS),
    Model("MiMo-VL", "hermes", IM_END, thought=False),
    Model(
        "GigaChat3-10B-A1.8B",
        "gigachat3",
        "<|message_sep|>\n\nfunction result",
        several=False,
        thought=False,
    ),
    Model("GigaChat3.1-10B-A1.8B", "gigachat3", "<|message_sep|>", several=False, thought=False),
    Model("Reka-Edge", "hermes", "\n\n<sep>", thought=False, in_ascii=True),
    Model("Bielik-11B-v3.0-Instruct", "hermes", IM_END),
    Model("openbmb-MiniCPM5-1B", "minicpm5", IM_END, in_python=True),
]
every_model = pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)
every_fourth = pytest.mark.parametrize("model", every(4, MODELS), ids=lambda each: each.name)


@every_model
def test_the_format_of_a_template_is_recognized(model: Model) -> None:
    assert format_of(model.name).name == model.format


@pytest.mark.parametrize(
    ("name", "syntax"),
    [  # whose turns of an assistant our renderer does not write, as transformers' does not
        ("llama-cpp-deepseek-r1", "deepseek_v3"),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek_v3"),
    ],
)
def test_formats_of_others_are_recognized(name: str, syntax: str) -> None:
    assert format_of(name).name == syntax


def check(model: Model, said: Said) -> None:
    prompt, text = written(model.name, said, model.end, **model.variables)
    for pieces in cuts(text):
        thought, content, calls = parts(model.name, prompt, *pieces)
        assert plain(calls) == list(said.calls), text
        assert content.strip() == said.content, text
        assert thought.strip() == said.thought, text


@every_fourth
def test_calls_are_read_as_the_template_writes_them(model: Model) -> None:
    for case, told in CALLS.items():
        if case == "maybe" and not model.has_nulls:
            continue
        check(model, Said(told))
    if model.several:
        check(model, Said(PARALLEL))
    if model.content:
        check(model, Said(ONE, "Let me see."))
    if model.thought:
        check(model, Said(ONE, "", "Hm, so."))
        check(model, Said(PARALLEL if model.several else ONE, "Let me see.", "Hm,\nso."))


@every_model
def test_results_go_back_to_the_model(model: Model) -> None:
    said = Said(PARALLEL if model.several else ONE)
    text = template(model.name).render(conversation(said), TOOLS, **model.variables)
    places = [text.index(f"RESULT{index}") for index in range(len(said.calls))]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["moonshotai-Kimi-K2", "Kimi-K2-Instruct", "Kimi-K2-Thinking"])
def test_results_go_back_by_the_ids_that_the_model_gave(name: str) -> None:
    prompt, text = written(name, Said(PARALLEL), IM_END)
    _, _, found = parts(name, prompt, text)
    ids = [format_of(name).id_of(each) for each in found]
    assert ids == ["functions.write_file:0", "functions.set:1", "functions.now:2"]
    back = template(name).render(conversation(Said(PARALLEL)), TOOLS)
    assert [f"Return of {each}" in back for each in ids] == [True] * 3


OTHER = [("write_file", {"path": "a.txt"}), ("set", {**FLAT, "count": "x"})]


@cache
def form(name: str, several: bool, forced: bool = True) -> CompiledGrammar:
    """Return the form of calls by a template's format, which are strict."""
    tools = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    return compiled(forms_of(tools, format_of(name), several=several, forced=forced))


@every_fourth
def test_forced_calls_are_what_the_template_writes(model: Model) -> None:
    def text(*told: Any) -> str:
        prompt, turn = written(model.name, Said(told), model.end, **model.variables)
        return answer(model.name, prompt, turn)

    left_out = {"nested": model.in_python, "text2": model.in_ascii, "maybe": not model.has_nulls}
    for case, told in CALLS.items():
        if not left_out.get(case):
            assert accepts(form(model.name, False), text(*told)), text(*told)
    for wrong in OTHER:
        assert not accepts(form(model.name, True), text(wrong)), text(wrong)
    assert not accepts(form(model.name, True), "Let me see.")
    if model.several:
        assert accepts(form(model.name, True), text(*PARALLEL)), text(*PARALLEL)
        assert not accepts(form(model.name, False), text(*PARALLEL))


@every_fourth
def test_strict_calls_are_what_the_template_writes(model: Model) -> None:
    """Behind content, too, which is not forced."""
    for several in (True, False):
        strict = form(model.name, several, forced=False)
        said = Said(PARALLEL if several and model.several else ONE, "Let me see." * model.content)
        prompt, turn = written(model.name, said, model.end, **model.variables)
        text = answer(model.name, prompt, turn)
        assert accepts(strict, text), text
        assert accepts(strict, "Let me see.")
        name, _ = ONE[0]
        assert not accepts(strict, text.replace(name, "write_files")), text
        assert not accepts(strict, text.replace("path", "file")), text
