"""Conversations that call tools, as published chat templates write them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.tool_formats.apertus import APERTUS
from onnxport.serving.http.tool_formats.base import ToolFormat
from onnxport.serving.http.tool_formats.cohere import COHERE3, COHERE4, COHERE_FENCE
from onnxport.serving.http.tool_formats.functionary import FUNCTIONARY_MESSAGE, FUNCTIONARY_TAG
from onnxport.serving.http.tool_formats.gemma import GEMMA4
from onnxport.serving.http.tool_formats.harmony import HARMONY
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.http.tool_formats.hunyuan import HUNYUAN
from onnxport.serving.http.tool_formats.hy3 import HY3
from onnxport.serving.http.tool_formats.lfm2 import LFM2
from onnxport.serving.http.tool_formats.llama3_json import LLAMA3_JSON
from onnxport.serving.http.tool_formats.mistral import MISTRAL_ID, MISTRAL_LIST, MISTRAL_NAME
from onnxport.serving.http.tool_formats.nemotron import NEMOTRON
from onnxport.serving.http.tool_formats.phi4_mini import PHI4_MINI_WORD
from onnxport.serving.http.tool_formats.solar import SOLAR
from onnxport.serving.http.tool_formats.xml_calls import QWEN3_CODER

from .places import TEMPLATES

QUESTION = "What now?"


def function(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Return a tool in OpenAI's shape."""
    parameters = {"type": "object", "properties": properties, "required": required}
    told = {"name": name, "description": f"{name} it", "parameters": parameters}
    return {"type": "function", "function": told}


WAIT = function("wait", {}, [])
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string", "description": "a text"},
    "other": {"type": "string", "description": "a text"},
    "n": {"type": "integer", "description": "n"},
    "f": {"type": "number", "description": "f"},
    "yes": {"type": "boolean", "description": "yes"},
    "deep": {
        "type": "object",
        "description": "deep",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}},
            "b": {"type": "string"},
        },
        "required": [],
    },
    "tags": {"type": "array", "items": {"type": "string"}, "description": "tags"},
    "none": {"type": ["string", "null"], "description": "none"},
}
ARGUMENTS = [
    {"text": "Zürich"},
    {
        "text": 'He said "no" & it\'s <b>so</b>\nback\\slash, 東京 🙂',
        "n": -3,
        "f": 1.5,
        "yes": True,
    },
    {
        "text": '{"name": "wait", "arguments": {"a": [1]}}',
        "other": "12",
        "deep": {"a": [1, 2], "b": "c, {d}"},
        "tags": ["x", "y: z", ""],
    },
    {"text": "", "yes": False, "deep": {}, "tags": [], "none": None},
]


def message(
    *arguments: dict[str, Any] | None, content: str | None = None, thought: str | None = None
) -> dict[str, Any]:
    """Return a message that calls: with arguments `find_places`, with None `wait`."""
    told = [
        {
            "id": f"abcdefgh{number}",
            "type": "function",
            "function": {
                "name": "wait" if each is None else "find_places",
                "arguments": json.dumps(each or {}),
            },
        }
        for number, each in enumerate(arguments)
    ]
    found: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": told}
    if thought is not None:
        found |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
    return found


