"""`onnxport serve`: from an artifact or a checkpoint to answers over HTTP."""

from __future__ import annotations

import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from onnxport.cli import main
from onnxport.cli.cache import cached_artifact, is_artifact
from onnxport.cli.serve import kv_tokens
from onnxport.exporter.options import ExportOptions
from onnxport.providers.null import NullModel, NullOptions
from tests.waiting import PATIENCE_S

from .conftest import SMALL, command, onnxport, serving, write_checkpoint


def test_a_cache_with_windows_holds_at_least_what_fits_for_certain() -> None:
    limits = NullModel(NullOptions(num_blocks=9, block_size=16)).capabilities
    assert kv_tokens(replace(limits, windows=(None,))) == "144 tokens"
    assert kv_tokens(replace(limits, windows=(None, 20))) == "at least 64 tokens"
    assert kv_tokens(replace(limits, windows=(20,))) == "at least 144 tokens"


def test_an_artifact(artifact: Path) -> None:
    with (
        serving(artifact, "--provider", "cpu") as (address, said),
        OpenAI(base_url=f"{address}/v1", api_key="unused") as client,
    ):
        assert "Serving tiny on" in said[-1]
        assert any("nodes: CPUExecutionProvider" in line for line in said)
        assert any("reasoning parser auto: no reasoning is told" in line for line in said)
        messages: Any = [{"role": "user", "content": "hello"}]
        ask = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 6}
        whole = client.chat.completions.create(**ask)
        assert whole.usage.completion_tokens <= 6
        chunks = list(client.chat.completions.create(stream=True, **ask))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole.choices[0].message.content
        health = httpx.get(f"{address}/health").json()
        assert health["provider"] == "cpu"
        assert set(health["placement"]) == {"CPUExecutionProvider"}


@pytest.mark.slow
def test_a_provider_that_cannot_be_used_and_one_that_may_take_over(artifact: Path) -> None:
    missing = ("--provider", "openvino:nowhere")
    few = (*missing, *SMALL[2:], "--max-tokens", "8")
    done = onnxport("generate", artifact, "ab", *few)
    assert (done.returncode, done.stdout) == (1, "")
    with serving(artifact, *missing, "--fallback", "cpu") as (address, said):
        assert any("openvino:nowhere cannot be used" in line for line in said)
        assert any("cpu is tried instead" in line for line in said)
        body = httpx.get(f"{address}/health").json()
    [loss] = body["losses"]
    assert (body["status"], body["provider"], loss["provider"]) == ("ok", "cpu", "openvino:nowhere")
    assert loss["device"] is None
    done = onnxport("generate", artifact, "ab", *few, "--fallback", "cpu")
    assert done.returncode == 0
    assert "cpu is tried instead" in done.stderr


@pytest.mark.slow
def test_name_key_and_limits(artifact: Path) -> None:
    limits = ("--max-model-len", "32", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")
    names = ("--served-model-name", "other", "more")
    with serving(artifact, *names, *limits, ONNXPORT_API_KEY="sesame") as (address, said):
        assert "Serving other, more on" in said[-1]
        client = OpenAI(base_url=f"{address}/v1", api_key="sesame", max_retries=0)
        assert [model.id for model in client.models.list().data] == ["other", "more"]
        assert client.completions.create(model="more", prompt="a", max_tokens=1).model == "other"
        done = client.completions.create(model="other", prompt=["ab"] * 5, max_tokens=30)
        assert len(done.choices) == 5
        with pytest.raises(openai.BadRequestError, match="32"):
            client.completions.create(model="other", prompt="ab", max_tokens=31)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="open").models.list()
        client.close()


