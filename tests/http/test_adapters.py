"""Adapters over HTTP: a real server over the null model, whose K/V depend on the adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.graphs.artifacts import SPEC
from tests.serving.adapting import random_tensors, write_adapter

from .conftest import RunningServer, StartServer
from .scripted import MODEL

ASK: Any = {"prompt": "the sea is wide", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(i), random_tensors(seed=i)) for i in range(3)]


@pytest.fixture(scope="module")
def _server(_start: StartServer) -> RunningServer:
    return _start(base=SPEC.to_json(), max_adapters=2, allow_runtime_lora=True, latency_s=0.002)


@pytest.fixture
def lora_server(_server: RunningServer) -> Iterator[RunningServer]:
    """A server without adapters."""
    yield _server
    for model in _models(_server)[1:]:
        assert unload(_server, model["id"]).status_code == 200


@pytest.fixture
def client(lora_server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{lora_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body)


def load(server: RunningServer, name: str, folder: Path, **more: Any) -> httpx.Response:
    return post(server, "load_lora_adapter", lora_name=name, lora_path=str(folder), **more)


def unload(server: RunningServer, name: str) -> httpx.Response:
    return post(server, "unload_lora_adapter", lora_name=name)


def test_requests_pick_an_adapter_by_model(
    lora_server: RunningServer, client: OpenAI, folders: list[Path]
) -> None:
    assert load(lora_server, "one", folders[0]).status_code == 200
    assert load(lora_server, "two", folders[1]).status_code == 200
    base, *adapters = client.models.list().data
    assert (base.id, base.parent, base.root) == (MODEL, None, MODEL)  # type: ignore[attr-defined]
    found = [(each.id, each.parent, each.root) for each in adapters]  # type: ignore[attr-defined]
    assert found == [("one", MODEL, str(folders[0])), ("two", MODEL, str(folders[1]))]
    assert client.models.retrieve("two") == adapters[1]
    texts = {}
    for model in (MODEL, "one", "two"):
        done = client.completions.create(model=model, **ASK)
        assert done.model == model
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        assert not done.usage.prompt_tokens_details.cached_tokens  # no other's K/V
        texts[model] = done.choices[0].text
    assert len(set(texts.values())) == 3
    for model, text in texts.items():  # in one batch with others
        chunks = client.completions.create(model=model, stream=True, n=2, **ASK)
        pieces = [(each.model, each.choices[0].index, each.choices[0].text) for each in chunks]
        assert {name for name, _, _ in pieces} == {model}
        for index in range(2):
            assert "".join(piece for _, at, piece in pieces if at == index) == text
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=3
        )
        assert chat.model == model
    metrics = httpx.get(f"{lora_server.url}/metrics").text
    assert 'onnxport:lora_requests{engine="0",lora_name="two",model_name="null"} 0.0' in metrics
    assert 'onnxport:lora_adapters{engine="0",model_name="null"} 2.0' in metrics
    assert lora_server.health()["engine"]["adapter_requests"] == {"one": 0, "two": 0}


def test_an_unloaded_adapter_is_unknown_at_once_and_its_requests_end_in_order(
    lora_server: RunningServer, client: OpenAI, folders: list[Path]
) -> None:
    long: Any = {**ASK, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    load(lora_server, "one", folders[0])
    expected = client.completions.create(model="one", **long).choices[0].text
    texts: list[str] = []
    started = threading.Event()

    def ask() -> None:
        for chunk in client.completions.create(model="one", stream=True, **long):
            started.set()
            texts.append(chunk.choices[0].text)

    thread = threading.Thread(target=ask)
    thread.start()
    assert started.wait(10)
    assert load(lora_server, "one", folders[1], load_inplace=True).status_code == 200
    other = client.completions.create(model="one", **ASK).choices[0].text
    assert not expected.startswith(other)
    assert unload(lora_server, "one").status_code == 200
    with pytest.raises(openai.NotFoundError, match=r"'one' is not served here.*'null'"):
        client.completions.create(model="one", **ASK)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("one")
    assert thread.is_alive()
    thread.join()
    assert "".join(texts) == expected


def test_the_name_says_what_is_unloaded(lora_server: RunningServer, folders: list[Path]) -> None:
    """vLLM's field for a number beside it is known, and needs the name as there."""
    assert load(lora_server, "a", folders[0]).status_code == 200
    assert post(lora_server, "unload_lora_adapter", lora_int_id=1).status_code == 400
    named = post(lora_server, "unload_lora_adapter", lora_name="a", lora_int_id=1)
    assert named.status_code == 200, named.text
    assert [each["id"] for each in _models(lora_server)] == [MODEL]


