"""Chat templates of published files: those that have names, and those of a model in one file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onnxport.exporter.gguf.shard import GgufShard
from onnxport.exporter.gguf.tokenizer import write_files
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.tokenizer import Tokenizer

from .places import SMOLLM2, TEMPLATES, needs_llama_cpp, needs_smollm2
from .test_chat_templates import HI, TOOLS, says

TALK = [says("system", "Be brief."), HI, says("assistant", "Hello."), says("user", "Why? ü\n")]
DEFAULT = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def metadata(path: Path) -> dict[str, Any]:
    with closing(GgufShard(path)) as shard:
        return dict(shard.metadata)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of SmolLM2's tokenizer, as an artifact has it."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_files(metadata(SMOLLM2), SMOLLM2, "llama", folder)
    return folder


def reference(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@needs_smollm2
def test_a_prompt_of_a_trained_model(smollm2: Path) -> None:
    template, tokenizer = ChatTemplate.read(smollm2), Tokenizer.from_folder(smollm2, frozenset())
    known = reference(smollm2)
    for messages in ([HI], TALK, TALK[:2]):
        wanted = known.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == wanted
        ids = known(wanted, add_special_tokens=False).input_ids
        assert tokenizer.encode(wanted, add_special_tokens=False) == ids


@needs_smollm2
@needs_llama_cpp
@pytest.mark.parametrize("has_default", [True, False])
def test_templates_that_gguf_names(smollm2: Path, tmp_path: Path, has_default: bool) -> None:
    """As the library of the format writes them; the one for tools is taken where there are some."""
    from gguf import GGUFWriter

    name = "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
    tool_use = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    named = [{"name": "tool_use", "template": tool_use}, {"name": "rag", "template": "other"}]
    if has_default:
        named.append({"name": "default", "template": DEFAULT})
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_chat_template(named)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = metadata(SMOLLM2)
    del values["tokenizer.chat_template"]
    folder = tmp_path / "model"
    folder.mkdir()
    write_files(values | metadata(file), file, "llama", folder)
    template, known = ChatTemplate.read(folder), reference(folder)
    known.chat_template = {each["name"]: each["template"] for each in named}
    for tools in (None, TOOLS):
        if tools is None and not has_default:
            continue
        wanted = known.apply_chat_template([HI], tools, tokenize=False, add_generation_prompt=True)
        assert ("<tools>" in wanted) == (tools is not None)
        assert template.render([HI], tools) == wanted
