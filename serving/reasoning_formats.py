"""How each family of models writes its reasoning, and which one a chat template speaks of.

Sources: the models' chat templates, what vLLM's parsers and llama.cpp's tests take for reasoning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from onnxport.errors import RequestError
from onnxport.serving.channels import ChannelFormat
from onnxport.serving.reasoning import AnyFormat, ReasoningFormat
from onnxport.serving.tag_suffix import suffix_of

AUTO: Final = "auto"
NONE: Final = "none"

_THINK: Final = ReasoningFormat(("<think>",), ("</think>",))
_IMPLIED: Final = replace(_THINK, is_implied=True)
_SEED: Final = ReasoningFormat(("<seed:think>",), ("</seed:think>",))
_GRANITE: Final = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
_RESPONSE: Final = replace(
    _THINK, around=("<response>", "</response>")
)  # ERNIE 4.5's, Granite 3.3's
_COHERE: Final = ReasoningFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    answers=("<|START_RESPONSE|>", "<|START_TEXT|>"),
)
_KIMI_K3: Final = ReasoningFormat(
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>",),
    frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    tokens=("<|open|>", "<|close|>", "<|sep|>"),
    past=("<|open|>response<|sep|>",),
    answers=("<|open|>response<|sep|>",),
    signs=("open_tag('think'",),
)
_HY: Final = ReasoningFormat(  # the tags of each release have a suffix of their own, or none
    ("<think:opensource>", "<think>"),
    ("</think:opensource>", "</think>"),
    signs=("<think{}>", "<think:"),
)
_K2_THOUGHTS: Final = ("think", "think_fast", "think_faster")  # by the effort
_PLAMO: Final = ("<|plamo:begin_", "<|plamo:end_", ":plamo|>")
_GEMMA: Final = ReasoningFormat(
    ("<|channel>thought", "<|channel><|channel>thought"),
    ("<channel|>",),
    tokens=("<|channel>",),
    frames=("<|channel>thought\n<channel|>", "<channel|>"),  # empty thoughts behind the answer
)
_SOLAR: Final = ReasoningFormat(
    ("<|think|>",),
    ("<|end|>",),
    frames=("<|begin|>assistant<|content|>", "<|content|>", "<|end|>"),
    tokens=("<|begin|>",),
    past=("<|think|><|end|><|begin|>assistant",),
    signs=("<|begin|>assistant<|think|>",),
)
_MUSE: Final = ReasoningFormat(
    ("to=self<|message|>",),
    ("<|eom|>",),
    frames=(
        "<|start|>assistant to=user<|message|>",
        " to=user<|message|>",
        "<|start|>assistant to=commentary<|message|>",
        " to=commentary<|message|>",
        "<|eom|>",
        "<|eot|>",
    ),
    answers=(
        "<|start|>assistant to=user<|message|>",
        "<|start|>assistant to=commentary<|message|>",
    ),
    tokens=("<|start|>", "<|message|>"),
    signs=("to=self<|message|>",),
)
_APRIEL: Final = ReasoningFormat(
    ("Here are my reasoning steps:",),
    ("[BEGIN FINAL RESPONSE]",),
    around=("", "[END FINAL RESPONSE]"),
)
# By vLLM's names, where it has one. DeepSeek-R1 and some others think always: a template that does
# not open their thoughts leaves the tag to the model, which may leave it out.
FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "qwen3": _THINK,
    "deepseek_r1": _IMPLIED,
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "deepseek_v41": _THINK,
    "glm45": _THINK,
    "glm47": _THINK,
    "holo2": _IMPLIED,
    "kimi_k2": _THINK,
    "ling3": _THINK,
    "mimo": _THINK,
    "minimax_m2": _THINK,
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    "poolside_v1": _THINK,
    "step3": _IMPLIED,
    "step3p5": _THINK,
    "step5": _THINK,
    "ernie45": _RESPONSE,
    "granite_thinking_parser": _RESPONSE,
    "hunyuan_a13b": replace(_THINK, around=("<answer>", "</answer>")),
    "seed_oss": _SEED,
    "granite": _GRANITE,
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",)),
    "gemma4": _GEMMA,
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "kimi_k3": _KIMI_K3,
    "minimax_m3": ReasoningFormat(("<mm:think>",), ("</mm:think>",)),
    "hy_v3": _HY,
    "hy_v4": _HY,
    "k2_horizon": ReasoningFormat(
        tuple(f"<ifm|{name}>" for name in _K2_THOUGHTS),
        tuple(f"</ifm|{name}>" for name in _K2_THOUGHTS),
    ),
    "plamo3": ReasoningFormat(
        (f"{_PLAMO[0]}think{_PLAMO[2]}",),
        (f"{_PLAMO[1]}think{_PLAMO[2]}",),
        tokens=_PLAMO,
        signs=("plamo:begin_think",),
    ),
    "solar_open": _SOLAR,
    "muse_glimmer": _MUSE,
    "muse": _MUSE,
    "musespark1x": _MUSE,
    "apertus": ReasoningFormat(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    "apriel": _APRIEL,
}
_ALL: Final[Mapping[str, AnyFormat]] = {**FORMATS, "openai_gptoss": ChannelFormat()}
# Where it is to be recognized, in this order.
_TRIED: Final = (
    "openai_gptoss",
    "seed_oss",
    "granite",
    "ernie45",
    "mistral",
    "gemma4",
    "cohere_command3",
    "kimi_k3",
    "minimax_m3",
    "hy_v3",
    "k2_horizon",
    "plamo3",
    "solar_open",
    "muse_glimmer",
    "apertus",
    "apriel",
    "qwen3",
)


def reasoning_format(name: str, templates: Iterable[str]) -> AnyFormat | None:
    """Return the format of a name; None: reasoning is not told from the answer.

    Args:
        name: vLLM's of one, "none", or "auto": that which the chat templates speak of.
        templates: the model's.

    Raises:
        RequestError: there is no such name.
    """
    if name == NONE:
        return None
    sources = list(templates)
    if name == AUTO:
        tried = (_ALL[each] for each in _TRIED)
        found = next((one for one in tried if any(map(one.is_in, sources))), None)
        return _of_release(found, sources)
    if name not in _ALL:
        known = ", ".join((AUTO, NONE, *_ALL))
        raise RequestError(f"there is no reasoning parser {name!r}; use one of {known}")
    return _of_release(_ALL[name], sources)


def _of_release(found: AnyFormat | None, sources: Iterable[str]) -> AnyFormat | None:
    """Return a format with the tags that chat templates name, where each release has its own."""
    if found is not _HY:
        return found
    suffixes = {suffix_of(source, "think") for source in sources} - {"", ":opensource"}
    opens = tuple(f"<think{each}>" for each in sorted(suffixes))
    closes = tuple(f"</think{each}>" for each in sorted(suffixes))
    return replace(_HY, opens=opens + _HY.opens, closes=closes + _HY.closes)