def test_what_is_refused(lora_server: RunningServer, folders: list[Path], tmp_path: Path) -> None:
    def refused(answer: httpx.Response, status: int) -> str:
        assert answer.status_code == status, answer.text
        message: str = answer.json()["error"]["message"]
        return message

    assert "not a folder here" in refused(load(lora_server, "a", tmp_path / "none"), 404)
    big = write_adapter(tmp_path / "big", random_tensors(rank=17), r=17)
    assert "up to 16" in refused(load(lora_server, "a", big), 400)
    assert "name of the model itself" in refused(load(lora_server, MODEL, folders[0]), 400)
    assert "no adapter 'a' is loaded" in refused(unload(lora_server, "a"), 404)
    assert load(lora_server, "a", folders[0]).status_code == 200
    assert "is_3d_lora_weight" in refused(
        load(lora_server, "b", folders[1], is_3d_lora_weight=True), 400
    )
    assert "is loaded already" in refused(load(lora_server, "a", folders[1]), 400)
    plain = load(lora_server, "b", folders[1], is_3d_lora_weight=False)
    assert plain.status_code == 200
    assert plain.text.startswith("Success")  # as clients of vLLM look for
    full = load(lora_server, "c", folders[2])
    assert "all 2 slots" in refused(full, 400)
    assert full.json()["error"]["code"] is None  # not that of a context that is too long
    assert "lora_name" in refused(post(lora_server, "load_lora_adapter", lora_path="x"), 400)
    assert "lora_path" in refused(post(lora_server, "load_lora_adapter", lora_name="x"), 400)
    assert "lora_name" in refused(unload(lora_server, ""), 400)
    assert "unknown field" in refused(load(lora_server, "c", folders[2], rank=8), 400)
    assert [each["id"] for each in _models(lora_server)] == [MODEL, "a", "b"]


def test_a_server_that_was_not_told_to_reads_no_folders(
    server: RunningServer, folders: list[Path]
) -> None:
    for answer in (load(server, "a", folders[0]), unload(server, "a")):
        assert answer.status_code == 403
        assert "--allow-runtime-lora" in answer.json()["error"]["message"]
    assert [each["id"] for each in _models(server)] == [MODEL]


def _models(server: RunningServer) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = httpx.get(f"{server.url}/v1/models").json()["data"]
    return models


# llama.cpp's way: adapters by number, and what each is times.


def scaled(server: RunningServer, path: str = "completion", **fields: Any) -> httpx.Response:
    body = {"prompt": ASK["prompt"], "temperature": 0, "n_predict": 12, **fields}
    return httpx.post(f"{server.url}/{path}", json=body)


def scales(server: RunningServer, *several: float) -> httpx.Response:
    body = [{"id": place, "scale": scale} for place, scale in enumerate(several)]
    return httpx.post(f"{server.url}/lora-adapters", json=body)


@pytest.fixture(scope="module")
def two_adapters(_start: StartServer, folders: list[Path]) -> RunningServer:
    """A server of its own: numbers are those of all that were ever loaded."""
    server = _start(base=SPEC.to_json(), max_adapters=3, allow_runtime_lora=True)
    for name, folder in zip(("one", "two"), folders, strict=False):
        assert load(server, name, folder).status_code == 200
    return server


