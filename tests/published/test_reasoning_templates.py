"""What published chat templates say of reasoning: how it is written, and whether it is on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import pytest

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.effort import effort_variables
from onnxport.serving.reasoning import AnyFormat, splitter
from onnxport.serving.reasoning_formats import AUTO, reasoning_format
from onnxport.serving.thoughts import Thought

from .places import TEMPLATES, needs_llama_cpp

pytestmark = needs_llama_cpp
# How an answer begins: within a thought, perhaps with one, or without.
Begins = Literal["open", "may", "past"]


class Says(NamedTuple):
    """What a template says.

    Attributes:
        parser: the name of the format.
        alone: how an answer begins if a request says nothing.
        high, none: the same for these efforts; None: no effort can be asked for.
    """

    parser: str
    alone: Begins
    high: Begins | None = None
    none: Begins | None = None


EXPECTED: dict[str, Says | None] = {
    "Apertus-8B-Instruct": Says("apertus", "may", "may", "may"),
    "Apriel-1.6-15b-Thinker-fixed": Says("apriel", "open"),
    "Bielik-11B-v3.0-Instruct": Says("qwen3", "may", "open", "may"),
    "ByteDance-Seed-OSS": Says("seed_oss", "may"),
    "Cohere2MoE": Says("cohere_command3", "open", "open", "past"),
    "CohereForAI-c4ai-command-r-plus-tool_use": None,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Says("cohere_command3", "past", "may", "past"),
    "GLM-4.6": Says("qwen3", "may", "may", "past"),
    "GLM-4.7-Flash": Says("qwen3", "open", "open", "past"),
    "GigaChat3-10B-A1.8B": None,
    "GigaChat3.1-10B-A1.8B": None,
    "HuggingFaceTB-SmolLM3-3B": Says("qwen3", "may", "may", "past"),
    "Kimi-K2-Instruct": None,
    "Kimi-K2-Thinking": Says("qwen3", "may"),
    "Kimi-K3": Says("kimi_k3", "open", "open", "past"),
    "LFM2-8B-A1B": None,
    "LFM2.5-8B-A1B": Says("qwen3", "may"),
    "LFM2.5-Instruct": Says("qwen3", "may"),
    "MiMo-VL": None,  # thinks in <think>, of which its template says nothing
    "MiniMax-M1": None,
    "MiniMax-M2": Says("qwen3", "open"),
    "MiniMax-M3": Says("minimax_m3", "may", "open", "past"),
    "Mistral-Small-3.2-24B-Instruct-2506": None,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Says("qwen3", "open", "open", "past"),
    "NVIDIA-Nemotron-Nano-v2": Says("qwen3", "open"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": None,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": None,
    "Qwen-QwQ-32B": Says("qwen3", "past", "open", "past"),
    "Qwen-Qwen2.5-7B-Instruct": None,
    "Qwen-Qwen3-0.6B": Says("qwen3", "may", "may", "past"),
    "Qwen3-Coder": None,
    "Qwen3.5-4B": Says("qwen3", "open", "open", "past"),
    "Reka-Edge": Says("qwen3", "may", "open", "may"),
    "Spark2.5": Says("qwen3", "open", "open", "past"),
    "StepFun3.5-Flash": Says("qwen3", "open"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Says("qwen3", "open"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Says("qwen3", "past", "open", "past"),
    "deepseek-ai-DeepSeek-V3.1": Says("qwen3", "past", "open", "past"),
    "deepseek-ai-DeepSeek-V3.2": Says("qwen3", "past", "open", "past"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": Says("qwen3", "past", "open", "past"),
    "deepseek-ai-DeepSeek-V4": Says("qwen3", "past", "open", "past"),
    "fireworks-ai-llama-3-firefunction-v2": None,
    "google-gemma-2-2b-it": None,
    "google-gemma-4-31B-it-interleaved": Says("gemma4", "past", "may", "past"),
    "google-gemma-4-31B-it": Says("gemma4", "past", "may", "past"),
    "ibm-granite-granite-3.3-2B-Instruct": Says("ernie45", "may", "may", "may"),
    "ibm-granite-granite-4.0": None,
    "ibm-granite-granite-4.1": None,
    "inclusionai-ling-3.0-flash": Says("qwen3", "open", "open", "past"),
    "llama-cpp-deepseek-r1": Says("qwen3", "open"),
    "llama-cpp-rwkv-world": Says("qwen3", "may", "open", "past"),
    "meetkai-functionary-medium-v3.1": None,
    "meetkai-functionary-medium-v3.2": None,
    "meta-llama-Llama-3.1-8B-Instruct": None,
    "meta-llama-Llama-3.2-3B-Instruct": None,
    "meta-llama-Llama-3.3-70B-Instruct": None,
    "microsoft-Phi-3.5-mini-instruct": None,
    "mistralai-Ministral-3-14B-Reasoning-2512": Says("mistral", "may"),
    "mistralai-Mistral-Nemo-Instruct-2407": None,
    "moonshotai-Kimi-K2": None,
    "muse-glimmer": Says("muse_glimmer", "may", "may", "may"),
    # Its messages are told apart as `tests/http/test_harmony.py` has it.
    "openai-gpt-oss-120b": Says("openai_gptoss", "may", "may"),
    "openbmb-MiniCPM5-1B": Says("qwen3", "may", "open", "past"),
    "poolside-Laguna-S-2.1": Says("qwen3", "open", "open", "past"),
    "poolside-Laguna-XS-2.1": Says("qwen3", "past", "open", "past"),
    "poolside-Laguna-XS.2": Says("qwen3", "past", "open", "past"),
    "tencent-Hy3": Says("hy_v3", "past", "open", "past"),
    "unsloth-Apriel-1.5": Says("apriel", "may"),
    "unsloth-mistral-Devstral-Small-2507": None,
    "upstage-Solar-Open-100B": Says("solar_open", "may", "may", "past"),
}
THINKS = [name for name, says in EXPECTED.items() if says and says.parser != "openai_gptoss"]
# What opens a thought, the rest of it, and answers behind a thought and without one, as models
# write them.
WRITTEN = {
    "qwen3": ("<think>", "\n{}\n</think>\n\n", "{}", "{}"),
    "seed_oss": ("<seed:think>", "{}</seed:think>", "{}", "{}"),
    "ernie45": ("<think>", "{}</think>", "<response>{}</response>", "{}"),
    "mistral": ("[THINK]", "{}[/THINK]", "{}", "{}"),
    "gemma4": ("<|channel>thought", "\n{}<channel|>", "{}", "{}"),
    "cohere_command3": (
        "<|START_THINKING|>",
        "{}<|END_THINKING|>",
        "<|START_TEXT|>{}<|END_TEXT|>",
        "<|START_RESPONSE|>{}<|END_RESPONSE|>",
    ),
    "kimi_k3": (
        "<|open|>think<|sep|>",
        "{}<|close|>think<|sep|>",
        "<|open|>response<|sep|>{}<|close|>response<|sep|><|close|>message<|sep|>",
        "{}<|close|>response<|sep|><|close|>message<|sep|>",
    ),
    "minimax_m3": ("<mm:think>", "{}</mm:think>", "{}", "{}"),
    "hy_v3": ("<think:opensource>", "{}</think:opensource>", "{}", "{}"),
    "solar_open": (
        "<|think|>",
        "{}<|end|>",
        "<|begin|>assistant<|content|>{}<|end|>",
        "<|content|>{}<|end|>",
    ),
    "muse_glimmer": (
        " to=self<|message|>",
        "{}<|eom|>",
        "<|start|>assistant to=user<|message|>{}<|eot|>",
        " to=user<|message|>{}<|eot|>",
    ),
    "apertus": ("<|inner_prefix|>", "{}<|inner_suffix|>", "{}", "{}"),
    "apriel": (
        "Here are my reasoning steps:",
        "\n{}\n[BEGIN FINAL RESPONSE]",
        "\n{}\n[END FINAL RESPONSE]",
        "{}",
    ),
}
THOUGHT = "Is 1 < 2?\n\nIt is: <b>[so]</b>"
ANSWER = "It is <|so|>.\n\n- </b> ü"


@cache
def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})


def begins(name: str, **variables: Any) -> Thought | None:
    """Return what an answer begins with."""
    found = template(name)
    known = reasoning_format(AUTO, found.sources.values())
    assert known is not None
    thought = known.thought(found.render([{"role": "user", "content": "Hi?"}], **variables))
    assert thought is None or isinstance(thought, Thought)
    return thought


def of_effort(name: str, effort: str) -> Thought | None:
    found = template(name)
    known = reasoning_format(AUTO, found.sources.values())
    return begins(name, **effort_variables(found, known, effort, {}))


def state(thought: Thought | None) -> Begins:
    if thought is None or thought.is_past:
        return "past"
    return "open" if thought.is_open else "may"


def split(thought: Thought | None, text: str, size: int) -> tuple[str, str]:
    """Return the reasoning and the answer of a text that comes in pieces of a size."""
    parts = splitter(thought)
    cuts = [*range(0, len(text), size), len(text)]
    found = [
        one
        for start, end in pairwise(cuts)
        for one in parts.parts(text[start:end], is_last=end == len(text))
    ]
    content = "".join(one.content for one in found)
    if thought is None or thought.around is None:
        ends = ((one, one.length or len(text)) for one in parts.stretches)
        assert content == "".join(text[one.place : one.place + length] for one, length in ends)
    return "".join(one.reasoning for one in found), content


def test_each_template_is_told_apart() -> None:
    """By its text alone."""
    assert EXPECTED.keys() == {path.stem for path in TEMPLATES.glob("*.jinja")}
    found: dict[str, AnyFormat | None] = {}
    for name in EXPECTED:
        found[name] = reasoning_format(AUTO, template(name).sources.values())
    wanted = {name: says and reasoning_format(says.parser, ()) for name, says in EXPECTED.items()}
    assert found == wanted


@pytest.mark.parametrize("name", THINKS)
def test_prompts_say_how_an_answer_begins(name: str) -> None:
    says = EXPECTED[name]
    assert says is not None
    assert state(begins(name)) == says.alone
    if says.high is None:
        for effort in ("high", "none"):
            with pytest.raises(RequestError, match="no variable for it"):
                of_effort(name, effort)
        return
    assert state(of_effort(name, "high")) == says.high
    assert state(of_effort(name, "none")) == says.none


@pytest.mark.parametrize("name", THINKS)
def test_what_a_model_writes_is_its_thought_and_its_answer(name: str) -> None:
    says = EXPECTED[name]
    assert says is not None
    opens, thinks, answers, alone = WRITTEN[says.parser]
    texts: dict[Begins, list[tuple[str, str, str]]] = {
        "open": [
            (thinks.format(THOUGHT) + answers.format(ANSWER), THOUGHT, ANSWER),
            (thinks.format("") + answers.format(ANSWER), "", ANSWER),
            (f"\n{THOUGHT}", THOUGHT, ""),
        ],
        "may": [
            (opens + thinks.format(THOUGHT) + answers.format(ANSWER), THOUGHT, ANSWER),
            (opens + thinks.format("") + answers.format(ANSWER), "", ANSWER),
            (alone.format(ANSWER), "", ANSWER),
        ],
        "past": [(alone.format(ANSWER), "", ANSWER), (alone.format(""), "", "")],
    }
    variants = [begins(name)]
    if says.high is not None:
        variants += [of_effort(name, "high"), of_effort(name, "none")]
    for thought in variants:
        for text, reasoning, answer in texts[state(thought)]:
            for size in (1, 2, 7, len(text) or 1):
                assert split(thought, text, size) == (reasoning, answer), (text, size)


def test_a_closing_tag_alone_says_that_there_is_no_thought() -> None:
    """MiniMax M3 writes it where it may choose, and its template writes it into later prompts."""
    thought = begins("MiniMax-M3")
    assert state(thought) == "may"
    for size in (1, 3, 99):
        assert split(thought, f"</mm:think>{ANSWER}", size) == ("", ANSWER)
        assert split(thought, f"</mm:think>\n{ANSWER}", size) == ("", ANSWER)


@pytest.mark.parametrize("name", ["Kimi-K3", "upstage-Solar-Open-100B", "Cohere2MoE"])
def test_a_cut_answer_has_no_part_of_a_frame_but_the_last(name: str) -> None:
    says = EXPECTED[name]
    assert says is not None
    thought = of_effort(name, "high")
    assert thought is not None
    opens, thinks, answers, _ = WRITTEN[says.parser]
    text = ("" if thought.is_open else opens) + thinks.format("hm") + answers.format("yes")
    begun = text.index("yes") + 3
    assert split(thought, text[:begun], 1) == ("hm", "yes")
    assert split(replace(thought, frames=()), text[:begun], 1)[1] != "yes"
