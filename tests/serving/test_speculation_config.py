"""What can be asked of speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxport.cli import build_parser
from onnxport.cli.engine_arguments import engine_config
from onnxport.errors import CapacityError
from onnxport.serving.config import EngineConfig
from onnxport.serving.speculation.build import build_speculator
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.continuations import longest_drafts
from onnxport.serving.speculation.forced import ForcedDrafter
from onnxport.serving.speculation.suffix import SuffixDrafter


def test_ngram() -> None:
    text = (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 6, '
        '"prompt_lookup_min": 1, "disable_by_batch_size": 4}'
    )
    assert SpeculationConfig.parse(text) == SpeculationConfig(
        "ngram", 3, 6, 1, disable_by_batch_size=4
    )


def test_of_two_sizes_of_ngrams_one_is_enough() -> None:
    for given, found in (
        ({}, (4, 2)),
        ({"prompt_lookup_max": 6}, (6, 2)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 3}, (4, 3)),
        ({"prompt_lookup_min": 7}, (7, 7)),
    ):
        assert SpeculationConfig.of({"method": "ngram", **given}).ngrams == found


def test_draft_model() -> None:
    text = '{"method": "draft_model", "model": "a/b", "provider": "openvino", "threads": 2}'
    config = SpeculationConfig.parse(text)
    assert config.model == Path("a/b")
    assert config.provider == "openvino"
    assert config.threads == 2
    assert config.longest_draft == 5


def test_eagle3() -> None:
    text = '{"method": "eagle3", "model": "a", "num_speculative_tokens": 3, "provider": "cpu"}'
    expected = SpeculationConfig("eagle3", 3, model=Path("a"), provider="cpu")
    assert SpeculationConfig.parse(text) == expected


def test_mtp() -> None:
    text = '{"method": "mtp", "num_speculative_tokens": 1}'
    assert SpeculationConfig.parse(text) == SpeculationConfig("mtp", 1)
    text = '{"method": "mtp", "model": "a", "provider": "cpu", "threads": 2}'
    assert SpeculationConfig.parse(text).model == Path("a")


PER_BATCH = "num_speculative_tokens_per_batch_size"


@pytest.mark.parametrize("name", ["deepseek_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp"])
def test_older_names_of_mtp(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found = SpeculationConfig.of({"method": name, "num_speculative_tokens": 2})
    assert found == SpeculationConfig("mtp", 2)
    assert f"{name} is called mtp" in caplog.text


def test_other_ways_to_ask_for_ngrams(caplog: pytest.LogCaptureFixture) -> None:
    for given in (
        {"model": "ngram"},
        {"model": "[ngram]"},
        {"method": "ngram", "model": "ngram"},
        {"method": "ngram_gpu"},
        {"method": "ngram_gpu", "model": "ngram_gpu"},
    ):
        assert SpeculationConfig.of(given) == SpeculationConfig("ngram")
    assert "ngram_gpu is ngram here" in caplog.text


def test_what_changes_nothing_of_vllms_may_be_there() -> None:
    text = """{"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1,
        "rejection_sample_method": "standard", "draft_sample_method": "probabilistic",
        "parallel_drafting": false, "quantization": null, "disable_padded_drafter_batch": true,
        "attention_backend": "auto", "enforce_eager": false}"""
    assert SpeculationConfig.parse(text) == SpeculationConfig("ngram", 3)


def test_what_a_draft_model_may_hold() -> None:
    text = '{"model": "a", "max_model_len": 512, "kv_cache_dtype": "int8"}'
    config = SpeculationConfig.parse(text)
    assert config.method == "draft_model"  # there is nothing in that folder that says otherwise
    assert (config.max_model_len, config.kv_cache_dtype) == (512, "int8")


def test_fewer_guesses_in_larger_batches() -> None:
    text = """{"method": "ngram", "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 3, 2], [8, 9, 0]]}"""
    config = SpeculationConfig.parse(text)
    found = [config.longest_at(number) for number in range(1, 12)]
    assert found == [4, 4, 2, 2, 2, 2, 2, 0, 0, 0, 0]
    assert SpeculationConfig("ngram").longest_at(1000) == 5
    few = SpeculationConfig("ngram", disable_by_batch_size=3)
    assert [few.longest_at(number) for number in (3, 4)] == [5, 0]


def test_suffix() -> None:
    text = (
        '{"method": "suffix", "num_speculative_tokens": 9, "suffix_decoding_max_tree_depth": 12, '
        '"suffix_decoding_max_cached_requests": 0, "suffix_decoding_max_cached_tokens": 5000, '
        '"suffix_decoding_max_spec_factor": 2, "suffix_decoding_min_token_prob": 0}'
    )
    assert SpeculationConfig.parse(text) == SpeculationConfig(
        "suffix",
        9,
        suffix_decoding_max_tree_depth=12,
        suffix_decoding_max_cached_requests=0,
        suffix_decoding_max_cached_tokens=5000,
        suffix_decoding_max_spec_factor=2,
        suffix_decoding_min_token_prob=0,
    )


def test_suffix_has_the_defaults_of_vllm() -> None:
    config = SpeculationConfig("suffix")
    assert config.suffix_decoding_max_tree_depth == 24
    assert config.suffix_decoding_max_cached_requests == 10_000
    assert config.suffix_decoding_max_spec_factor == 1.0
    assert config.suffix_decoding_min_token_prob == 0.1


def test_how_many_tokens_are_guessed_at_most() -> None:
    assert SpeculationConfig("ngram").longest_draft == 5
    assert SpeculationConfig.parse('{"method": "ngram", "num_speculative_tokens": null}') == (
        SpeculationConfig("ngram")
    )
    assert SpeculationConfig("suffix").longest_draft == 24
    assert SpeculationConfig("suffix", suffix_decoding_max_tree_depth=64).longest_draft == 64
    assert SpeculationConfig("suffix", 3).longest_draft == 3


def test_suffix_is_built_as_the_config_says(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = SpeculationConfig("suffix", suffix_decoding_max_cached_tokens=1 << 16)
    speculator = build_speculator(config, Path("nowhere"), "cpu", 64)
    forced = speculator._asker.drafter
    assert isinstance(forced, ForcedDrafter)
    drafter = forced._otherwise
    assert isinstance(drafter, SuffixDrafter)
    assert drafter.answers is not None
    assert drafter._longest == longest_drafts(24, 1.0)
    assert drafter._least == 0.1
    assert "the last 10000, of at most 65536 tokens in all, in 3 MiB of memory" in caplog.text
    assert len(speculator.counters.accepted_per_position) == 24
    caplog.clear()
    build_speculator(
        SpeculationConfig("suffix", suffix_decoding_max_cached_requests=0), Path("a"), "cpu", 64
    )
    assert not caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "with a method"),
        ("{}", "with a method"),
        ('{"method": "medusa"}', "'medusa'; it must be one of ngram, suffix, draft_model, eagle3"),
        ('{"method": "ngram", "lookup": 3, "a": 1}', "has 'a', 'lookup', which is not known"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', "num_speculative_tokens is '5'"),
        ('{"method": "ngram", "num_speculative_tokens": 257}', "from 1 to 256"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "is True"),
        ('{"method": "ngram", "prompt_lookup_max": 1, "prompt_lookup_min": 2}', "min 2; raise"),
        ('{"method": null, "num_speculative_tokens": 3}', "with a method"),
        ('{"method": "eagle", "model": "a"}', "'eagle'; it must be one of"),
        ('{"method": "ngram", "tensor_parallel_size": 2}', "is 2; here it may be 1 or null"),
        ('{"method": "ngram", "draft_tensor_parallel_size": true}', "is True; here it may be 1"),
        ('{"method": "mtp", "rejection_sample_method": "fly"}', "may be 'standard' or null: a"),
        ('{"method": "mtp", "synthetic_acceptance_length": 2}', "is 2; here it may be null"),
        ('{"method": "mtp", "draft_sample_method": "greedy"}', "draws as the request does"),
        ('{"method": "eagle3", "model": "a", "parallel_drafting": true}', "may be False or null"),
        ('{"model": "a", "quantization": "fp8"}', "what a draft model is, its export decides"),
        ('{"method": "ngram", "max_model_len": 5}', "ngram does not use max_model_len"),
        ('{"model": "a", "max_model_len": 0}', "max_model_len is 0"),
        ('{"model": "a", "kv_cache_dtype": 8}', "kv_cache_dtype is 8; it must be text"),
        (f'{{"method": "ngram", "{PER_BATCH}": []}}', "is (); give ranges of batch sizes"),
        (f'{{"method": "ngram", "{PER_BATCH}": 3}}', "is 3; give ranges of batch sizes"),
        (f'{{"method": "ngram", "{PER_BATCH}": [[1, 2]]}}', "has (1, 2); each of it is"),
        (f'{{"method": "ngram", "{PER_BATCH}": [5]}}', "has 5; each of it is"),
        (f'{{"method": "ngram", "{PER_BATCH}": [[2, 4, 3]]}}', "[2, 4, 3] behind batch size 0"),
        (f'{{"method": "ngram", "{PER_BATCH}": [[1, 4, 3], [4, 9, 1]]}}', "behind batch size 4"),
        (f'{{"method": "ngram", "{PER_BATCH}": [[1, 4, 3], [9, 5, 1]]}}', "[9, 5, 1] behind"),
        (f'{{"method": "ngram", "{PER_BATCH}": [[1, 4, -1]]}}', "is -1; it must be a whole"),
        (f'{{"method": "ngram", "{PER_BATCH}": [[0, 4, 1]]}}', "is 0; it must be a whole"),
        ('{"method": "ngram", "disable_by_batch_size": 0}', "disable_by_batch_size is 0"),
        ('{"method": "ngram", "model": "a"}', "ngram does not use model"),
        ('{"method": "ngram", "provider": "cpu"}', "ngram does not use provider"),
        ('{"method": "grammar", "model": "a"}', "grammar does not use model"),
        ('{"method": "grammar", "prompt_lookup_max": 9}', "does not use prompt_lookup_max"),
        ('{"method": "ngram", "suffix_decoding_max_tree_depth": 9}', "ngram does not use suffix_"),
        ('{"method": "grammar", "suffix_decoding_min_token_prob": 0.5}', "grammar does not use"),
        ('{"method": "suffix", "prompt_lookup_max": 9}', "suffix does not use prompt_lookup_max"),
        ('{"method": "suffix", "model": "a"}', "suffix does not use model"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 1}', "number from 2 to 256"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 257}', "number from 2 to 256"),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": -1}', "number from 0 to"),
        ('{"method": "suffix", "suffix_decoding_max_cached_tokens": 1023}', "number from 1024 to"),
        ('{"method": "suffix", "suffix_decoding_max_cached_tokens": 1e6}', "is 1000000.0"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": 0}', "a number from 1 / 23 to"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": 0.043}', "from 1 / 23 to"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": true}', "is True; it must be"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": NaN}', "is nan; it must be"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": Infinity}', "is inf; it must"),
        (f'{{"method": "suffix", "suffix_decoding_max_spec_factor": 1{"0" * 400}}}', "0; it must"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 1.1}', "number from 0 to 1"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": "0.1"}', "number from 0 to 1"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": NaN}', "number from 0 to 1"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": null}', "number from 0 to 1"),
        ('{"method": "draft_model"}', "needs a model: the folder of an artifact with the same"),
        ('{"method": "mtp", "prompt_lookup_max": 9}', "mtp does not use prompt_lookup_max"),
        ('{"method": "mimo_mtp"}', "'mimo_mtp'; it must be one of"),
        ('{"method": ["mtp"]}', "must be one of"),
        ('{"method": "eagle3"}', "`onnxport export HEAD FOLDER --target MODEL`"),
        ('{"method": "eagle3", "model": "a", "prompt_lookup_min": 1}', "eagle3 does not use"),
        ('{"method": "draft_model", "model": 3}', "model is 3; it must be text"),
        ('{"method": "draft_model", "model": "a", "provider": 1}', "provider is 1"),
        ('{"method": "draft_model", "model": "a", "prompt_lookup_max": 3}', "does not use"),
        ('{"method": "draft_model", "model": "a", "kv_cache_tokens": -1}', "is -1"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(CapacityError) as info:
        SpeculationConfig.parse(text)
    assert words in str(info.value)


@pytest.mark.parametrize("command", [["serve", "m"], ["generate", "m", "hello"], ["chat", "m"]])
def test_commands_take_it(command: list[str]) -> None:
    parser = build_parser()
    assert engine_config(parser.parse_args(command)).speculation is None
    given = parser.parse_args([*command, "--speculative-config", '{"method": "ngram"}'])
    embeds = None if command[0] == "serve" else False  # commands that generate embed nothing
    assert engine_config(given) == EngineConfig(
        speculation=SpeculationConfig("ngram"), embeddings=embeds
    )
    wrong = parser.parse_args([*command, "--speculative-config", "ngram"])
    with pytest.raises(CapacityError, match="not JSON"):
        engine_config(wrong)