def test_scales_of_a_request(two_adapters: RunningServer) -> None:
    """Of completions by any API, and of chats."""
    server = two_adapters
    told = httpx.get(f"{server.url}/lora-adapters").json()
    assert [(one["id"], one["scale"]) for one in told] == [(0, 0.0), (1, 0.0)]
    assert told[0].keys() == {"id", "path", "scale", "task_name", "prompt_prefix"}
    mix = [{"id": 1, "scale": 0.5}, {"id": 0, "scale": 2}]
    cases: dict[str, list[dict[str, Any]]] = {
        "mix": mix,
        "same": mix[::-1],
        "other": [{"id": 1, "scale": 0.25}, {"id": 0, "scale": 2}],
        "one": [{"id": 0, "scale": 1}, {"id": 1, "scale": 0}],
        "none": [{"id": 0, "scale": 0}],
        "nothing": [],
    }
    answers = {name: scaled(server, lora=lora).json() for name, lora in cases.items()}
    texts = {name: answer["content"] for name, answer in answers.items()}
    assert texts["mix"] == texts["same"]
    assert len({texts[name] for name in ("mix", "other", "one", "none")}) == 4
    assert texts["none"] == texts["nothing"]
    assert answers["mix"]["model"] == MODEL
    assert answers["mix"]["generation_settings"]["lora"] == [
        {"id": 1, "scale": 0.5},
        {"id": 0, "scale": 2.0},
    ]
    assert (
        post(server, "completions", model="one", **ASK).json()["choices"][0]["text"]
        == (texts["one"])
    )
    body = {**ASK, "lora": mix}
    assert post(server, "completions", **body).json()["choices"][0]["text"] == texts["mix"]
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "the sea"}],
        "temperature": 0,
        "max_tokens": 12,
    }
    said = [
        post(server, "chat/completions", **chat, lora=lora).json()["choices"][0]["message"]
        for lora in (mix, mix[::-1], [])
    ]
    assert said[0] == said[1] != said[2]


def test_scales_of_all_requests(two_adapters: RunningServer) -> None:
    server = two_adapters
    bare = scaled(server).json()["content"]
    own = scaled(server, lora=[{"id": 0, "scale": 0.5}]).json()["content"]
    answer = scales(server, 0.5, 0.0)
    assert (answer.status_code, answer.json()) == (200, {"success": True})
    told = httpx.get(f"{server.url}/lora-adapters").json()
    assert [one["scale"] for one in told] == [0.5, 0.0]
    assert scaled(server).json()["content"] == own != bare
    assert scaled(server, lora=[{"id": 0, "scale": 0}]).json()["content"] == bare
    named = post(server, "completions", model="one", **ASK).json()["choices"][0]["text"]
    assert named == scaled(server, lora=[{"id": 0, "scale": 1}]).json()["content"]
    assert scales(server).json() == {"success": True}
    assert scaled(server).json()["content"] == bare


def test_numbers_go_with_their_adapters(two_adapters: RunningServer, folders: list[Path]) -> None:
    server = two_adapters
    bare = scaled(server).json()["content"]
    for number in (2, 3):
        assert load(server, "three", folders[2]).status_code == 200
        assert httpx.get(f"{server.url}/lora-adapters").json()[-1]["id"] == number
        body = [{"id": number, "scale": 1.5}]
        assert httpx.post(f"{server.url}/lora-adapters", json=body).status_code == 200
        assert scaled(server).json()["content"] != bare
        assert unload(server, "three").status_code == 200
        assert scaled(server).json()["content"] == bare


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ([{"id": 2, "scale": 1}], "the adapters that are loaded have 0 (one), 1 (two)"),
        ([{"id": 0, "scale": 1}, {"id": 0, "scale": 2}], "has the id 0 twice"),
        ([{"id": 0}], "scale"),
        ([{"id": -1, "scale": 1}], "id"),
        ([{"id": 0, "scale": 1e9}], "scale"),
        ([{"id": 0, "scale": 1, "name": "x"}], "name"),
        ({"id": 0, "scale": 1}, "lora"),
    ],
)
def test_scales_that_mean_nothing(two_adapters: RunningServer, lora: Any, words: str) -> None:
    answer = scaled(two_adapters, lora=lora)
    assert answer.status_code == 400
    assert words in answer.text
    assert httpx.post(f"{two_adapters.url}/lora-adapters", json=lora).status_code == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [({}, "valid list"), ([{"id": 0, "scale": 0}] * 257, "at most 256 items")],
)
def test_what_is_no_list_of_scales(two_adapters: RunningServer, body: Any, words: str) -> None:
    answer = httpx.post(f"{two_adapters.url}/lora-adapters", json=body)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message[:10]) == (400, "the body: ")
    assert words in message


