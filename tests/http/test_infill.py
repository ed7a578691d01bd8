"""`/infill` as llama.cpp's editors ask for it, and `suffix` of `/v1/completions`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.errors import RequestError
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.infill import InfillRequest
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

from .fake import Client, FakeEngine
from .scripted import write_tokenizer

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio]
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PROJECT = ("<|repo_name|>", "<|file_sep|>")
HEAD = "<|repo_name|>myproject\n<|file_sep|>"
EDITOR: dict[str, Any] = {  # of llama.vim and llama.vscode
    **{"id_slot": 0, "n_predict": 128, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9},
    **{"samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True},
    **{"t_max_prompt_ms": 500, "t_max_predict_ms": 1000},
    "input_extra": [{"text": "import os\n", "time": [1730000000, 5], "filename": "a.py"}],
    "response_fields": [
        *("content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"),
    ],
}
WARMING: dict[str, Any] = {  # what they send beforehand, so that the texts are cached
    **{"id_slot": 0, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0},
    **{"temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True},
    **{"t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""]},
    "input_extra": [{"text": "x = 1\n", "filename": "b.py", "time": 1}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("coder")
    write_tokenizer(found, tags=(*QWEN, *PROJECT))
    return found


def client(folder: Path, *answers: str, options: AppOptions | None = None) -> Client:
    engine = FakeEngine(Tokenizer.from_folder(folder, frozenset()), answers or ("ok",))
    return Client(engine, folder, options)


def read(asking: Client) -> str:
    """The last prompt, as text."""
    asked = asking.engine.asked[-1].prompt
    return asking.engine.tokenizer.decode(asked, skip_special_tokens=False)


async def fill(asking: Client, **fields: Any) -> httpx.Response:
    return await asking.post(
        "/infill", **{"input_prefix": "def f():\n", "input_suffix": "\nf()\n", **fields}
    )


async def told(asking: Client, **fields: Any) -> dict[str, Any]:
    response = await fill(asking, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_an_editor_s_request(folder: Path) -> None:
    asking = client(folder, "pass")
    found = await told(asking, prompt="    ", **EDITOR)
    assert found == {
        "content": "pass",
        "timings/prompt_n": found["timings/prompt_n"],
        "timings/predicted_ms": 0.0,
        "truncated": False,
        "tokens_cached": 0,
    }
    assert read(asking) == (
        f"{HEAD}a.py\nimport os\n<|file_sep|>filename\n"
        "<|fim_prefix|>def f():\n    <|fim_suffix|>\nf()\n<|fim_middle|>"
    )
    params = asking.engine.asked[-1].params
    ends = {asking.engine.tokenizer.token_to_id(one) for one in (*QWEN, *PROJECT, "<|im_end|>")}
    assert {*params.stop_token_ids} == ends
    assert params == SamplingParams(
        **{"top_k": 40, "top_p": 0.9, "infill": True, "max_tokens": 128},  # type: ignore[arg-type]
        stop_token_ids=params.stop_token_ids,
    )


async def test_defaults_that_the_samplers_leave_out(folder: Path) -> None:
    """The model's authors may prefer a temperature and a penalty; editors list neither."""
    from onnxport.serving.defaults import SamplingDefaults

    defaults = SamplingDefaults(temperature=0.7, repetition_penalty=1.05, top_k=20)
    asking = client(folder, options=AppOptions(defaults))
    await told(asking, **EDITOR)
    params = asking.engine.asked[-1].params
    assert (params.temperature, params.repetition_penalty, params.top_k) == (1.0, 1.0, 40)