@pytest.mark.slow
def test_a_checkpoint_is_exported_once(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    options = ("--precision", "int8", "--group-size", "32")
    for number in range(2):
        with serving(checkpoint, *options, ONNXPORT_CACHE=str(cache)) as (address, said):
            assert ("is exported first" in said[0]) == (number == 0)
            assert httpx.get(f"{address}/v1/models").json()["data"][0]["id"] == "tiny"
    assert len(list(cache.glob("tiny-*/manifest.json"))) == 1


def test_what_changes_the_export_changes_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    monkeypatch.setenv("ONNXPORT_CACHE", str(tmp_path / "cache"))
    source = str(checkpoint)
    first = cached_artifact(source, ExportOptions())
    written = first.stat().st_mtime_ns
    assert cached_artifact(source, ExportOptions(overwrite=True, threads=1)) == first
    assert first.stat().st_mtime_ns == written
    shorter = cached_artifact(source, ExportOptions(context_length=64))
    (checkpoint / "generation_config.json").write_text("{}")
    changed = cached_artifact(source, ExportOptions())
    assert len({first, shorter, changed}) == 3
    assert all(is_artifact(str(folder)) for folder in (first, shorter, changed))


@pytest.mark.slow
def test_servers_that_start_together_export_once(checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    exports: list[bool] = []

    def start() -> None:
        with serving(checkpoint, ONNXPORT_CACHE=str(cache)) as (_, said):
            exports.append(any("is exported first" in line for line in said))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(exports) == [False, True]


def test_a_cache_that_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = onnxport("serve", checkpoint, *SMALL, ONNXPORT_CACHE=str(tmp_path / "file" / "cache"))
    assert done.returncode == 1
    assert "ONNXPORT_CACHE" in done.stderr


def test_a_port_in_use_is_told_before_anything_is_loaded(artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = onnxport("serve", artifact, "--port", str(port))
        assert done.returncode == 1
        assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr


@pytest.mark.slow
def test_several_keys_a_queue_and_deadlines(artifact: Path) -> None:
    limits = ("--max-num-seqs", "1", "--max-queued-requests", "6", "--scheduling-policy", "fair")
    ask: Any = {"model": "tiny", "prompt": "ab", "max_tokens": 30}
    with (
        serving(artifact, *limits, ONNXPORT_API_KEY="sesame,simsim") as (address, said),
        OpenAI(base_url=f"{address}/v1", api_key="sesame", max_retries=0) as client,
    ):
        for key in ("sesame", "simsim"):
            one = client.with_options(api_key=key)
            assert one.completions.create(**ask, extra_body={"priority": 2}).usage
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sesame,simsim").models.list()
        with pytest.raises(openai.BadRequestError, match="4 prompts, and this server lets 3 wait"):
            client.completions.create(**ask | {"prompt": ["ab"] * 4})
        assert len(client.completions.create(**ask | {"prompt": ["ab"] * 3}).choices) == 3
        assert "sesame" not in httpx.get(f"{address}/metrics").text + "".join(said)
        late = {"extra_body": {"timeout_s": 0.0001, "ignore_eos": True}}
        with pytest.raises(openai.InternalServerError, match=r"0\.0001 seconds") as ended:
            client.completions.create(**ask, **late)
        assert ended.value.status_code == 504


@pytest.mark.slow
def test_a_deadline_for_all(artifact: Path) -> None:
    with serving(artifact, "--request-timeout", "0.0001") as (address, _):
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 30, "ignore_eos": True}
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 504
        later = httpx.post(f"{address}/v1/completions", json=body | {"timeout_s": 3600})
        assert later.json()["usage"]["completion_tokens"] == 30


@pytest.mark.slow
def test_what_was_computed_is_found_again_in_another_run(artifact: Path, tmp_path: Path) -> None:
    options = ("--kv-disk", tmp_path / "kv", "--kv-disk-size", "64MiB", "--kv-host-memory", "8MiB")
    body = {"model": "tiny", "prompt": "The same prompt, over and over. " * 3, "max_tokens": 8}
    texts, cached = [], []
    for _ in range(2):
        with serving(artifact, *options) as (address, _):
            for _ in range(2):
                done = httpx.post(f"{address}/v1/completions", json=body | {"temperature": 0})
                texts.append(done.json()["choices"][0]["text"])
                cached.append(done.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            stats = httpx.get(f"{address}/health").json()["engine"]
    assert cached[0] == 0
    assert min(cached[1:]) > 0
    assert len(set(texts)) == 1
    assert stats["num_blocks_loaded"] > 0
    assert stats["num_tier_errors"] == 0


@pytest.mark.slow
def test_without_a_prefix_cache(artifact: Path) -> None:
    body = {"model": "tiny", "prompt": "The same prompt, over and over. " * 3, "max_tokens": 1}
    with serving(artifact, "--no-enable-prefix-caching") as (address, _):
        for _ in range(2):
            done = httpx.post(f"{address}/v1/completions", json=body).json()
            assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        metrics = httpx.get(f"{address}/metrics").text
        assert 'enable_prefix_caching="False",engine="0",model_name="tiny",num_gpu' in metrics


@pytest.mark.slow
def test_what_requests_do_not_say(artifact: Path, tmp_path: Path) -> None:
    """Sampling, the seed, and the chat template are the server's."""
    file = tmp_path / "own.jinja"
    file.write_text("{{ mood }}")
    options = ("--seed", "3", "--chat-template", file)
    kwargs = ("--default-chat-template-kwargs", '{"mood": "calm"}')
    body: Any = {"model": "tiny", "prompt": "ab", "max_tokens": 30, "ignore_eos": True}
    texts = []
    for more in ((), (), ("--override-generation-config", '{"temperature": 0}')):
        with serving(artifact, *options, *kwargs, *more) as (address, said):
            for _ in range(2):
                done = httpx.post(f"{address}/v1/completions", json=body).json()
                texts.append(done["choices"][0]["text"])
            chat, text = (
                httpx.post(f"{address}/tokenize", json=each).json()["tokens"]
                for each in ({"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "calm"})
            )
            assert chat == text
            heat = "0," if more else "1.0,"
            assert any(f"are sampled with temperature {heat}" in line for line in said)
    first, second, third, fourth, *greedy = texts
    assert (first, second) == (third, fourth)
    assert first != second
    assert len({first, second, *greedy}) == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--ssl-keyfile gone.pem", "--ssl-keyfile without --ssl-certfile"),
        ("--ssl-certfile gone.pem", "--ssl-certfile gone.pem cannot be read"),
        ("--uds some.sock --port 0", "--uds some.sock was given with --host or --port"),
        ("--uds gone/some.sock", "cannot listen on gone/some.sock"),
    ],
)
def test_where_it_cannot_listen_is_told_before_anything_is_loaded(
    options: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "there/is/no/model", *options.split()]) != 0
    assert reason in capfd.readouterr().err


def test_a_socket_of_a_path(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with subprocess.Popen(
        command("serve", artifact, "--uds", path, *SMALL[2:]), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if "Serving tiny on" in line)
        assert f"Serving tiny on unix:{path} (cpu" in said
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://any/health").json()["model"] == "tiny"
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, path.exists()) == (0, False)
