"""Offline inference in vLLM's shape, on the null provider."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import onnxport
from onnxport.errors import (
    ArtifactError,
    CapacityError,
    OnnxportError,
    ProviderError,
    RequestError,
)
from onnxport.providers.base import LoadOptions
from onnxport.providers.null import NullModel
from onnxport.serving import llm as module
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.config import EngineConfig
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.llm import LLM
from onnxport.serving.outputs import RequestOutput
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.helpers import GREEDY, alone, null_engine
from tests.serving.tokenizers_for_tests import byte_level

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
def llm() -> LLM:
    tokenizer = Tokenizer(byte_level(), frozenset({0}))
    engine = null_engine(vocab_size=tokenizer.vocab_size, tokenizer=tokenizer, num_blocks=128)
    return LLM.from_engine(engine, ChatTemplate({"default": TEMPLATE}))


def ids(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def parameters(llm: LLM, prompts: Any, given: Any) -> list[SamplingParams]:
    """What prompts are run with."""
    found = []
    prepare = llm._engine.prepare

    def noted(name: str, ids: Any, params: SamplingParams, *more: Any) -> Any:
        found.append(params)
        return prepare(name, ids, params, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._engine, "prepare", noted)
        llm.generate(prompts, given)
    return found


def test_it_is_the_public_api() -> None:
    assert onnxport.LLM is LLM
    assert onnxport.SamplingParams is SamplingParams


def test_outputs_are_in_the_order_of_prompts() -> None:
    prompts = [[i + 1, i + 2] for i in range(20)]
    with LLM.from_engine(null_engine()) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
        again = llm.generate({"prompt_token_ids": prompts[3]}, [GREEDY])
    assert [ids(output) for output in outputs] == [alone(prompt) for prompt in prompts]
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert ids(again[0]) == ids(outputs[3])
    assert len({output.request_id for output in [*outputs, *again]}) == 21


def test_an_output_has_all_completions_in_order() -> None:
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=7, n=4)
    prompt = list(range(50, 70))
    with LLM.from_engine(null_engine(max_queued_requests=2)) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 5, params)
    expected = [alone(prompt, params, index) for index in range(4)]
    for output in outputs:
        assert output.finished
        assert [one.index for one in output.outputs] == [0, 1, 2, 3]
        assert [list(one.token_ids) for one in output.outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [0] + [16] * 4


def test_one_output_says_everything(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
    (output,) = llm.generate("the sea", params)
    (completion,) = output.outputs
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert output.prompt == "the sea"
    assert list(output.prompt_token_ids) == tokenizer.encode("the sea")
    assert (output.finished, output.num_cached_tokens) == (True, 0)
    assert completion.text == tokenizer.decode(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.logprobs is not None
    assert [list(entry) for entry in completion.logprobs] == [[i] for i in completion.token_ids]
    times = output.metrics
    assert times.first_token_time_s is not None
    assert times.finished_time_s is not None
    assert times.arrival_time_s <= times.first_token_time_s <= times.finished_time_s


def test_prompts_in_every_form(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 2, 3)]
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    tokens = tokenizer.encode("the sea")
    outputs = llm.generate(["the sea", {"prompt": "the sea"}, {"prompt_token_ids": tokens}], params)
    assert [len(ids(output)) for output in outputs] == [1, 2, 3]
    assert [output.prompt for output in outputs] == ["the sea", "the sea", None]
    assert ids(outputs[2])[:2] == ids(outputs[1])
    assert len(llm.generate("the sea")[0].outputs[0].token_ids) <= 16
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([{"text": "a"}], None, "keys"),
        ([{"prompt": "a", "prompt_token_ids": [1]}], None, "keys"),
        ([3], None, "int"),
        (["a", "b"], [SamplingParams()], "1 sampling_params for 2 prompts"),
        (["a", ""], None, "empty"),
        (["a"], {"max_tokens": 1}, "sampling_params must be SamplingParams"),
        (["a"], 5, "sampling_params must be SamplingParams"),
        (["a", "b"], [SamplingParams(), 3], "sampling_params must be SamplingParams"),
        ([{"prompt_token_ids": "abc"}], None, "prompt_token_ids is str"),
        ([{"prompt_token_ids": b"abc"}], None, "prompt_token_ids is bytes"),
        (["a\ud800"], None, "half of a character"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(
    llm: LLM, prompts: list[object], params: list[SamplingParams] | None, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert llm._engine.stats().prompt_tokens == 0


def test_unknown_keywords_are_errors() -> None:
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        LLM("model", gpu_memory_utilization=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="early_stopping"):
        SamplingParams(early_stopping=True)  # type: ignore[call-arg]


def test_a_folder_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(OnnxportError, match="not an artifact"):
        LLM(tmp_path)


def test_a_failed_request_says_why_and_others_go_on() -> None:
    with LLM.from_engine(null_engine(max_num_seqs=1, fails=lambda run: run == 3)) as llm:
        outputs = llm.generate([{"prompt_token_ids": [i + 1]} for i in range(3)], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "length"]
    assert outputs[0].outputs[0].error == "ProviderError: run 3 was told to fail"
    assert len(ids(outputs[0])) == 3


def test_chat_renders_the_template_and_adds_no_special_tokens(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    (output,) = llm.chat(messages, params)
    assert output.prompt == "user: hello\nassistant:"
    assert ids(output) == ids(llm.generate(output.prompt, params)[0])
    assert [ids(each) for each in llm.chat([messages, messages], params)] == [ids(output)] * 2


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        LLM.from_engine(null_engine()).chat([{"role": "user", "content": "hello"}])


def test_the_models_own_parameters_where_none_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They take the place of a whole `SamplingParams`, and are put into none that is given."""
    monkeypatch.setattr(module, "open_engine", lambda *_, **__: null_engine())
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 1, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    own = SamplingParams(temperature=0.6, top_p=0.95, top_k=1, repetition_penalty=1.1)
    prompt, other = ({"prompt_token_ids": [one, 4, 5]} for one in (3, 6))
    with LLM(tmp_path) as llm:
        assert llm.get_default_sampling_params() == own
        used = parameters(llm, [prompt, other], None)
        assert used == [own, own]
        assert parameters(llm, [prompt, other], [None, GREEDY]) == [own, GREEDY]
        assert parameters(llm, prompt, SamplingParams()) == [SamplingParams()]
        (output,) = llm.generate(prompt)
    assert ids(output) == alone([3, 4, 5], own)
    with LLM(tmp_path, generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with LLM(tmp_path, override_generation_config={"top_k": 5}) as llm:
        assert llm.get_default_sampling_params() == replace(own, top_k=5)
    with LLM.from_engine(null_engine(), defaults=SamplingDefaults(0.5)) as llm:
        assert parameters(llm, prompt, None) == [SamplingParams(temperature=0.5)]


def test_defaults_that_are_not_valid_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'temprature', which is not known"):
        LLM(tmp_path, override_generation_config={"temprature": 1})
    (tmp_path / "generation_config.json").write_text('{"top_p": 2}')
    with pytest.raises(ArtifactError, match='generation_config="none"'):
        LLM(tmp_path)
    with pytest.raises(ArtifactError, match="not an artifact"):
        LLM(tmp_path, generation_config="none")


def test_chat_gives_the_template_its_variables(llm: LLM) -> None:
    source = "{% if thinks is defined and not thinks %}no {% endif %}{{ mood }}:"
    engine = llm._engine
    messages = [{"role": "user", "content": "hello"}]
    llm = LLM.from_engine(engine, ChatTemplate({"default": source}, variables={"mood": "calm"}))
    for given, expected in (
        (None, "calm:"),
        ({"thinks": False}, "no calm:"),
        ({"thinks": True, "mood": "wild"}, "wild:"),
        ({"unknown": 1}, "calm:"),
    ):
        (output,) = llm.chat(messages, GREEDY, chat_template_kwargs=given)
        assert output.prompt == expected
    for wrong, words in (({"tools": []}, "which the request itself sets"), ({1: 2}, "name 1")):
        with pytest.raises(RequestError, match=words):
            llm.chat(messages, chat_template_kwargs=wrong)  # type: ignore[arg-type]


def test_an_interruption_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: NullModel, inputs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NullModel, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["the sea", "deep"])
    assert not llm._engine.has_work
    assert len(llm.generate("the sea", SamplingParams(temperature=0, max_tokens=3))) == 1


