"""The whole road as a new user goes it: export the bundled checkpoint, serve it, ask it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from demo.evaluate import PROMPTS, right
from onnxport import LLM, SamplingParams
from tests.cli.conftest import onnxport, serving

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "demo" / "model"
FEWEST_RIGHT = 0.9  # share of the fixed prompts, at int4 with int8 activations


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "portia"
    done = onnxport("export", CHECKPOINT, folder, "--precision", "int4")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def client(artifact: Path) -> Iterator[OpenAI]:
    with (
        serving(artifact, "--served-model-name", "portia") as (address, _),
        OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def openai_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat-template messages as OpenAI's: calls get an id, arguments are JSON text."""
    converted = []
    for message in messages:
        copy = dict(message)
        if "tool_calls" in message:
            copy["tool_calls"] = [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {**function, "arguments": json.dumps(function["arguments"])},
                }
                for function in (call.get("function", call) for call in message["tool_calls"])
            ]
        if message["role"] == "tool":
            copy["tool_call_id"] = "call_0"
        converted.append(copy)
    return converted


def ask(client: OpenAI, prompt: dict[str, Any]) -> str:
    """The streamed reply; a tool call as the model wrote it."""
    stream = client.chat.completions.create(
        model="portia",
        messages=openai_messages(prompt["messages"]),  # type: ignore[arg-type]
        stream=True,
        temperature=0,
        max_tokens=120,
        **({"tools": prompt["tools"]} if "tools" in prompt else {}),
    )
    text, reasons = "", []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                value = {
                    "name": call.function.name,
                    "arguments": json.loads(call.function.arguments or "{}"),
                }
                text += f"<tool_call>\n{json.dumps(value)}\n</tool_call>"
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert len(reasons) == 1
    return text


@pytest.mark.slow
def test_the_openai_client_streams_right_answers_from_the_demo_server(client: OpenAI) -> None:
    prompts = [prompt for prompt in json.loads(PROMPTS.read_text()) if "messages" in prompt]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda prompt: ask(client, prompt), prompts))
    wrong = [
        (prompt["messages"][-1]["content"], reply)
        for prompt, reply in zip(prompts, replies, strict=True)
        if not right(prompt["expect"], reply)
    ]
    assert len(prompts) - len(wrong) >= FEWEST_RIGHT * len(prompts), wrong


def test_python_and_the_server_give_the_same_text(artifact: Path, client: OpenAI) -> None:
    prompts = ["The capital of", "Once upon a time"]
    served = client.completions.create(model="portia", prompt=prompts, temperature=0, max_tokens=12)
    with LLM(artifact, threads=1, kv_cache_tokens=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        offline = [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert [choice.text for choice in served.choices] == offline


def test_onnxruntime_genai_tokenizes_and_answers_alike(artifact: Path) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="no wheel for this platform")
    prompt = "<|im_start|>user\nWhat is onnxport?<|im_end|>\n<|im_start|>assistant\n"
    model = genai.Model(str(artifact))
    ids = genai.Tokenizer(model).encode(prompt)
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(ids) + 16, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(ids)
    while not generator.is_done():
        generator.generate_next_token()
    with LLM(artifact, threads=1, kv_cache_tokens=1024) as llm:
        ours = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16))[0]
    assert ours.prompt_token_ids == tuple(ids)
    expected = [int(token) for token in generator.get_sequence(0)[len(ids) :]]
    assert list(ours.outputs[0].token_ids) == expected


@pytest.mark.slow
def test_the_demo_script_runs_to_its_end() -> None:
    if not Path(sys.executable).with_name("onnxport").exists():
        pytest.skip("onnxport is not installed beside this Python; `make test` installs it")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "demo.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped cleanly" in done.stdout


@pytest.mark.slow
def test_the_build_goes_on_without_a_compiler(tmp_path: Path) -> None:
    cmake, make = shutil.which("cmake"), shutil.which("ninja") or shutil.which("make")
    if cmake is None or make is None:
        pytest.skip("cmake and a build tool are not on the path; pip brings its own to the build")
    generator = "Ninja" if Path(make).name == "ninja" else "Unix Makefiles"
    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path / "build", "-G", generator,
         f"-DCMAKE_MAKE_PROGRAM={make}"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "compiler" in done.stdout + done.stderr
    built = subprocess.run([cmake, "--build", tmp_path / "build"], check=False)
    assert built.returncode == 0
    assert not list(tmp_path.rglob("onnxport_cpu.*"))
