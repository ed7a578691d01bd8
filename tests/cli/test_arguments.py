"""What options become."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnxport.cli import build_parser, cache, main
from onnxport.cli.application import check_infill, model_names
from onnxport.cli.arguments import load_options
from onnxport.cli.engine_arguments import ENGINE_OPTIONS, engine_config
from onnxport.cli.export import export_options
from onnxport.cli.generate import prompts_of
from onnxport.cli.sampling import sampling_params
from onnxport.cli.structure_arguments import structured_outputs
from onnxport.cli.values import memory, seconds, size
from onnxport.errors import CapacityError, ExportError, RequestError
from onnxport.exporter.options import ExportOptions
from onnxport.serving.config import EngineConfig
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.app import AppOptions
from onnxport.serving.params import SamplingParams
from onnxport.serving.repetition import RepetitionDetection
from onnxport.serving.structured.spec import StructuredOutputs


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("given", "mtp"),
    [
        ((), False),
        (("--mtp",), True),
        (("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'), True),
        (("--speculative-config", '{"method": "mtp", "model": "a"}'), False),
        (("--speculative-config", '{"method": "ngram"}'), False),
    ],
)
def test_a_checkpoint_that_is_to_guess_for_itself_is_exported_so(
    given: tuple[str, ...], mtp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[ExportOptions] = []
    monkeypatch.setattr(cache, "cached_artifact", lambda source, options: asked.append(options))
    cache.find_artifact(parse("serve", str(tmp_path), *given))
    assert asked == [ExportOptions(mtp=mtp)]


def test_an_artifact_gets_no_layer_afterwards(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ExportError, match="is exported already, so --mtp cannot change it"):
        cache.find_artifact(parse("serve", str(tmp_path), "--mtp"))


def test_export_options() -> None:
    assert export_options(parse("export", "a", "b")) == ExportOptions()
    given = ["--precision", "int8", "--head-precision", "same", "--expert-precision", "mxfp4"]
    expected = ExportOptions(precision="int8", head_precision="same", expert_precision="mxfp4")
    assert export_options(parse("export", "a", "b", *given)) == expected
    assert export_options(parse("export", "a", "b", "--asymmetric")).asymmetric
    with pytest.raises(SystemExit):
        parse("export", "a", "b", "--expert-precision", "int4")


def test_a_token_is_for_the_head_or_its_target(tmp_path: Path) -> None:
    """A folder needs none, but the other one may be on the hub."""
    local, more = str(tmp_path), ("--token", "abc")
    for source, target in (("owner/head", local), (local, "owner/model"), ("owner/head", "a/b")):
        options = export_options(parse("export", source, "b", "--target", target, *more))
        assert options.token == "abc"
    with pytest.raises(ExportError, match=f"{local} is a local folder, which needs none"):
        export_options(parse("export", local, "b", *more))
    with pytest.raises(ExportError, match=f"{local} and {local} are local folders, which need"):
        export_options(parse("export", local, "b", "--target", local, *more))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1234", 1234),
        ("7B", 7),
        ("1K", 2**10),
        ("512MiB", 2**29),
        ("8 GiB", 2**33),
        ("2g", 2**31),
        ("2Gi", 2**31),
        ("3GB", 3 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("0.5kb", 500),
        ("2T", 2**41),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected
    assert isinstance(size(text), int)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a size"),
        ("lots", "'lots' is not a size; give bytes, or a unit as in 512MiB"),
        ("-1", "is not a size"),
        ("8 PiB", "is not a size"),
        ("8iB", "is not a size"),
        ("1e9", "is not a size"),
        ("1.5", "part of a byte"),
        ("60%", "is not a size"),
    ],
)
def test_what_is_no_size(text: str, words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=words):
        size(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("60%", 0.6), ("0.6", 0.6), (".25", 0.25), ("100 %", 1.0), ("1.0", 1.0), ("12.5%", 0.125)],
)
def test_shares_of_the_memory(text: str, expected: float) -> None:
    found = memory(text)
    assert (found, type(found)) == (expected, float)


def test_a_size_of_memory() -> None:
    assert (memory("2G"), type(memory("1"))) == (2**31, int)


@pytest.mark.parametrize("text", ["0%", "101%", "1.5", "0.0"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no share of the free memory"):
        memory(text)
    with pytest.raises(argparse.ArgumentTypeError, match="0 bytes"):
        memory("0")


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon"])
def test_what_is_no_time(text: str) -> None:
    assert seconds("0.5") == 0.5
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        seconds(text)


def test_what_is_not_given_is_the_engines_own_default() -> None:
    assert engine_config(parse("serve", "m")) == EngineConfig()
    for command in (["generate", "m", "x"], ["chat", "m"]):
        assert engine_config(parse(*command)) == EngineConfig(embeddings=False)


def test_every_field_of_the_engine_has_an_option() -> None:
    assert set(ENGINE_OPTIONS) == {field.name for field in fields(EngineConfig)}
    serve = vars(parse("serve", "m"))
    assert set(ENGINE_OPTIONS) <= set(serve)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--max-queued-requests 3", {"max_queued_requests": 3}),
        ("--seed 0", {"seed": 0}),
        ("--max-logprobs 0", {"max_logprobs": 0}),
        ("--logprobs-mode processed_logits", {"logprobs_mode": "processed_logits"}),
        ("--max-logprobs -1", {"max_logprobs": None}),
        ("--seed -1", {"seed": None}),
        ("--scheduling-policy fair", {"scheduling_policy": "fair"}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        (
            "--preemption swap --kv-host-memory 1GiB",
            {"preemption": "swap", "kv_host_memory": 2**30},
        ),
        (
            "--kv-disk /somewhere --kv-disk-size 2GB",
            {"kv_disk": Path("/somewhere"), "kv_disk_bytes": 2 * 10**9},
        ),
    ],
)
def test_what_is_given(arguments: str, expected: dict[str, Any]) -> None:
    options = parse("serve", "m", *arguments.split())
    assert engine_config(options) == EngineConfig(**expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--kv-disk-size 1G", "--kv-disk-size was given without --kv-disk"),
        ("--kv-disk d --kv-disk-size 0", "at least 1"),
        ("--preemption swap", "kv_host_memory"),
        ("--no-enable-prefix-caching --kv-host-memory 1G", "enable_prefix_caching"),
    ],
)
def test_contradictions(arguments: str, words: str) -> None:
    with pytest.raises(CapacityError, match=words):
        engine_config(parse("serve", "m", *arguments.split()))


def test_memory_is_for_the_provider() -> None:
    assert load_options(parse("serve", "m", "--kv-memory", "50%")).kv_memory == 0.5
    assert load_options(parse("chat", "m", "--kv-memory", "1GiB")).kv_memory == 2**30
    assert load_options(parse("verify", "m")).kv_memory is None


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "m"],
        ["generate", "m", "x"],
        ["chat", "m"],
        ["verify", "m"],
        ["bench", "latency", "m"],
        ["bench", "throughput", "m"],
    ],
)
def test_a_coarse_head_and_a_hybrid_cache_are_permissions_that_are_given(
    command: list[str],
) -> None:
    assert load_options(parse(*command)).coarse_head
    assert not load_options(parse(*command, "--no-coarse-head")).coarse_head
    assert load_options(parse(*command)).hybrid_kv_cache
    assert not load_options(parse(*command, "--no-hybrid-kv-cache")).hybrid_kv_cache


@pytest.mark.parametrize("command", [["generate", "m", "x"], ["chat", "m"]])
def test_sampling(command: list[str]) -> None:
    neutral = sampling_params(parse(*command, "--max-tokens", "5"), SamplingDefaults())
    assert neutral == SamplingParams(max_tokens=5)
    models = SamplingDefaults(0.6, 0.95, 20, 0.05, 1.1)
    params = sampling_params(parse(*command, "--max-tokens", "5"), models)
    assert params == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=5
    )
    off = "--temperature 0 --top-p 1 --top-k 0 --min-p 0 --repetition-penalty 1 --max-tokens 5"
    params = sampling_params(parse(*command, *off.split()), models)
    assert params == SamplingParams(temperature=0.0, max_tokens=5)
    given = "--min-p 0.1 --repetition-penalty 1.2 --presence-penalty -1 --frequency-penalty 0.5"
    more = "--temperature 0.7 --top-p 0.9 --top-k 5 --seed 3 --max-tokens 5"
    params = sampling_params(parse(*command, *given.split(), *more.split()), models)
    assert params == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        seed=3,
        max_tokens=5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
    )
    with pytest.raises(RequestError, match="min_p is 2"):
        sampling_params(parse(*command, "--min-p", "2"), models)


@pytest.mark.parametrize("command", [["generate", "m", "x"], ["chat", "m"]])
def test_llama_cpp_s_sampling(command: list[str]) -> None:
    given = "--typical-p 0.9 --top-n-sigma 1.5 --xtc-probability 0.5 --xtc-threshold 0.2"
    more = "--dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n 64 "
    more += "--repeat-last-n 32 --dynatemp-range 0.4 --dynatemp-exponent 2 --mirostat 2 "
    more += "--mirostat-tau 4 --mirostat-eta 0.2 --adaptive-target 0.5 --adaptive-decay 0.8"
    options = parse(*command, *given.split(), *more.split(), "--max-tokens", "5")
    assert sampling_params(options, SamplingDefaults(typical_p=0.5)) == SamplingParams(
        typical_p=0.9,
        top_n_sigma=1.5,
        xtc_probability=0.5,
        xtc_threshold=0.2,
        dry_multiplier=0.8,
        dry_base=2.0,
        dry_allowed_length=3,
        dry_penalty_last_n=64,
        repeat_last_n=32,
        dynatemp_range=0.4,
        dynatemp_exponent=2.0,
        mirostat=2,
        mirostat_tau=4.0,
        mirostat_eta=0.2,
        adaptive_target=0.5,
        adaptive_decay=0.8,
        max_tokens=5,
    )
    breakers = ("--dry-sequence-breaker", "a", "--dry-sequence-breaker", "b")
    params = sampling_params(parse(*command, *breakers), SamplingDefaults(typical_p=0.5))
    assert (params.dry_sequence_breakers, params.typical_p) == (("a", "b"), 0.5)
    with pytest.raises(RequestError, match="xtc_probability is 2"):
        sampling_params(parse(*command, "--xtc-probability", "2"), SamplingDefaults())


@pytest.mark.parametrize("command", [["generate", "m", "x"], ["chat", "m"]])
def test_biases_and_answers_that_are_stuck(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--logit-bias", "42-100", "--logit-bias", "7+1.5", "--max-tokens", "5")
    rule = ("--repetition-detection", '{"max_pattern_size": 9, "min_count": 2}')
    params = sampling_params(parse(*command, *given, *rule), SamplingDefaults())
    assert params == SamplingParams(
        logit_bias={7: 1.5, 42: -100.0},
        repetition_detection=RepetitionDetection(9, 0, 2),
        max_tokens=5,
    )
    with pytest.raises(RequestError, match="has the token 7 twice"):
        sampling_params(parse(*command, *given, "--logit-bias", "7+2"), SamplingDefaults())
    with pytest.raises(RequestError, match="logit_bias is 101"):
        sampling_params(parse(*command, "--logit-bias", "7+101"), SamplingDefaults())
    for bad in ("7", "7=1", "+1", "7+", "7-inf", "a+1"):
        with pytest.raises(SystemExit, match="2"):
            parse(*command, "--logit-bias", bad)
        assert f"{bad!r} is no bias" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "m", "x"], ["chat", "m"]])
def test_forms(command: list[str], tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "form.gbnf"
    schema.write_text('{"enum": [1]}')
    grammar.write_text('root ::= "a"')

    def form(*given: str | Path) -> StructuredOutputs | None:
        return structured_outputs(parse(*command, *map(str, given)))

    assert form() is None
    for name in ("--json-schema", "--json-schema-file"):
        for one in (schema, schema.read_text()):
            assert form(name, one) == StructuredOutputs(json=schema.read_text())
    for name in ("--grammar", "--grammar-file"):
        for one in (grammar, grammar.read_text()):
            assert form(name, one) == StructuredOutputs(grammar=grammar.read_text())
    assert form("--regex", "a+") == StructuredOutputs(regex="a+")
    assert form("--choice", "a", "--choice", "b") == StructuredOutputs(choice=("a", "b"))
    with pytest.raises(RequestError, match=r"--grammar names .*, which cannot be read"):
        form("--grammar", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        form("--regex", "a", "--choice", "b")


def test_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("in a file\n\n")
    given = parse("generate", "m", "--max-tokens", "5", "a", "b", "--file", str(file))
    assert prompts_of(given) == ["a", "b", "in a file\n"]
    assert prompts_of(parse("generate", "m", "-f", str(file))) == ["in a file\n"]
    assert prompts_of(parse("generate", "m", "a", "--max-tokens", "5")) == ["a"]
    with pytest.raises(RequestError, match="there is no prompt"):
        prompts_of(parse("generate", "m"))
    with pytest.raises(SystemExit, match="0"):
        parse("generate", "--help")
    assert "MODEL [PROMPT ...]\n" in capsys.readouterr().out  # none of them is required
    with pytest.raises(RequestError, match=r"--file names .*, which cannot be read"):
        prompts_of(parse("generate", "m", "-f", str(tmp_path)))


@pytest.mark.parametrize("command", [["serve", "m"], ["generate", "m", "x"], ["chat", "m"]])
def test_devices_and_who_takes_over(command: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    from onnxport.cli import session
    from onnxport.serving import loading

    calls: list[Any] = []

    def opened(*args: Any, **more: Any) -> Any:
        calls.append((args, more))
        return SimpleNamespace(adapters=SimpleNamespace())

    monkeypatch.setenv("ONNXPORT_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "open_engine", opened)
    given = "--provider openvino --fallback cpu --fallback auto --dtype float32 --no-trial"
    given += " --no-graph-cache"
    on_host = "--allow-on-host Gather --allow-on-host Where"
    session.load_engine(tmp_path, parse(*command))
    session.load_engine(tmp_path, parse(*command, *given.split(), *on_host.split()))
    (plain, more), (chosen, least) = calls
    assert (plain[1], plain[2].dtype, plain[2].allowed_on_host) == ("auto", "auto", ())
    assert more == {"fallback": [], "trials": tmp_path / "trials", "texts": ()}
    assert (plain[2].graph_cache, chosen[2].graph_cache) == (tmp_path / "graphs", None)
    assert (chosen[1], chosen[2].dtype) == ("openvino", "float32")
    assert chosen[2].allowed_on_host == ("Gather", "Where")
    assert least == {"fallback": ["cpu", "auto"], "trials": None, "texts": ()}


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ("--kv-memory 1G --kv-cache-tokens 5", "not allowed with argument"),
        ("--kv-memory half", "--kv-memory: 'half' is not a size"),
        ("--max-queued-requests 0", "less than 1"),
        ("--scheduling-policy lottery", "fcfs"),
        ("--logprobs-mode raw", "raw_logprobs"),
        ("--request-timeout 0", "above 0"),
        ("--request-timeout 1e9", "more than 2592000 seconds; leave it out for no limit"),
        ("--dtype int8", "float16"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parse("serve", "m", *arguments.split())
        assert words in capsys.readouterr().err


Keys = Callable[..., tuple[str, ...]]


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Keys:
    from onnxport.cli.serve import API_KEY_VARIABLE, api_keys

    def read(*arguments: str, variable: str | None = None) -> tuple[str, ...]:
        monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
        if variable is not None:
            monkeypatch.setenv(API_KEY_VARIABLE, variable)
        return api_keys(parse("serve", "m", *arguments).api_key)

    return read


def test_api_keys(keys: Keys) -> None:
    assert keys() == keys(variable="") == ()
    assert keys(variable="one") == ("one",)
    assert keys(variable="one, two") == ("one", "two")
    given = ("--api-key", "three", "--api-key", "fo,ur")
    assert keys(*given) == keys(*given, variable="one") == ("three", "fo,ur")


@pytest.mark.parametrize(("arguments", "variable"), [(["--api-key", ""], "one"), ([], "one,,two")])
def test_an_empty_key_would_leave_a_door_open(
    keys: Keys, arguments: list[str], variable: str
) -> None:
    with pytest.raises(RequestError, match="an API key is empty"):
        keys(*arguments, variable=variable)


@pytest.mark.slow
def test_contradictions_are_told_before_anything_is_loaded(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(artifact), "x", "--kv-disk-size", "1G"]) == 1
    assert capsys.readouterr().err.startswith("error: --kv-disk-size was given without")


def test_origins_are_as_browsers_spell_them(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--allowed-origins", "https://Chat.Example:8443", "--allowed-origins", "*")
    assert parse("serve", "m", *given).allowed_origins == ["https://chat.example:8443", "*"]
    assert parse("serve", "m").allowed_origins == []
    for wrong in ("chat.example", "https://chat.example/", "ftp://chat.example", ""):
        with pytest.raises(SystemExit):
            parse("serve", "m", "--allowed-origins", wrong)
        assert "is no origin" in capsys.readouterr().err


def test_reasoning_parsers_have_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("serve", "m").reasoning_parser == parse("chat", "m").reasoning_parser == "auto"
    for command in ("serve", "chat"):
        found = parse(command, "m", "--reasoning-parser", "seed_oss")
        assert found.reasoning_parser == "seed_oss"
    with pytest.raises(SystemExit):
        parse("serve", "m", "--reasoning-parser", "qwen9")
    assert "use one of auto, none, qwen3" in capsys.readouterr().err


def test_a_suffix(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("generate", "m", "x").suffix is None
    assert parse("generate", "m", "x", "--suffix", "y").suffix == "y"
    with pytest.raises(SystemExit):
        parse("generate", "m", "x", "--suffix", "")
    assert "nothing before it" in capsys.readouterr().err


def test_tokens_of_filling_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("serve", "m").infill_tokens is AppOptions().infill_tokens is None
    assert not parse("serve", "m").spm_infill
    names = {"prefix": "<a>", "suffix": "<b>", "middle": "<c>"}
    assert parse("serve", "m", "--infill-tokens", json.dumps(names)).infill_tokens == names
    for wrong, message in (
        ("x", "not valid JSON"),
        ('{"prefix": "<a>"}', "lack suffix"),
        ('{"prefix": "<a>", "suffix": 5}', "suffix is 5"),
        ('{"prefix": "<a>", "suffix": "<b>", "fim": "c"}', "'fim'"),
    ):
        with pytest.raises(SystemExit):
            parse("serve", "m", "--infill-tokens", wrong)
        assert message in capsys.readouterr().err
    bare = '{"prefix": "<a>", "suffix": "<b>"}'
    check_infill(parse("serve", "m", "--infill-tokens", bare, "--spm-infill"))
    with pytest.raises(RequestError, match="no middle"):
        check_infill(parse("serve", "m", "--infill-tokens", bare))


def test_intervals_of_pings(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("serve", "m").sse_ping_interval == AppOptions().sse_ping_interval_s == 10
    assert parse("serve", "m", "--sse-ping-interval", "0").sse_ping_interval == 0
    assert parse("serve", "m", "--sse-ping-interval", "2.5").sse_ping_interval == 2.5
    assert parse("serve", "m").stream_interval == AppOptions().stream_interval == 1
    assert parse("serve", "m", "--stream-interval", "8").stream_interval == 8
    for wrong in ("-1", "0.01", "3601", "inf", "nan", "x"):
        with pytest.raises(SystemExit):
            parse("serve", "m", "--sse-ping-interval", wrong)
        assert "neither 0 nor a number of seconds from 0.05 to 3600" in capsys.readouterr().err


def test_names_of_the_served_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    assert model_names(parse("serve", str(folder))) == ("own",)
    assert model_names(parse("serve", "org/hub")) == ("org/hub",)
    several = parse("serve", "m", "--served-model-name", "b", "a/c", "--port", "0")
    assert model_names(several) == ("b", "a/c")
    with pytest.raises(RequestError, match="has 'b' twice"):
        model_names(parse("serve", "m", "--served-model-name", "b", "a", "b"))
    adapter = ("--lora-modules", f"a={folder}")
    with pytest.raises(RequestError, match="is called 'a', as the model itself"):
        model_names(parse("serve", "m", "--served-model-name", "b", "a", *adapter))
    for wrong in (("",), ("a", ""), ()):
        with pytest.raises(SystemExit):
            parse("serve", "m", "--served-model-name", *wrong)
        assert "served-model-name" in capsys.readouterr().err