async def test_a_request_that_only_fills_the_cache(folder: Path) -> None:
    asking = client(folder)
    assert await told(asking, **WARMING) == {}
    one = asking.engine.asked[-1]
    assert (one.options.only_prompt, one.params.max_tokens) == (True, 1)
    assert read(asking).startswith(f"{HEAD}b.py\nx = 1\n<|file_sep|>filename\n<|fim_prefix|>")
    whole = {**WARMING, "response_fields": None, "return_tokens": True, "n_probs": 1}
    found = await told(asking, **whole)
    assert (found["content"], found["tokens"], found["tokens_predicted"]) == ("", [], 0)
    assert (found["stop_type"], found["generation_settings"]["n_predict"]) == ("limit", 0)
    assert "completion_probabilities" not in found
    response = await fill(asking, **{**whole, "stream": True})
    [event, end] = response.text.split("\n\n")
    assert (json.loads(event.removeprefix("data: "))["stop"], end) == (True, "")


async def test_a_stream_and_the_prompt_that_was_read(folder: Path) -> None:
    asking = client(folder, "ab")
    response = await fill(asking, stream=True, n_predict=9)
    *pieces, last = [json.loads(one[6:]) for one in response.text.split("\n\n")[:-1]]
    assert "".join(one["content"] for one in pieces) == "ab"
    assert last["prompt"] == read(asking)
    assert last["stop"]


async def test_lines_end_an_answer(folder: Path) -> None:
    asking = client(folder, "a\n    b\n  c\n    d")
    found = await told(asking, n_indent=4)
    assert (found["content"], found["stop_type"]) == ("a\n    b\n  ", "limit")
    assert found["has_new_line"]
    settings = found["generation_settings"]
    assert (settings["n_indent"], settings["t_max_predict_ms"]) == (4, None)
    assert (await told(asking, n_indent=0))["content"] == "a\n    b\n  c\n    d"
    response = await fill(asking, n_indent=4, stream=True)
    events = [json.loads(one[6:]) for one in response.text.split("\n\n")[:-1]]
    assert "".join(one["content"] for one in events) == "a\n    b\n  "
    assert (await told(asking, t_max_predict_ms=-1))["content"] == "a\n    b\n  c\n    d"


async def test_several_answers(folder: Path) -> None:
    asking = client(folder, "a", "b")
    response = await fill(asking, n_cmpl=2)
    assert [(one["index"], one["content"]) for one in response.json()] == [(0, "a"), (1, "b")]


