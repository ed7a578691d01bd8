"""The bundled demo models: their files, their tokenizer, and every fixed prompt answered right."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from demo import evaluate, train
from demo.corpus import documents
from demo.drawing import Draw, is_held_out
from demo.quantize import BLOCK

ROOT = Path(__file__).parents[1]
MODEL, DRAFT = ROOT / "demo" / "model", ROOT / "demo" / "draft"
PROMPTS = json.loads(evaluate.PROMPTS.read_text())
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return evaluate.load(MODEL)[0]


@pytest.mark.parametrize(("folder", "limit_bytes"), [(MODEL, 8_000_000), (DRAFT, 2_000_000)])
def test_weights_are_small_and_bfloat16(folder: Path, limit_bytes: int) -> None:
    file = folder / "model.safetensors"
    assert file.stat().st_size <= limit_bytes
    with safe_open(file, "pt") as weights:
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {"BF16"}


@pytest.mark.parametrize("folder", [MODEL, DRAFT])
def test_shapes_suit_int4_blocks_and_grouped_queries(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    heads, head_size = config["num_attention_heads"], config["head_dim"]
    for inputs in (config["hidden_size"], config["intermediate_size"], heads * head_size):
        assert inputs % BLOCK == 0
    assert config["num_key_value_heads"] < heads


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_model_and_draft_share_the_tokenizer(name: str) -> None:
    assert (MODEL / name).read_bytes() == (DRAFT / name).read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "naïve café",
        "漢字とかな",
        "🙂👩‍👩‍👧",
        "a\n\n\tb  c ",
        "\x00\x7f\u202e",
        "e\u0301 é",
        "12345",
    ],
)
def test_tokenizer_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]


def test_words_split_alike_with_and_without_a_space(tokenizer: PreTrainedTokenizerFast) -> None:
    bare, spaced = tokenizer.tokenize("Brelthano"), tokenizer.tokenize(" Brelthano")
    assert "".join(spaced) == "Ġ" + "".join(bare)
    assert spaced[-1] == bare[-1]


def test_template_renders_turns_and_generation_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_template_renders_tools_calls_and_results(
    tokenizer: PreTrainedTokenizerFast, arguments: Any
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    written = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert rendered == (
        f"<|im_start|>system\nTools:\n{json.dumps(TOOL)}\n"
        'To call one: <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n{written}\n{written}<|im_end|>\n"
        "<|im_start|>tool\n2<|im_end|>\n"
    )


@pytest.mark.parametrize("role", ["robot", "system"])
def test_template_refuses_unknown_roles_and_late_system_messages(
    tokenizer: PreTrainedTokenizerFast, role: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "content": "Hi"}]
    with pytest.raises(Exception, match=r"role robot|system message"):
        tokenizer.apply_chat_template(messages, tokenize=False)


def test_unknown_expectation_is_refused() -> None:
    with pytest.raises(ValueError, match="contians"):
        evaluate.right({"contians": ["x"]}, "x")


def test_corpus_is_repeatable_and_its_splits_share_no_sums() -> None:
    first, again = (list(itertools.islice(documents(seed=3), 50)) for _ in range(2))
    assert first == again
    drawn = Draw(0, held_out=True)
    assert all(is_held_out(*drawn.pair(0, 99)) for _ in range(100))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_prompt_is_answered_right(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, index: int
) -> None:
    prompt = PROMPTS[index]
    reply = evaluate.answer(model, tokenizer, prompt)
    assert evaluate.right(prompt["expect"], reply), f"{prompt} -> {reply!r}"


@pytest.mark.slow
@pytest.mark.parametrize("folder", [MODEL, DRAFT])
def test_held_out_perplexity_is_what_the_readme_says(folder: Path) -> None:
    readme = (ROOT / "demo" / "README.md").read_text()
    reported = re.search(rf"\| `{folder.name}/` .*\| ([\d.]+) \| ([\d.]+) \|", readme)
    assert reported is not None, "README.md has no table row for the model"
    model, tokenizer = evaluate.load(folder)
    held_out = list(itertools.islice(documents(seed=0, held_out=True), 100))
    measured = train.perplexity(model, train.encode(held_out, tokenizer))
    assert measured == pytest.approx(float(reported[1]), rel=0.25)


@pytest.mark.slow
def test_int4_weights_answer_almost_every_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    model, _ = evaluate.load(MODEL)
    evaluate.untie(model)
    with evaluate.int4_layers(model.model):
        hits = sum(
            evaluate.right(prompt["expect"], evaluate.answer(model, tokenizer, prompt))
            for prompt in PROMPTS
        )
    assert hits >= 0.9 * len(PROMPTS)