def test_a_closed_llm_refuses(llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(OnnxportError, match="closed"):
        llm.generate("the sea")


def test_a_progress_bar_is_shown_when_asked(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("the sea")
    assert capsys.readouterr().err == ""
    llm.generate(["the sea", "deep"], use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "one token of every running"),
        ({"max_num_batched_tokens": 10**20}, "max_num_batched_tokens is 1000.*at most 1048576"),
    ],
)
def test_limits_that_make_no_sense_are_refused(config: dict[str, int], words: str) -> None:
    with pytest.raises(CapacityError, match=words):
        EngineConfig(**config)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": "x"}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": (3,)}, "stop"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids"),
    ],
)
def test_parameters_out_of_range_are_refused(params: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_parameters_as_clients_write_them() -> None:
    assert SamplingParams(stop="a").stop == ("a",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    assert SamplingParams(top_k=-1).top_k is None
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"max_num_seqs": "4"},
        {"seed": "x"},
        {"kv_host_memory": "64MiB"},
        {"enable_prefix_caching": "no"},
        {"speculation": {"method": "ngram"}},
    ],
)
def test_limits_of_other_types_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(CapacityError, match=f"{next(iter(given))} is .*; give "):
        EngineConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"threads": "2"},
        {"max_model_len": 10.0},
        {"coarse_head": "no"},
        {"hybrid_kv_cache": 1},
        {"threads": True},
    ],
)
def test_load_options_of_other_types_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ProviderError, match=f"{next(iter(given))} is .*; give "):
        LoadOptions(**given)  # type: ignore[arg-type]


def test_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2
