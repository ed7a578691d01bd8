"""Draft heads of the demo model: they learn, and the engine guesses what PyTorch makes of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaConfig

from demo import evaluate, train_eagle
from demo.corpus import documents
from demo.eagle import LAYERS, Head, drafts, states_and_logits
from demo.examples import encode
from demo.train import HELD_OUT_DOCUMENTS
from onnxport import LLM, SamplingParams
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.serving.request import Request
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.head import HeadDrafter
from onnxport.serving.speculation.speculator import Speculator
from tests.serving.speculating import Eager

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "demo" / "model"
HEAD = ROOT / "demo" / "eagle"
PLACES = 4
QUESTIONS = [
    "What is onnxport?",
    "What is a paged KV cache?",
    "What is the capital of France?",
    "Count from 3 to 12.",
    "Tell me a story.",
    "Who are you?",
]

Guess = tuple[list[int], list[int]]  # tokens of a request, and what is to follow them


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of random weights, with logits of every third token."""
    folder = tmp_path_factory.mktemp("eagle") / "checkpoint"
    torch.manual_seed(3)
    config = LlamaConfig.from_pretrained(MODEL)
    Head(config, torch.arange(0, config.vocab_size, 3), LAYERS).save(folder)
    return folder


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> tuple[Path, Path]:
    """The artifacts of model and head, in fp32."""
    options = ExportOptions(precision="fp32")
    model = export_model(MODEL, checkpoint.parent / "model", options)
    return model, export_head(checkpoint, MODEL, checkpoint.parent / "head", options)


def opened(pair: tuple[Path, Path]) -> LLM:
    """The model, which guesses whether it pays or not."""
    llm = LLM(
        pair[0],
        provider="cpu",
        threads=2,
        kv_cache_tokens=4096,
        kv_cache_dtype="fp32",
        max_num_seqs=8,
        enable_prefix_caching=False,  # a head begins behind what is cached
        speculation=SpeculationConfig("eagle3", PLACES, model=pair[1], kv_cache_tokens=4096),
    )
    speculator = llm._engine._guessing._guesses
    assert isinstance(speculator, Speculator)
    speculator.__class__ = Eager
    return llm


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Guess]:
    """What the engine's drafter is asked, and says."""
    found: list[Guess] = []
    propose = HeadDrafter.propose

    def noting(
        self: HeadDrafter, requests: Sequence[Request], lengths: Sequence[int]
    ) -> list[Sequence[int]]:
        proposals = propose(self, requests, lengths)
        for request, proposal in zip(requests, proposals, strict=True):
            if proposal:
                found.append((list(request.tokens), list(proposal)))
        return proposals

    monkeypatch.setattr(HeadDrafter, "propose", noting)
    return found


def test_guesses_are_those_of_pytorch(
    checkpoint: Path, pair: tuple[Path, Path], prompts: list[list[int]], seen: list[Guess]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with opened(pair) as llm:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)  # type: ignore[misc]
    model, head = evaluate.load(MODEL)[0], Head.load(checkpoint)
    assert len(seen) > 20
    same = 0
    for tokens, guess in seen:
        ids = torch.tensor([tokens + guess])
        with torch.no_grad():
            states, _ = states_and_logits(model, ids, head.layers)
            places = enumerate(drafts(model, head, ids, states, len(guess)), len(tokens) - 2)
            said = [int(head.tokens[logits[0, at].argmax()]) for at, logits in places]
        same += said == guess
    assert same >= 0.95 * len(seen)  # all but near ties


def test_the_committed_head_is_small_and_says_what_it_reads() -> None:
    with safe_open(HEAD / "model.safetensors", framework="pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert dtypes.pop("d2t") == "I64"
    assert dtypes.pop("t2d") == "BOOL"
    assert set(dtypes.values()) == {"BF16"}
    assert (HEAD / "model.safetensors").stat().st_size < 2_500_000
    eagle = json.loads((HEAD / "config.json").read_text())["eagle_config"]
    assert eagle["eagle_aux_hidden_state_layer_ids"] == LAYERS


def test_the_committed_head_guesses_right(
    pair: tuple[Path, Path], tmp_path: Path, prompts: list[list[int]]
) -> None:
    head = export_head(HEAD, MODEL, tmp_path / "head", ExportOptions(precision="int4"))
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with opened((pair[0], head)) as llm:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)  # type: ignore[misc]
        counters = llm._engine._guessing.counters
    assert counters is not None
    assert counters.num_drafts > 20
    first, *others = counters.accepted_per_position
    assert first > 0.7 * counters.num_drafts
    assert others[-1] > 0.4 * counters.num_drafts


@pytest.mark.slow
def test_the_committed_head_is_as_right_as_its_readme_says() -> None:
    readme = (ROOT / "demo" / "README.md").read_text()
    (told,) = re.findall(r"were right by\s+place: ([\d., %\n]+)\. It", readme)
    shares = [float(share) for share in re.findall(r"([\d.]+) %", told)]
    model, tokenizer = evaluate.load(MODEL)
    held_out = itertools.islice(documents(seed=0, held_out=True), HELD_OUT_DOCUMENTS)
    found = train_eagle.acceptance(model, Head.load(HEAD), encode(list(held_out), tokenizer))
    assert len(shares) == len(found)
    for share, one in zip(shares, found, strict=True):
        assert abs(100 * one - share) < 1.5


def test_a_head_learns_what_its_model_says() -> None:
    model, tokenizer = evaluate.load(MODEL)
    model.requires_grad_(requires_grad=False)
    examples = encode(list(itertools.islice(documents(seed=5), 6)), tokenizer)
    torch.manual_seed(4)
    tokens = train_eagle.commonest_tokens(tokenizer, 256)
    head = Head(model.config, tokens, LAYERS)
    before = train_eagle.acceptance(model, head, examples)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(40):
        train_eagle.backward(model, head, examples)
        optimizer.step()
        optimizer.zero_grad()
    after = train_eagle.acceptance(model, head, examples)
    assert before[0] < 0.1
    assert after[0] > 0.4
    assert all(0 <= share <= 1 for share in after)
