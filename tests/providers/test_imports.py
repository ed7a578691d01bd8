"""What a process imports before its first token, for a user waits for that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.providers.conftest import ArtifactMaker
from tests.tiers import every

# Of others, all that running a model on the cpu provider takes: onnx brings those after it.
NEEDED = {
    "numpy",
    "onnx",
    "google",
    "ml_dtypes",
    "typing_extensions",
    "onnxruntime",
    "sortedcontainers",
}
# Of these, what a graph takes that no earlier start lowered.
LOWERING = {"onnx", "google", "typing_extensions"}
# Of Python's own, what is slow to import and only servers need.
SLOW = {"asyncio", "ssl", "http", "multiprocessing", "xml", "unittest"}
# Of these, what no start needs whose graph was lowered before.
HEAVY = {"concurrent.futures", "importlib.resources", "lzma", "shutil", "socket", "subprocess"}
# Of ours, what waits until it is asked for.
LATER = {
    "cli",
    "exporter",
    "graphs.passes.decompose",
    "kv.disk_tier",
    "providers.host_lora",
    "providers.openvino",
    "providers.selection",
    "providers.trial",
    "serving.adapters.peft",
    "serving.http",
    "serving.jinja",
    "serving.speculation.build",
    "serving.structured.sequence",
}
LOAD = """
from onnxport import LLM, SamplingParams

limits = dict(kv_cache_tokens=64, max_model_len=32)
with LLM({path!r}, provider="cpu", graph_cache={cache!r}, **limits) as llm:
    greedy = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    (done,) = llm.generate([dict(prompt_token_ids=[1, 2, 3])], greedy)
    assert len(done.outputs[0].token_ids) == 2
"""


def imported(code: str) -> set[str]:
    """The modules that `code` imports, without those that Python begins with."""
    lines = f"import json, sys\nbefore = set(sys.modules)\n{code}\n"
    lines += "print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def of_others(modules: set[str]) -> set[str]:
    """The packages among `modules` that are neither ours nor Python's."""
    packages = {name.partition(".")[0] for name in modules} - {"onnxport"}
    return packages - sys.stdlib_module_names


def test_the_package_itself_imports_nobody() -> None:
    found = imported("import onnxport")
    assert not of_others(found)
    assert {name for name in found if name.startswith("onnxport.")} == {"onnxport.version"}


@pytest.mark.parametrize("precision", every(2, ["int4", "fp32"]))
def test_a_model_on_the_cpu_takes_what_it_needs(
    tiny_artifact: ArtifactMaker, precision: str
) -> None:
    found = imported(LOAD.format(path=str(tiny_artifact("llama", precision)), cache=None))
    assert of_others(found) == NEEDED
    assert not SLOW & found
    assert not {f"onnxport.{name}" for name in LATER} & found


@pytest.mark.parametrize("precision", every(2, ["int4", "fp32"]))
def test_a_graph_that_was_lowered_before_takes_no_onnx(
    tiny_artifact: ArtifactMaker, tmp_path: Path, precision: str
) -> None:
    load = LOAD.format(path=str(tiny_artifact("llama", precision)), cache=str(tmp_path))
    assert of_others(imported(load)) == NEEDED
    found = imported(load)
    assert of_others(found) == NEEDED - LOWERING
    assert not HEAVY & found
    assert not {name for name in found if name.startswith("onnxport.graphs.passes")}
