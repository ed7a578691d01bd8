"""A real model is lost while it answers: the next provider goes on with the same text."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from numpy.typing import NDArray
from openai import OpenAI

from onnxport.errors import DeviceLostError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.providers.base import Capabilities, LoadOptions, Model, StepInputs
from onnxport.providers.cpu.library import find_library
from onnxport.providers.registry import open_model
from onnxport.serving import loading
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.fallback import Fallback, Standby
from onnxport.serving.http.app import create_app
from onnxport.serving.http.sockets import bind, url
from onnxport.serving.tokenizer import Tokenizer
from onnxport.serving.worker import AsyncEngine
from tests.cli.conftest import write_checkpoint
from tests.waiting import PATIENCE_S

BASE = LoadOptions(threads=1, kv_cache_tokens=1024)
PROMPTS = ["The sea", "The sea is wide " * 3, "x", "A rather long prompt " * 4]


class Losing:
    """A model whose device is lost in run or transfer number `lost_at`."""

    def __init__(self, model: Model, lost_at: int) -> None:
        self._model = model
        self._left = lost_at

    @property
    def capabilities(self) -> Capabilities:
        return self._model.capabilities

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        self._count()
        return self._model.run(inputs)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._count()
        self._model.copy_blocks(sources, targets)

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        self._count()
        return self._model.read_blocks(blocks)

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        self._count()
        self._model.write_blocks(blocks, content)

    def close(self) -> None:
        self._model.close()
        if self._left < 0:
            raise RuntimeError("the driver is gone")

    def _count(self) -> None:
        assert self._left >= 0, "a lost device is used again"
        self._left -= 1
        if self._left < 0:
            raise DeviceLostError("the device hung")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_library() is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    folder = tmp_path_factory.mktemp("loss")
    checkpoint = write_checkpoint(folder / "checkpoint")
    return export_model(checkpoint, folder / "artifact", ExportOptions(precision="fp32"))


@contextlib.contextmanager
def serving(engine: Engine, artifact: Path) -> Iterator[str]:
    """Serve in a thread; give the address."""
    worker = AsyncEngine(engine)
    app = create_app(worker, "tiny", ChatTemplate.read(artifact))
    sock = bind("127.0.0.1", 0)
    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            ready.set()

        async def shutdown(self, sockets: Any = None) -> None:
            await super().shutdown(sockets)
            await worker.close()

    server = Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield url("127.0.0.1", sock)
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        sock.close()
    assert not thread.is_alive()


def answers(address: str) -> list[list[str]]:
    """Stream two sampled completions of each prompt, all prompts at once; return the texts."""

    def ask(number: int) -> list[str]:
        texts = ["", ""]
        with OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
            for chunk in client.completions.create(
                model="tiny",
                prompt=PROMPTS[number],
                max_tokens=24,
                temperature=float(number % 2),
                seed=number,
                n=2,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                texts[chunk.choices[0].index] += chunk.choices[0].text
        return texts

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, range(len(PROMPTS))))


def engine_over(artifact: Path, model: Model, standby: Standby, **config: Any) -> Engine:
    tokenizer = Tokenizer.from_folder(artifact, frozenset())
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 40, **config}
    return Engine(model, tokenizer, EngineConfig(**settings), standby=standby)


@pytest.fixture(scope="module")
def expected(artifact: Path) -> list[list[str]]:
    engine = engine_over(artifact, open_model(artifact, "cpu", BASE), Standby())
    with serving(engine, artifact) as address:
        return answers(address)


TIERS = {"kv_host_memory": 1 << 20, "preemption": "swap"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "options", "config"),
    [
        ("cpu", {"attention": "decomposed", "block_size": 48}, {}),
        ("cpu", {"attention": "decomposed", "block_size": 16, "kv_cache_tokens": 256}, TIERS),
        ("openvino", {"kv_cache_dtype": "float32"}, TIERS),
    ],
    ids=["decomposed", "decomposed, a small pool", "openvino"],
)
def test_streams_survive_on_another_provider(
    artifact: Path,
    expected: list[list[str]],
    provider: str,
    options: dict[str, Any],
    config: dict[str, Any],
) -> None:
    if provider == "openvino":
        pytest.importorskip("openvino", reason="openvino is not installed (the openvino extra)")
    other = LoadOptions(**{"threads": 1, "kv_cache_tokens": 1024, **options})
    model = Losing(open_model(artifact, "cpu", BASE), 15)
    standby = Standby((Fallback(provider, lambda: open_model(artifact, provider, other)),))
    engine = engine_over(artifact, model, standby, **config)
    with serving(engine, artifact) as address:
        assert answers(address) == expected
        body = httpx.get(f"{address}/health").json()
    assert body["provider"] == provider
    [loss] = body["losses"]
    assert (loss["provider"], loss["reason"]) == ("cpu", "the device hung")
    assert body["engine"]["finished"]["error"] == 0


def test_the_same_provider_once_more(
    artifact: Path, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `--provider cpu --fallback cpu` has it."""
    models = [Losing(open_model(artifact, "cpu", BASE), 20), open_model(artifact, "cpu", BASE)]
    monkeypatch.setattr(loading, "open_model", lambda *arguments: models.pop(0))
    config = EngineConfig(6, 40)
    engine = loading.open_engine(artifact, "cpu", BASE, config, fallback=["cpu"])
    with serving(engine, artifact) as address:
        assert answers(address) == expected
        assert httpx.get(f"{address}/health").json()["losses"]


def test_without_a_fallback_nothing_hangs(artifact: Path) -> None:
    engine = engine_over(artifact, Losing(open_model(artifact, "cpu", BASE), 5), Standby())
    with serving(engine, artifact) as address:
        with pytest.raises(Exception, match="the device hung"):
            answers(address)
        health = httpx.get(f"{address}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
