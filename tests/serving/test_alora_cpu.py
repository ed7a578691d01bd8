"""aLoRAs of real models: tokens and log probabilities are those of transformers' model.

There the adapter is added to the products of tokens from the invocation on alone, in one forward
of the whole sequence: that is how PEFT computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxport import LLM, SamplingParams
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.providers.cpu.library import find_library
from onnxport.serving.params import RequestOptions
from onnxport.serving.prompts import TokensPrompt
from tests.exporter import checkpoints
from tests.providers.state_adapters import ALPHA, adapted_modules, trained
from tests.serving.adapting import Tensors, write_adapter
from tests.tiers import every

pytestmark = pytest.mark.skipif(find_library() is None, reason="the C++ kernel was not built")

CASES = {**checkpoints.CASES, **checkpoints.HYBRID, **checkpoints.SHORT_CONV}
FAMILIES = ("llama", "qwen3.5", "gemma3", "lfm2")
INVOCATIONS: dict[int, list[int] | None] = {1: [5, 6, 5], 2: [9], 3: None}  # by adapter
NOWHERE = 10**6
CONTEXT = checkpoints.tokens(1, 37).tolist()


@dataclass(frozen=True, slots=True)
class Made:
    """A model, and adapters of it, by seed."""

    path: Path
    peer: Any  # transformers' model
    tensors: dict[int, Tensors]
    folders: dict[int, Path]

    def logprobs(self, seed: int, start: int, tokens: Sequence[int]) -> np.ndarray:
        """Of every token, [num_tokens, vocab], where an adapter begins at one; 0: no adapter."""
        with _begins(self.peer, self.tensors.get(seed, {}), start):
            logits = checkpoints.logits(self.peer, np.array(tokens))
        return torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()


@contextmanager
def _begins(model: Any, tensors: Tensors, start: int) -> Iterator[None]:
    """Add an adapter to the products of tokens from `start` on."""
    handles = []
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = tensors[name.replace(".lora_A.", ".lora_B.")]
        added = torch.from_numpy(b @ a) * (ALPHA / len(a))
        module = model.get_submodule(name.removeprefix("base_model.model.").split(".lora_")[0])

        def add(_: Any, inputs: Any, output: Any, added: Any = added) -> Any:
            (x,) = inputs
            output[:, start:] += x[:, start:] @ added.T
            return output

        handles.append(module.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Returns `make(family)`."""

    def made(family: str) -> Made:
        folder = tmp_path_factory.mktemp(family)
        peer = checkpoints.make(CASES[family], folder / "model")
        path = export_model(folder / "model", folder / "out", ExportOptions(precision="fp32"))
        spec = Artifact.read(path).manifest.model
        tensors = {seed: trained(peer, spec, seed) for seed in INVOCATIONS}
        folders = {}
        for seed, invocation in INVOCATIONS.items():
            config: dict[str, Any] = {"r": 4, "lora_alpha": ALPHA}
            config["target_modules"] = adapted_modules(peer, spec)
            config["alora_invocation_tokens"] = invocation
            folders[seed] = write_adapter(folder / str(seed), tensors[seed], **config)
        return Made(path, peer, tensors, folders)

    return made


@pytest.mark.parametrize("family", every(4, FAMILIES))
def test_parity(make: Callable[[str], Made], family: str) -> None:
    """In one batch with a LoRA and with the model alone; chunked, and from a cache."""
    made = make(family)
    asked = [  # adapter, prompt, where it begins
        (0, [*CONTEXT, 5, 6, 5, 7], 0),
        (1, [*CONTEXT, 5, 6, 5, 7], 37),
        (1, [5, 6, 5, *CONTEXT, 5, 6, 5], 40),
        (2, [*CONTEXT, 9], 37),
        (2, [*CONTEXT, 8], NOWHERE),
        (3, [*CONTEXT, 5, 6, 5, 7], 0),
    ]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for _, prompt, _ in asked]
    options = [RequestOptions(adapter=str(seed) if seed else None) for seed, _, _ in asked]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)
    told = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    with LLM(
        *(made.path,),
        provider="cpu",
        threads=1,
        kv_cache_tokens=1024,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_adapters=3,
        matmul_accuracy_level=1,
    ) as llm:
        for seed, folder in made.folders.items():
            llm.load_adapter(str(seed), folder)
        scored = llm.generate(prompts, told, options=options)
        cold = llm.generate(prompts, params, options=options)
        warm = llm.generate(prompts, params, options=options)
    for row, (seed, prompt, start) in enumerate(asked):
        answer = [*cold[row].outputs[0].token_ids]
        tokens = [*prompt, *answer]
        logprobs = made.logprobs(seed, start, tokens)
        assert answer == logprobs[len(prompt) - 1 : -1].argmax(axis=1).tolist()
        assert answer == [*warm[row].outputs[0].token_ids]
        wanted = logprobs[range(len(tokens) - 1), tokens[1:]]
        of_prompt = [
            one[token].logprob
            for one, token in zip(scored[row].prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        of_answer = [
            one[token].logprob
            for one, token in zip(cold[row].outputs[0].logprobs, answer, strict=True)
        ]
        np.testing.assert_allclose([*of_prompt, *of_answer], wanted, atol=2e-3)
    assert [one.num_cached_tokens for one in warm] == [32] * 6
    plain, changed = (
        made.logprobs(seed, start, asked[1][1])[-1] for seed, start in ((0, 0), (1, 37))
    )
    assert np.abs(plain - changed).max() > 0.1
    assert np.abs(made.logprobs(1, 36, asked[1][1])[-1] - changed).max() > 0.01