def test_a_model_and_scales(two_adapters: RunningServer) -> None:
    answer = scaled(two_adapters, model="one", lora=[{"id": 1, "scale": 0.5}])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora")
    assert "model names the adapter 'one'" in answer.text


def test_whoever_runs_the_server_keeps_the_scales(server: RunningServer) -> None:
    answer = scales(server)
    assert answer.status_code == 403
    assert "--lora-scaled" in answer.text
    assert httpx.get(f"{server.url}/lora-adapters").json() == []


# aLoRAs, which begin at their invocation.

INVOCATIONS: dict[str, list[int]] = {"one": [40, 41], "two": [42, 43]}
CONTEXT = "the sea is wide, and the land is far away; "


@pytest.fixture
def aloras(lora_server: RunningServer, tmp_path: Path) -> RunningServer:
    for seed, (name, told) in enumerate(INVOCATIONS.items()):
        tensors = random_tensors(seed=seed)
        folder = write_adapter(tmp_path / name, tensors, alora_invocation_tokens=told)
        assert load(lora_server, name, folder).status_code == 200
    return lora_server


def spelled(server: RunningServer) -> list[str]:
    """The texts of the invocations, as the server tells them."""
    listed = httpx.get(f"{server.url}/lora-adapters").json()
    return [one["alora_invocation_string"] for one in listed]


def test_what_is_told_of_aloras(aloras: RunningServer) -> None:
    listed = httpx.get(f"{aloras.url}/lora-adapters").json()
    assert [one["alora_invocation_tokens"] for one in listed] == [*INVOCATIONS.values()]
    for text, tokens in zip(spelled(aloras), INVOCATIONS.values(), strict=True):
        asked = httpx.post(f"{aloras.url}/detokenize", json={"tokens": tokens})
        assert asked.json()["content"] == text


def test_aloras_share_the_models_cache(aloras: RunningServer, folders: list[Path]) -> None:
    """By texts, token ids and chats; where no invocation is, the model answers alone."""
    calls = spelled(aloras)

    def completed(model: str, prompt: Any) -> tuple[str, int]:
        ask = {**ASK, "prompt": prompt}
        answer = post(aloras, "completions", model=model, **ask).json()
        details = answer["usage"]["prompt_tokens_details"] or {}
        return answer["choices"][0]["text"], details.get("cached_tokens", 0)

    plain = completed(MODEL, CONTEXT + calls[0])[0]
    changed, cached = completed("one", CONTEXT + calls[0])
    assert changed != plain
    assert cached == 32  # of 43 before the invocation, in blocks of 16
    body = {"prompt": CONTEXT + calls[0]}
    ids = httpx.post(f"{aloras.url}/tokenize", json=body).json()["tokens"]
    assert completed("one", ids)[0] == changed
    assert completed("two", CONTEXT + calls[1])[1] == 32
    assert completed("one", CONTEXT + calls[1])[0] == completed(MODEL, CONTEXT + calls[1])[0]

    def said(model: str, content: str) -> str:
        chat: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
        chat["messages"] = [{"role": "user", "content": content}]
        answer = post(aloras, "chat/completions", model=model, **chat).json()
        return str(answer["choices"][0]["message"]["content"])

    assert said("one", CONTEXT + calls[0]) != said(MODEL, CONTEXT + calls[0])
    assert said("one", CONTEXT) == said(MODEL, CONTEXT)
    assert load(aloras, "two", folders[1], load_inplace=True).status_code == 200
    assert completed("two", CONTEXT + calls[0])[1] == 0  # a LoRA shares nothing


def test_sums_with_aloras(aloras: RunningServer) -> None:
    listed = httpx.get(f"{aloras.url}/lora-adapters").json()
    lora = [{"id": one["id"], "scale": 1} for one in listed]
    answer = scaled(aloras, lora=lora)
    assert answer.status_code == 400
    assert "begin at different tokens" in answer.json()["error"]["message"]
    prompt = CONTEXT + spelled(aloras)[0]
    texts = [
        scaled(aloras, prompt=prompt, lora=[{"id": lora[0]["id"], "scale": scale}]).json()[
            "content"
        ]
        for scale in (0, 0.5, 1)
    ]
    assert len(set(texts)) == 3
