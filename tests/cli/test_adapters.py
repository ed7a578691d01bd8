"""Adapters on the command line, up to a server whose tokens are those of merged weights."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from safetensors.numpy import load_file, save_file

from onnxport.cli import adapters as cli
from onnxport.cli import build_parser
from onnxport.cli.session import deltas, load_engine
from onnxport.errors import AdapterError, CapacityError, RequestError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import PROJECTIONS
from onnxport.providers.base import LoadOptions
from onnxport.serving.adapters.peft import read_adapter
from onnxport.serving.llm import LLM
from onnxport.serving.params import RequestOptions, SamplingParams
from tests.exporter import gguf_adapters
from tests.serving.adapting import content, module_name, random_tensors, write_adapter
from tests.serving.helpers import tokens

from .conftest import onnxport, serving

DEMO = Path(__file__).parents[2] / "demo" / "model"
FEW = ("--provider", "cpu", "--threads", "1", "--kv-cache-tokens", "1024", "--no-trial")


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", "m", *arguments])


@pytest.mark.parametrize(
    ("arguments", "ranks", "expected"),
    [
        ("", (), (0, 16)),
        ("--lora-modules a=x b=y", (2, 4), (2, 4)),
        ("--lora-modules a=x --lora-modules b=y", (2, 64), (2, 64)),
        ("--lora-modules a=x --max-loras 3", (2,), (3, 16)),
        ("--lora-modules a=x --max-lora-rank 32", (2,), (1, 32)),
        ("--lora-modules a=x --allow-runtime-lora", (64,), (8, 64)),
        ("--enable-lora", (), (8, 16)),
        ("--enable-lora --max-loras 2 --max-lora-rank 4", (), (2, 4)),
        ("--allow-runtime-lora", (), (8, 16)),
        ("--lora-folder x", (), (8, 16)),
        ("--max-loras 5", (), (5, 16)),
        ("--lora-modules a=x b=y --max-loras 1 --max-cpu-loras 2", (2, 4), (1, 16)),
        ("--enable-lora --max-cpu-loras 3", (), (3, 16)),
    ],
)
def test_slots(arguments: str, ranks: tuple[int, ...], expected: tuple[int, int]) -> None:
    options = parse(*arguments.split())
    found = [(str(rank), content(0, rank)) for rank in ranks]
    load = cli.with_slots(LoadOptions(threads=3), options, found)
    assert (load.max_adapters, load.max_adapter_rank) == expected
    assert load.threads == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--max-lora-rank 8", "--max-lora-rank 8 was given without adapters"),
        ("--lora-dtype int4", "--lora-dtype int4 was given without adapters; add --enable-lora or"),
        ("--lora-modules a=x b=y --max-loras 1", "--max-loras is 1, and --lora-modules names 2"),
        ("--max-cpu-loras 8", "--max-cpu-loras 8 was given without adapters"),
        ("--max-loras 3 --max-cpu-loras 2", "--max-cpu-loras is 2, and --max-loras is 3"),
        ("--lora-modules a=x b=y --max-cpu-loras 1", "is 1, and --lora-modules names 2"),
        ("--lora-modules a=x --max-lora-rank 8", "is 8, and the adapter 0 has rank 9"),
    ],
)
def test_contradictions(arguments: str, words: str) -> None:
    options = parse(*arguments.split())
    found = [(str(index), content(0, 9)) for index in range(len(options.lora_modules))]
    with pytest.raises(CapacityError, match=words):
        cli.with_slots(LoadOptions(), options, found)


def test_what_adapters_are_kept_in() -> None:
    for arguments, dtype in (
        ("", "auto"),
        ("--lora-dtype int4", "int4"),
        ("--lora-dtype fp16", "float16"),
    ):
        options = parse("--enable-lora", *arguments.split())
        assert cli.with_slots(LoadOptions(), options, []).adapter_dtype == dtype
    alone = build_parser().parse_args(["generate", "m", "x", "--lora-dtype", "int4"])
    with pytest.raises(CapacityError, match="int4 was given without adapters; add --lora, or"):
        cli.with_slots(LoadOptions(), alone, [])


def test_names_and_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert parse("--lora-modules", "a=x=y").lora_modules == [("a", Path("x=y"))]
    for wrong in ("a", "=x", "a="):
        with pytest.raises(SystemExit, match="2"):
            parse("--lora-modules", wrong)
        assert "is not NAME=PATH" in capsys.readouterr().err
    with pytest.raises(AdapterError, match="names a twice"):
        cli.read_adapters(tmp_path, parse("--lora-modules", "a=x", "b=x", "a=y"))


def test_scales(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = parse("--lora-scaled", "x/sql.gguf:0.5,y/poems:-2", "--lora-scaled", "c:d:1")
    assert options.lora_scaled == [
        ("sql", Path("x/sql.gguf"), 0.5),
        ("poems", Path("y/poems"), -2.0),
        ("c:d", Path("c:d"), 1.0),
    ]
    assert cli.adapter_scales(options) == {"sql": 0.5, "poems": -2.0, "c:d": 1.0}
    for wrong in ("a", "a:", ":1", "a:x", "a:nan", "a:1001", "a:1,b"):
        with pytest.raises(SystemExit, match="2"):
            parse("--lora-scaled", wrong)
        assert "is not FNAME:SCALE" in capsys.readouterr().err
    with pytest.raises(AdapterError, match="--lora-modules and --lora-scaled names a twice"):
        cli.read_adapters(tmp_path, parse("--lora-modules", "a=x", "--lora-scaled", "b/a:1"))
    both = build_parser().parse_args(["generate", "m", "x", "--lora", "a", "--lora-scaled", "b:1"])
    with pytest.raises(RequestError, match="--lora-scaled a:1, and both are added up"):
        cli.request_options(both)


@pytest.mark.parametrize(
    ("arguments", "ranks", "expected"),
    [
        ("--lora-scaled 0:0.5", (4,), (2, 4)),
        ("--lora-scaled 0:1", (4,), (1, 4)),
        ("--lora-scaled 0:0", (4,), (1, 4)),
        ("--lora-scaled 0:1,1:1", (4, 5), (3, 9)),
        ("--lora-scaled 0:1,1:0", (4, 5), (2, 5)),
        ("--lora-scaled 0:1,1:1 --max-loras 2 --max-lora-rank 8", (4, 5), (2, 8)),
    ],
)
def test_slots_for_sums(arguments: str, ranks: tuple[int, ...], expected: tuple[int, int]) -> None:
    found = [(str(place), content(0, rank)) for place, rank in enumerate(ranks)]
    load = cli.with_slots(LoadOptions(), parse(*arguments.split()), found)
    assert (load.max_adapters, load.max_adapter_rank) == expected


def test_modules_as_vllm_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    given = '{"name": "sql", "path": "dir", "base_model_name": "x"}'
    assert parse("--lora-modules", given, "a=b").lora_modules == [
        ("sql", Path("dir")),
        ("a", Path("b")),
    ]
    for wrong, words in (
        ("{", "is not JSON"),
        ('{"name": "a"}', "needs a name and a path"),
        ('{"name": 1, "path": "b"}', "needs a name and a path"),
        ('{"name": "a", "path": "b", "x": 1}', "unknown field 'x'"),
        ('{"name": "a", "path": "b", "base_model_name": 1}', "is not a text"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse("--lora-modules", wrong)
        assert words in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the tiny model."""
    spec = Artifact.read(artifact).manifest.model
    tensors = random_tensors(spec, targets=PROJECTIONS, seed=3)
    return write_adapter(
        tmp_path_factory.mktemp("adapters") / "tiny", tensors, target_modules=[*PROJECTIONS]
    )


