"""Every format, and which one a model's chat template has it write."""

from __future__ import annotations

from collections.abc import Mapping

from onnxport.errors import RequestError
from onnxport.serving.http.tool_formats.apertus import APERTUS
from onnxport.serving.http.tool_formats.base import ToolFormat
from onnxport.serving.http.tool_formats.cohere import COHERE3, COHERE4, COHERE_FENCE
from onnxport.serving.http.tool_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from onnxport.serving.http.tool_formats.functionary import FUNCTIONARY_MESSAGE, FUNCTIONARY_TAG
from onnxport.serving.http.tool_formats.gemma import FUNCTION_GEMMA, GEMMA4
from onnxport.serving.http.tool_formats.gigachat3 import GIGACHAT3, GIGACHAT31
from onnxport.serving.http.tool_formats.glm4 import GLM4
from onnxport.serving.http.tool_formats.granite import GRANITE_TEXT, GRANITE_TOKEN
from onnxport.serving.http.tool_formats.harmony import HARMONY
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.http.tool_formats.hunyuan import HUNYUAN
from onnxport.serving.http.tool_formats.hy3 import HY3, HY3_PLAIN, HY4
from onnxport.serving.http.tool_formats.invoke_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    DOTS,
    MINICPM5,
    MINIMAX_M2,
    STEP3,
)
from onnxport.serving.http.tool_formats.k2_horizon import K2_HORIZON
from onnxport.serving.http.tool_formats.kimi_k2 import KIMI_K2
from onnxport.serving.http.tool_formats.kimi_k3 import KIMI_K3
from onnxport.serving.http.tool_formats.lfm2 import LFM2
from onnxport.serving.http.tool_formats.llama3_json import LLAMA3_JSON
from onnxport.serving.http.tool_formats.minimax import MINIMAX
from onnxport.serving.http.tool_formats.minimax_m3 import MINIMAX_M3
from onnxport.serving.http.tool_formats.mistral import (
    MISTRAL_ID,
    MISTRAL_LIST,
    MISTRAL_NAME,
    MISTRAL_SPACED,
)
from onnxport.serving.http.tool_formats.muse import MUSE
from onnxport.serving.http.tool_formats.nemotron import NEMOTRON
from onnxport.serving.http.tool_formats.olmo3 import OLMO3
from onnxport.serving.http.tool_formats.phi4_mini import PHI4_MINI_TOKEN, PHI4_MINI_WORD
from onnxport.serving.http.tool_formats.plamo3 import PLAMO3
from onnxport.serving.http.tool_formats.pythonic import PYTHONIC
from onnxport.serving.http.tool_formats.solar import SOLAR
from onnxport.serving.http.tool_formats.tagged_json import GRANITE_20B, INTERNLM, LONGCAT
from onnxport.serving.http.tool_formats.xlam import XLAM
from onnxport.serving.http.tool_formats.xml_calls import GLM45, MIMO, QWEN3_CODER, SEED_OSS

AUTO = "auto"
# The first one that recognizes a template is taken: what is particular comes before what is common.
FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    GEMMA4,
    FUNCTION_GEMMA,
    COHERE4,
    COHERE3,
    COHERE_FENCE,
    APERTUS,
    SOLAR,
    HY3,
    HY3_PLAIN,
    HY4,
    K2_HORIZON,
    PLAMO3,
    MUSE,
    HUNYUAN,
    NEMOTRON,
    FUNCTIONARY_TAG,
    FUNCTIONARY_MESSAGE,
    MISTRAL_ID,
    MISTRAL_NAME,
    MISTRAL_SPACED,
    MISTRAL_LIST,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    DEEPSEEK_V4,
    STEP3,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    KIMI_K3,
    MINIMAX_M3,
    MINIMAX_M2,
    MINIMAX,
    DOTS,
    MINICPM5,
    GIGACHAT31,
    GIGACHAT3,
    SEED_OSS,
    GLM45,
    MIMO,
    QWEN3_CODER,
    GLM4,
    PHI4_MINI_WORD,
    PHI4_MINI_TOKEN,
    GRANITE_TOKEN,
    GRANITE_TEXT,
    INTERNLM,
    LONGCAT,
    OLMO3,
    GRANITE_20B,
    HERMES,
    XLAM,
    PYTHONIC,
    LFM2,
    LLAMA3_JSON,
)
NAMES = tuple(sorted({each.name for each in FORMATS}))
SAME: Mapping[str, str] = {  # vLLM's names of what is read as another format
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite4": "hermes",
    "jamba": "hunyuan_a13b",
    "ling3": "glm45",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "poolside_v1": "glm45",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "step5": "qwen3_coder",
}
KNOWN = tuple(sorted((*NAMES, *SAME)))


def recognized(template: str, name: str = AUTO) -> ToolFormat | None:
    """Return the format that a chat template asks for; None: it asks for none of them.

    Args:
        template: its text.
        name: among the variants of one format alone; AUTO: among all.
    """
    among = (each for each in FORMATS if name in (AUTO, each.name))
    found = next((each for each in among if each.recognizes(template)), None)
    return found.of_template(template) if found and found.of_template else found


def named(name: str, template: str) -> ToolFormat:
    """Return the format of a name, of its variants the one that the template asks for.

    It may be another name of the format that vLLM has.

    Raises:
        RequestError: there is none.
    """
    name = SAME.get(name, name)
    if name not in NAMES:
        raise RequestError(
            f"no format of tool calls is called {name!r}; give {AUTO}, or one of "
            f"{', '.join(KNOWN)}",
            "tool_call_parser",
        )
    first = next(each for each in FORMATS if each.name == name)
    return recognized(template, name) or first
