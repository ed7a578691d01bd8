"""What the server tells of itself: probes, its load, and what llama.cpp's clients look for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from onnxport.serving.chat import ChatTemplate
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.llama_cpp import SAMPLERS
from onnxport.serving.stats import EngineStats
from onnxport.serving.tokenizer import Tokenizer
from onnxport.version import __version__
from tests.waiting import wait_until

from .conftest import RunningServer, StartServer
from .fake import MODEL as FAKE
from .fake import Client, FakeEngine
from .scripted import CHAT_TEMPLATE, MODEL, say

pytestmark = pytest.mark.timeout(60)
PROBES = ("/health", "/v1/health", "/ping")
KEYED = ("/props", "/slots", "/tokenizer_info", "/v1/models")


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


@pytest.mark.parametrize("path", PROBES)
def test_probes(server: RunningServer, path: str) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.get(path).status_code == 200
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert client.get(path).status_code == 200  # the connection is in step
        assert client.post(path).status_code == (200 if path == "/ping" else 405)
    assert (httpx.get(server.url + path).content == b"") == (path == "/ping")


@pytest.mark.parametrize("path", PROBES)
async def test_probes_of_a_server_that_failed(
    tokenizer: Tokenizer, model_folder: Path, path: str
) -> None:
    client = Client(FakeEngine(tokenizer, healthy=False, failure="it broke"), model_folder)
    answer = await client.get(path)
    assert answer.status_code == 503
    assert path == "/ping" or answer.json()["reason"] == "it broke"


async def test_every_operation_has_an_id_of_its_own(
    tokenizer: Tokenizer, model_folder: Path
) -> None:
    """FastAPI warns of one that is there twice, and warnings are errors."""
    paths = (await Client(FakeEngine(tokenizer), model_folder).get("/openapi.json")).json()["paths"]
    ids = [one["operationId"] for path in paths.values() for one in path.values()]
    assert len(ids) == len(set(ids))
    for probe in PROBES:
        assert set(paths[probe]) == {"get"}


async def test_which_paths_need_a_key(tokenizer: Tokenizer, model_folder: Path) -> None:
    client = Client(FakeEngine(tokenizer), model_folder, AppOptions(api_keys=("secret",)))
    for path in (*PROBES, "/load", "/version", "/metrics"):
        assert (await client.get(path)).status_code == 200, path
    for path in (*KEYED, "/v1/healthy", "/v1/health/"):
        assert (await client.get(path)).status_code == 401, path
    for path in KEYED:
        assert (await client.get(path, Authorization="Bearer secret")).status_code == 200, path


async def test_the_load(tokenizer: Tokenizer, model_folder: Path) -> None:
    client = Client(FakeEngine(tokenizer, num_unfinished=7), model_folder)
    assert (await client.get("/load")).json() == {"server_load": 7}


def test_the_load_of_a_server(start_server: StartServer, tmp_path: Path) -> None:
    """What comes while a step runs counts at once, though the engine does not know of it yet."""
    hold = tmp_path / "hold"
    hold.touch()
    server = start_server(hold=str(hold))
    body = {"model": MODEL, "prompt": say("ab")}

    def load() -> int:
        found: int = httpx.get(f"{server.url}/load").json()["server_load"]
        return found

    assert load() == 0
    with server.asking("completions", body):
        server.wait_for(num_requests_running=1)
        assert load() == 1
        with server.asking("completions", body):
            wait_until(lambda: load() == 2)
            stats = server.health()["engine"]
            assert stats["num_requests_running"] + stats["num_requests_waiting"] == 1
            hold.unlink()
            wait_until(lambda: load() == 0)
    assert load() == 0


async def test_what_clients_of_llama_cpp_look_for(tokenizer: Tokenizer, model_folder: Path) -> None:
    defaults = SamplingDefaults(0.6, 0.9, 5, 0.1, 1.1)
    client = Client(FakeEngine(tokenizer), model_folder, AppOptions(defaults, aliases=("other",)))
    assert (await client.get("/props")).json() == {
        "default_generation_settings": {
            "n_ctx": client.engine.capabilities.max_model_len,
            "params": {
                **{"n_predict": -1, "max_tokens": -1, "seed": -1},
                "temperature": 0.6,
                "top_k": 5,
                "top_p": 0.9,
                "min_p": 0.1,
                "typical_p": 1.0,
                "repeat_penalty": 1.1,
                "repeat_last_n": -1,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "top_n_sigma": 0.0,
                "xtc_probability": 0.0,
                "xtc_threshold": 0.1,
                "dry_multiplier": 0.0,
                "dry_base": 1.75,
                "dry_allowed_length": 2,
                "dry_penalty_last_n": -1,
                "dry_sequence_breakers": ["\n", ":", '"', "*"],
                "dynatemp_range": 0.0,
                "dynatemp_exponent": 1.0,
                "mirostat": 0,
                "mirostat_tau": 5.0,
                "mirostat_eta": 0.1,
                "adaptive_target": -1.0,
                "adaptive_decay": 0.9,
                "samplers": [*SAMPLERS],
            },
        },
        "total_slots": client.engine.max_num_seqs,
        "model_alias": FAKE,
        "model_path": FAKE,
        "modalities": {"vision": False, "video": False, "audio": False},
        **{"endpoint_slots": True, "endpoint_props": False, "endpoint_metrics": True},
        "chat_template": CHAT_TEMPLATE,
        "bos_token": "",
        "eos_token": "<|im_end|>",
        "build_info": f"onnxport {__version__}",
        "is_sleeping": False,
    }
    bare = Client(FakeEngine(tokenizer), model_folder, template=ChatTemplate({}))
    found = (await bare.get("/props")).json()
    assert (found["chat_template"], found["eos_token"]) == ("", "")
    assert found["default_generation_settings"]["params"]["top_k"] == 0


def test_as_many_slots_as_run_at_once(start_server: StartServer) -> None:
    server = start_server(max_num_seqs=3)
    assert httpx.get(f"{server.url}/props").json()["total_slots"] == 3


class BusyEngine(FakeEngine):
    """Runs as many sequences as a test says."""

    num_running = 0

    def stats(self) -> EngineStats:
        return replace(super().stats(), num_requests_running=self.num_running)


async def test_slots(tokenizer: Tokenizer, model_folder: Path) -> None:
    engine = BusyEngine(tokenizer, max_num_seqs=2)
    client = Client(engine, model_folder)
    n_ctx = engine.capabilities.max_model_len
    for engine.num_running in (0, 1, 2):
        slots = (await client.get("/slots")).json()
        assert [slot["id"] for slot in slots] == [0, 1]
        assert {slot["n_ctx"] for slot in slots} == {n_ctx}
        assert sum(slot["is_processing"] for slot in slots) == engine.num_running
        wanted = 503 if engine.num_running == 2 else 200
        assert (await client.get("/slots?fail_on_no_slot=1")).status_code == wanted
        assert (await client.get("/slots?fail_on_no_slot=0")).status_code == 200