@dataclass(frozen=True, eq=False)
class Case:
    """A published template that takes tools.

    Attributes:
        file: its name without the ending.
        syntax: the format that it asks for.
        start: what an answer of the model stands behind.
        ends: what ends an answer; the first one that is there.
        most: calls of a message.
        keeps: what it makes of a text beside calls; None: nothing.
        has_text: whether text beside calls is in the message that has them.
        closes: what ends a thought; None: it tells none of a message with calls.
        before: what an answer without a thought begins with.
        left_out: names of arguments whose types or values the template cannot tell.
        escapes: whether it writes texts so that they can be told from what is around them.
        variables: that it needs.
    """

    file: str
    syntax: ToolFormat
    start: str
    ends: tuple[str, ...] = ("<EOS>",)
    most: int = 2
    keeps: str | None = "Hm & so."
    has_text: bool = True
    closes: str | None = None
    before: str = ""
    left_out: tuple[str, ...] = ()
    escapes: bool = True
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> ChatTemplate:
        return read(self.file)

    @property
    def schemas(self) -> dict[str, Any]:
        return {each["function"]["name"]: each["function"]["parameters"] for each in self.tools}

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [function("find_places", self.told(PROPERTIES), ["text"]), WAIT]

    def told(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return arguments as far as the template can tell them."""
        return {key: one for key, one in arguments.items() if key not in self.left_out}

    def prompt(self, *messages: dict[str, Any]) -> str:
        """Return the prompt of a conversation that begins with a question."""
        told = [{"role": "user", "content": QUESTION}, *messages]
        return self.template.render(told, self.tools, True, **self.variables)

    def answer(self, message: dict[str, Any]) -> str:
        """Return a message as the model would have written it."""
        messages = [{"role": "user", "content": QUESTION}, message]
        whole = self.template.render(messages, self.tools, False, **self.variables)
        text = whole[whole.index(self.start, whole.index(QUESTION)) + len(self.start) :]
        ends = [at for end in self.ends if (at := text.find(end)) >= 0]
        return text[: ends[0] if ends else None].removeprefix(self.before)


@cache
def read(file: str) -> ChatTemplate:
    text = (TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8")
    return ChatTemplate({"default": text}, {"bos_token": "<BOS>", "eos_token": "<EOS>"})


COHERE_START = "<|CHATBOT_TOKEN|>"
LLAMA3_START = "<|start_header_id|>assistant<|end_header_id|>\n\n"
IM_START = "<|im_start|>assistant\n"
GRANITE_START = "<|start_of_role|>assistant<|end_of_role|>"
FIREFUNCTION = {"functions": "[]", "datetime": "now"}
CASES = [
    Case(
        "google-gemma-4-31B-it",
        GEMMA4,
        "<|turn>model\n",
        ("<|tool_response>",),
        closes="<channel|>",
    ),
    Case(
        "google-gemma-4-31B-it-interleaved",
        GEMMA4,
        "<|turn>model\n",
        ("<turn|>",),
        closes="<channel|>",
    ),
    Case("ibm-granite-granite-4.0", HERMES, GRANITE_START, ("<|end_of_text|>",)),
    Case("ibm-granite-granite-4.1", HERMES, GRANITE_START, ("<|end_of_text|>",)),
    Case(
        "CohereForAI-c4ai-command-r-plus-tool_use",
        COHERE_FENCE,
        COHERE_START,
        ("\n<|START_OF_TURN_TOKEN|>",),
        left_out=("deep", "none"),
    ),
    Case(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        COHERE3,
        COHERE_START,
        ("<|END_OF_TURN_TOKEN|>",),
        keeps=None,
        before="<|START_THINKING|><|END_THINKING|>",
        closes="<|END_THINKING|>",
    ),
    Case(
        "Cohere2MoE",
        COHERE4,
        COHERE_START,
        ("<|END_OF_TURN_TOKEN|>",),
        keeps=None,
        closes="<|END_THINKING|>",
    ),
    Case("Apertus-8B-Instruct", APERTUS, "<|assistant_start|>", ("<|assistant_end|>",)),
    Case("unsloth-Apriel-1.5", HUNYUAN, "<|assistant|>\n", ("\n<|end|>",)),
    Case(
        "Apriel-1.6-15b-Thinker-fixed",
        HUNYUAN,
        "<|begin_assistant|>\n",
        ("\n<|end|>",),
        closes="[BEGIN FINAL RESPONSE]\n",
    ),
    Case(
        "NVIDIA-Nemotron-Nano-v2",
        NEMOTRON,
        "<SPECIAL_11>Assistant\n",
        ("<SPECIAL_12>",),
        has_text=False,
    ),
    Case(
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        QWEN3_CODER,
        IM_START,
        ("\n<|im_end|>",),
        before="<think></think>",
        closes="</think>\n",
    ),
    Case("mistralai-Mistral-Nemo-Instruct-2407", MISTRAL_LIST, "[/INST]", keeps=None),
    Case("Mistral-Small-3.2-24B-Instruct-2506", MISTRAL_ID, "[/INST]", keeps=None),
    Case("unsloth-mistral-Devstral-Small-2507", MISTRAL_NAME, "[/INST]"),
    Case("mistralai-Ministral-3-14B-Reasoning-2512", MISTRAL_NAME, "[/INST]"),
    Case("LFM2-8B-A1B", LFM2, IM_START, ("<|im_end|>",)),
    Case("LFM2.5-8B-A1B", LFM2, IM_START, ("<|im_end|>",), escapes=False),
    Case("LFM2.5-Instruct", LFM2, IM_START, ("<|im_end|>",)),
    Case(
        "openai-gpt-oss-120b", HARMONY, "<|start|>assistant", ("<|call|>",), most=1, has_text=False
    ),
    Case(
        "upstage-Solar-Open-100B",
        SOLAR,
        "<|begin|>assistant",
        keeps=None,
        closes="<|begin|>assistant",
    ),
    Case(
        "tencent-Hy3",
        HY3,
        "<｜hy_Assistant:opensource｜>",
        ("<｜hy_eos:opensource｜>",),
        before="<think:opensource></think:opensource>",
        closes="</think:opensource>",
    ),
    Case("meetkai-functionary-medium-v3.1", FUNCTIONARY_TAG, LLAMA3_START, ("<|eom_id|>",)),
    Case(
        "meetkai-functionary-medium-v3.2",
        FUNCTIONARY_MESSAGE,
        f"{LLAMA3_START}>>>",
        ("<|eot_id|>",),
    ),
    Case(
        "fireworks-ai-llama-3-firefunction-v2",
        PHI4_MINI_WORD,
        LLAMA3_START,
        ("<|eot_id|>",),
        before=" ",
        variables=FIREFUNCTION,
    ),
    *(
        Case(f"meta-llama-{name}-Instruct", LLAMA3_JSON, LLAMA3_START, ("<|eot_id|>",), 1, None)
        for name in ("Llama-3.1-8B", "Llama-3.2-3B", "Llama-3.3-70B")
    ),
]
