"""What can be asked of speculation."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxport.cli import build_parser
from onnxport.cli.arguments import engine_config
from onnxport.errors import CapacityError
from onnxport.serving.config import EngineConfig
from onnxport.serving.speculation.config import SpeculationConfig


def test_ngram() -> None:
    text = (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 6, '
        '"prompt_lookup_min": 1, "disable_by_batch_size": 4}'
    )
    assert SpeculationConfig.parse(text) == SpeculationConfig(
        "ngram", 3, 6, 1, disable_by_batch_size=4
    )


def test_draft_model() -> None:
    text = '{"method": "draft_model", "model": "a/b", "provider": "openvino", "threads": 2}'
    config = SpeculationConfig.parse(text)
    assert config.model == Path("a/b")
    assert config.provider == "openvino"
    assert config.threads == 2
    assert config.num_speculative_tokens == 5


def test_eagle3() -> None:
    text = '{"method": "eagle3", "model": "a", "num_speculative_tokens": 3, "provider": "cpu"}'
    expected = SpeculationConfig("eagle3", 3, model=Path("a"), provider="cpu")
    assert SpeculationConfig.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "with a method"),
        ("{}", "with a method"),
        ('{"method": "medusa"}', "'medusa'; it must be one of ngram, draft_model, eagle3, grammar"),
        ('{"method": "ngram", "lookup": 3, "a": 1}', "has 'a', 'lookup', which is not known"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', "num_speculative_tokens is '5'"),
        ('{"method": "ngram", "num_speculative_tokens": 257}', "from 1 to 256"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "is True"),
        ('{"method": "ngram", "num_speculative_tokens": null}', "is None"),
        ('{"method": "ngram", "prompt_lookup_max": 1}', "prompt_lookup_min 2; raise the first"),
        ('{"method": "ngram", "disable_by_batch_size": 0}', "disable_by_batch_size is 0"),
        ('{"method": "ngram", "model": "a"}', "ngram does not use model"),
        ('{"method": "ngram", "provider": "cpu"}', "ngram does not use provider"),
        ('{"method": "grammar", "model": "a"}', "grammar does not use model"),
        ('{"method": "grammar", "prompt_lookup_max": 9}', "does not use prompt_lookup_max"),
        ('{"method": "draft_model"}', "needs a model: the folder of an artifact with the same"),
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
    assert engine_config(given) == EngineConfig(speculation=SpeculationConfig("ngram"))
    wrong = parser.parse_args([*command, "--speculative-config", "ngram"])
    with pytest.raises(CapacityError, match="not JSON"):
        engine_config(wrong)
