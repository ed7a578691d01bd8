"""Where `make published` puts what others have published, and what tests need of it."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "build" / "published"
LLAMA_CPP = FOLDER / "llama.cpp"
MODELS = LLAMA_CPP / "models"  # vocabularies, `ggml-vocab-*.gguf`
TEMPLATES = MODELS / "templates"
GRAMMARS = LLAMA_CPP / "grammars"
CONVERTER = LLAMA_CPP / "convert_hf_to_gguf.py"
OF_ADAPTERS = LLAMA_CPP / "convert_lora_to_gguf.py"
SCHEMA_SUITE = FOLDER / "JSON-Schema-Test-Suite"
SCHEMA_DRAFTS = SCHEMA_SUITE / "tests"  # a folder for each, `draft2020-12`
SMOLLM2 = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"

needs_llama_cpp = pytest.mark.skipif(
    not LLAMA_CPP.is_dir(), reason="llama.cpp's files are not here; `make published` fetches them"
)
needs_schema_suite = pytest.mark.skipif(
    not SCHEMA_SUITE.is_dir(),
    reason="JSON Schema's tests are not here; `make published` fetches them",
)
needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2.is_file(), reason="SmolLM2 is not here; `make published` fetches it"
)