@pytest.fixture(scope="module")
def file(artifact: Path, folder: Path) -> Path:
    """The same adapter as a file of llama.cpp."""
    spec = Artifact.read(artifact).manifest.model
    tensors = load_file(folder / "adapter_model.safetensors")
    path = folder.with_name("tiny.gguf")
    shutil.copy(
        gguf_adapters.write(path, gguf_adapters.of_llama(tensors, spec)),
        path.with_name("half.gguf"),
    )
    return path


def test_a_sum_at_the_start(artifact: Path, folder: Path, file: Path) -> None:
    """Half of an adapter and half of it, as another file, are the adapter: up to rounding."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def answer(*more: str) -> list[int]:
        engine = load_engine(artifact, parse(*more, *FEW))
        try:
            return tokens([*deltas(engine, [engine.prepare("a", [5, 6, 7], params)])])
        finally:
            engine.close()

    once = answer("--lora-scaled", f"{folder}:1")
    assert answer("--lora-scaled", f"{folder}:0.75,{file.with_name('half.gguf')}:0.25") == once
    assert once != answer("--lora-modules", f"a={folder}")  # which no request picks


def test_files_of_llama_cpp(artifact: Path, folder: Path, file: Path, tmp_path: Path) -> None:
    """Named at the start or read while a server runs, they are what a folder is."""
    options = parse("--lora-modules", f"a={folder}", f"b={file}", "--max-loras", "3", *FEW)
    engine = load_engine(artifact, options)
    try:
        engine.adapters.load("c", engine.adapters.read(file))
        loaded = {one.name: one for one in engine.adapters.loaded}
        assert loaded.keys() == {"a", "b", "c"}
        assert len({one.fingerprint for one in loaded.values()}) == 1
        assert (loaded["c"].path, loaded["c"].rank) == (file, 4)
        with pytest.raises(AdapterError, match=r"no adapter: general\.type is 'model'"):
            engine.adapters.read(gguf_adapters.write(tmp_path / "m.gguf", {}, general__type=None))
    finally:
        engine.close()


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_an_answer_with_an_adapter(
    artifact: Path, folder: Path, file: Path, tmp_path: Path
) -> None:
    ask = ("generate", artifact, "ab", "--max-tokens", "12", "--ignore-eos", "--json", *FEW)
    texts = []
    for more in ((), ("--lora", folder), ("--lora", file)):
        done = onnxport(*ask, *more)
        assert done.returncode == 0, done.stderr
        texts.append(json.loads(done.stdout)[0]["text"])
    assert texts[0] != texts[1] == texts[2]
    done = onnxport("chat", artifact, "--lora", folder, "--max-tokens", "4", *FEW, stdin="hi\n")
    assert done.returncode == 0, done.stderr
    done = onnxport(*ask, "--lora", write_adapter(tmp_path / "other"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "was made for another model" in done.stderr


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_server_with_an_adapter(artifact: Path, folder: Path) -> None:
    more = ("--lora-modules", f"mine={folder}", "--provider", "cpu")
    with serving(artifact, *more) as (address, said):
        assert any("loaded the adapter mine" in line for line in said)
        models = httpx.get(f"{address}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["tiny", "mine"]
        body = {"lora_name": "x", "lora_path": str(folder)}
        assert httpx.post(f"{address}/v1/load_lora_adapter", json=body).status_code == 403
        health = httpx.get(f"{address}/health").json()["capabilities"]
        assert (health["max_adapters"], health["max_adapter_rank"]) == (1, 4)
    done = onnxport("serve", artifact, "--lora-modules", f"tiny={folder}", "--port", "0", *FEW)
    assert done.returncode == 1
    assert "as the model itself is called" in done.stderr


# The demo model, with adapters and with weights into which they were merged.


def merged(target: Path, *parts: tuple[Path, float]) -> Path:
    """Export the demo model with adapters in its weights; in float32, as computed by NumPy."""
    checkpoint = target / "checkpoint"
    shutil.copytree(DEMO, checkpoint)
    weights = {name: value.astype(np.float32) for name, value in load_demo().items()}
    spec = Artifact.read(target.parent / "base").manifest.model
    for folder, scale in parts:
        for (layer, name), delta in read_adapter(folder, spec).adapter.deltas.items():
            weights[f"{module_name(layer, name)}.weight"] += scale * (delta.b @ delta.a)
    save_file(weights, checkpoint / "model.safetensors")
    return export_model(checkpoint, target / "artifact", ExportOptions(precision="fp32"))


def load_demo() -> dict[str, Any]:
    import ml_dtypes  # noqa: F401 - lets safetensors read bfloat16

    found: dict[str, Any] = load_file(DEMO / "model.safetensors")
    return found


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Path], list[Path]]]:
    """The demo model in float32, adapters of it, and the models that they make of it."""
    root = tmp_path_factory.mktemp("demo")
    base = export_model(DEMO, root / "base", ExportOptions(precision="fp32"))
    spec = Artifact.read(base).manifest.model
    folders, models = [], []
    for index, (rank, targets) in enumerate([(8, PROJECTIONS), (4, PROJECTIONS[:4])]):
        tensors = random_tensors(spec, rank=rank, targets=targets, seed=index)
        config = {"r": rank, "lora_alpha": rank / 2, "target_modules": [*targets]}
        folders.append(write_adapter(root / f"adapter-{index}", tensors, **config))
        models.append(merged(root / f"merged-{index}", (folders[-1], 1.0)))
    yield base, folders, models
    shutil.rmtree(root)


MIX = (0.75, -0.5)


@pytest.fixture(scope="module")
def mixed_demo(demo: tuple[Path, list[Path], list[Path]]) -> Path:
    """The demo model with both adapters in its weights, each times its scale."""
    base, folders, _ = demo
    return merged(base.parent / "mixed", *zip(folders, MIX, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tokens_of_a_sum_are_those_of_merged_weights(
    demo: tuple[Path, list[Path], list[Path]], mixed_demo: Path
) -> None:
    base, folders, _ = demo
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: Any = {"provider": "cpu", "threads": 1, "kv_cache_tokens": 4096}
    with LLM(mixed_demo, **options) as llm:
        expected = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    with LLM(base, max_adapters=2, **options) as llm:
        for index, folder in enumerate(folders):
            llm.load_adapter(str(index), folder)
        several = [
            RequestOptions(adapter_scales={str(index): scale for index, scale in enumerate(MIX)}),
            RequestOptions(adapter="0"),
            RequestOptions(),
        ]
        prompts = [prompt for prompt in PROMPTS for _ in several]
        outputs = llm.generate(prompts, params, options=several * len(PROMPTS))
        found = [output.outputs[0].text for output in outputs]
    assert found[::3] == expected
    assert all(len({*found[place : place + 3]}) == 3 for place in range(0, len(found), 3))


PROMPTS = ("Once upon a time", "The capital of", "2 + 3 =", "A list of words:")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tokens_are_those_of_merged_weights(demo: tuple[Path, list[Path], list[Path]]) -> None:
    base, folders, models = demo
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: Any = {"provider": "cpu", "threads": 1, "kv_cache_tokens": 4096}
    expected = {}
    for name, model in zip(("base", "0", "1"), (base, *models), strict=True):
        with LLM(model, **options) as llm:
            outputs = llm.generate(PROMPTS, params)
            expected[name] = [output.outputs[0].text for output in outputs]
    assert all(len(set(texts)) == 3 for texts in zip(*expected.values(), strict=True))
    with LLM(base, max_adapters=2, **options) as llm:
        for index, folder in enumerate(folders):
            llm.load_adapter(str(index), folder)
        prompts = [prompt for prompt in PROMPTS for _ in expected]
        picked = [RequestOptions(adapter=None if n == "base" else n) for n in expected] * 4
        outputs = llm.generate(prompts, params, options=picked)
        found = [output.outputs[0].text for output in outputs]
    assert found == [expected[name][i] for i in range(len(PROMPTS)) for name in expected]
    modules = [f"{index}={folder}" for index, folder in enumerate(folders)]
    more = ("--lora-modules", *modules, "--provider", "cpu")
    with (
        serving(base, *more, "--served-model-name", "base") as (address, _),
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        for name, texts in expected.items():
            done = client.completions.create(
                model=name,
                prompt=[*PROMPTS],
                temperature=0,
                max_tokens=24,
                extra_body={"ignore_eos": True},
            )
            assert [choice.text for choice in done.choices] == texts