async def test_what_has_no_room(folder: Path) -> None:
    """The editor is told; what is nearest to the gap stays."""
    asking = client(folder)
    longest = asking.engine.capabilities.max_model_len
    extras = [{"text": "x" * longest}, {"text": "near\n"}]
    found = await told(asking, input_extra=extras, n_predict=16)
    assert found["truncated"]
    assert read(asking).startswith(f"{HEAD}tmp\nnear\n<|file_sep|>filename\n")
    long = {"input_prefix": "p" * longest + "!", "input_suffix": "?" + "s" * longest}
    found = await told(asking, n_predict=16, **long)
    assert found["truncated"]
    prompt = asking.engine.asked[-1].prompt
    assert len(prompt) == longest - 16
    assert "!<|fim_suffix|>?" in read(asking)
    for fields, size in (
        ({"n_predict": -1}, longest - longest // 4),
        ({"n_predict": 0}, longest),
    ):
        await told(asking, **long, **fields)
        assert len(asking.engine.asked[-1].prompt) == size
    response = await fill(asking, n_predict=longest - 3)
    assert response.status_code == 400
    assert "hold it together" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": None}, "input_suffix"),
        ({"input_prefix": [1]}, "input_prefix"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"input_extra": "a"}, "input_extra"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
        ({"input_extra": [{"text": "a", "mode": 5}]}, "input_extra.0.mode"),
        ({"samplers": ["infill", "top_k"], "top_k": 4}, "samplers"),
        ({"n_indent": "4"}, "n_indent"),
        ({"n_predict": -2}, "n_predict"),
    ],
)
async def test_what_is_refused(folder: Path, fields: dict[str, Any], param: str) -> None:
    response = await fill(client(folder), **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_both_are_needed(folder: Path) -> None:
    for name in ("input_prefix", "input_suffix"):
        response = await client(folder).post("/infill", **{name: "a"})
        assert response.status_code == 400
        assert response.json()["error"]["param"] != name
    assert not InfillRequest.neutral.keys() & InfillRequest.model_fields.keys()


async def test_a_model_that_cannot(model_folder: Path) -> None:
    asking = client(model_folder)
    response = await fill(asking)
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"
    assert "--infill-tokens" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"
    response = await asking.complete(suffix="b")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")
    assert "--infill-tokens" in response.json()["error"]["message"]


async def test_tokens_by_hand(model_folder: Path) -> None:
    names = {"prefix": "<|say|>", "suffix": "<|over|>", "middle": "<|im_start|>"}
    asking = client(model_folder, options=AppOptions(infill_tokens=names, spm_infill=True))
    await told(asking)
    assert read(asking).endswith("<|over|>\nf()\n<|say|>def f():\n<|im_start|>")
    with pytest.raises(RequestError, match="no token '<x>'"):
        client(model_folder, options=AppOptions(infill_tokens={**names, "middle": "<x>"}))
    with pytest.raises(RequestError, match="lack suffix"):
        AppOptions(infill_tokens={"prefix": "a"})


async def test_keys(folder: Path) -> None:
    asking = client(folder, options=AppOptions(api_keys=("secret",)))
    assert (await fill(asking)).status_code == 401
    response = await asking.post("/infill", "secret", input_prefix="a", input_suffix="b")
    assert response.status_code == 200


async def test_a_suffix_of_a_completion(folder: Path) -> None:
    asking = client(folder, "mid")
    response = await asking.complete("begin ", suffix=" end", max_tokens=5)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == "mid"
    assert read(asking) == "<|fim_prefix|>begin <|fim_suffix|> end<|fim_middle|>"
    middle = asking.engine.tokenizer.token_to_id(QWEN[2])
    assert middle in asking.engine.asked[-1].params.stop_token_ids
    response = await asking.complete(["a", "b"], suffix="c", stream=True, ignore_eos=True)
    assert response.status_code == 200
    assert read(asking) == "<|fim_prefix|>b<|fim_suffix|>c<|fim_middle|>"
    assert asking.engine.asked[-1].params.stop_token_ids == ()
    for none in ("", None):
        assert (await asking.complete("a", suffix=none)).status_code == 200
        assert read(asking) == "a"
    for fields, param in (
        ({"prompt": [1, 2]}, "suffix"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"suffix": 5}, "suffix"),
    ):
        response = await asking.complete(**{"prompt": "a", "suffix": "b", **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    long = "x" * (asking.engine.capabilities.max_model_len * 40)
    response = await asking.complete("a", suffix=long)
    assert response.status_code == 400


async def test_a_running_server(start_server: Any) -> None:
    """The scripted model says what stands behind its tag, after what follows the other one."""
    names = {"prefix": "<|say|>", "suffix": "<|over|>", "middle": "<|im_end|>"}
    server = start_server(infill_tokens=names)
    shared = {"input_suffix": "", "n_predict": 40, "samplers": ["top_k", "top_p", "infill"]}

    def ask(prefix: str, **fields: Any) -> dict[str, Any]:
        body = {**shared, "input_prefix": prefix, **fields}
        response = httpx.post(f"{server.url}/infill", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    found = ask("-abc")  # the token that begins the answer counts as one
    assert (found["content"], found["stop_type"]) == ("abc", "eos")
    assert ask("-a", prompt="bc")["content"] == "abc"
    assert ask("-x<|over|>y<|im_end|>z")["content"] == "x<|over|>y<|im_end|>z"
    found = ask("-a\n  b\nc\n  d", n_indent=2)
    assert (found["content"], found["stop_type"]) == ("a\n  b\n", "limit")
    server.wait_for(num_requests_running=0)
    assert ask("-abc", n_predict=0)["content"] == ""
    assert ask("-abc", n_predict=0, prompt="x" * 64)["tokens_cached"] == 0
    assert ask("-abc", n_predict=0, prompt="x" * 64)["tokens_cached"] > 0
