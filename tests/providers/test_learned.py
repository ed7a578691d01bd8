"""Models with learned positions and their like on providers: adapters, speculation, caches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import ArtifactError, CapacityError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library
from onnxport.providers.registry import get_provider
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.ngram import NgramDrafter
from tests.conformance.models import step
from tests.exporter import checkpoints
from tests.providers import state_adapters
from tests.providers.models import opened
from tests.serving.speculating import Eager

KERNEL = pytest.mark.skipif(find_library() is None, reason="the C++ kernel was not built")
OPENVINO = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="openvino is not installed"
)

TOKENS = checkpoints.tokens(3, 24).tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Returns `make(case)`: transformers' model, and its artifact in float32."""
    found: dict[str, tuple[Any, Path]] = {}

    def make(case: str) -> tuple[Any, Path]:
        if case not in found:
            folder = tmp_path_factory.mktemp(case)
            peer = checkpoints.make(checkpoints.CASES[case], folder / "checkpoint")
            options = ExportOptions(precision="fp32", threads=1)
            found[case] = peer, export_model(folder / "checkpoint", folder / "artifact", options)
        return found[case]

    return make


def logits(model: Model, slot: int) -> Any:
    """Of every position of a prompt."""
    blocks = list(range(-(-len(TOKENS) // model.capabilities.block_size)))
    slots = np.array([slot], np.int32) if slot else None
    return model.run(step([(TOKENS, 0, blocks)], model.capabilities, adapter_slots=slots)).copy()


@pytest.mark.parametrize("case", ["opt-350m", "gpt2", "gpt-bigcode", "gptj", "falcon-new"])
@pytest.mark.parametrize("attention", [pytest.param("custom", marks=KERNEL), "decomposed"])
def test_an_adapter_does_what_merging_it_would(
    made: Callable[[str], tuple[Any, Path]], case: str, attention: Any, tmp_path: Path
) -> None:
    """Of all linear modules, as PEFT names them."""
    peer, path = made(case)
    spec = Artifact.read(path).manifest.model
    tensors = state_adapters.trained(peer, spec, seed=1)
    adapter = state_adapters.saved(tmp_path, peer, spec, tensors).adapter
    wanted = state_adapters.expected(state_adapters.merged(peer, tensors), TOKENS)
    with opened(path, attention, max_adapters=1, max_adapter_rank=4) as model:
        model.set_adapter(1, adapter)
        np.testing.assert_allclose(logits(model, 1), wanted, rtol=0, atol=2e-4)
        assert np.abs(logits(model, 0) - wanted).max() > 1


@KERNEL
@pytest.mark.parametrize("case", ["opt", "gpt2"])
def test_speculated_tokens_have_their_positions(
    made: Callable[[str], tuple[Any, Path]], case: str
) -> None:
    """Guesses that are right and guesses that are not, up to the end of the context."""
    _, path = made(case)
    prompt = [*TOKENS[:8], *TOKENS[:8], *TOKENS[:8]]
    params = SamplingParams(temperature=0.0, max_tokens=128 - len(prompt), ignore_eos=True)

    def generate(*, guesses: bool) -> tuple[list[int], int]:
        speculator = None
        if guesses:
            told = SpeculationConfig("ngram", num_speculative_tokens=4)
            speculator = Eager(NgramDrafter(3, 1), told)
        with opened(path, "custom") as model:
            engine = Engine(model, None, EngineConfig(4, 64), speculator=speculator)
            with pytest.raises(CapacityError, match="the context length is 128 tokens"):
                engine.prepare("longer", [*prompt, 5], params)
            engine.submit(engine.prepare("one", prompt, params))
            tokens: list[int] = []
            while engine.has_work:
                for delta in engine.step():
                    tokens.extend(delta.token_ids)
            steps = engine.stats().num_steps
            engine.close()
        return tokens, steps

    plain, steps = generate(guesses=False)
    guessed, fewer = generate(guesses=True)
    assert len(plain) == 128 - len(prompt)
    assert guessed == plain
    assert fewer < steps


@OPENVINO
@pytest.mark.parametrize("case", ["opt-350m", "gpt2", "gpt-bigcode", "gptj", "falcon-new"])
def test_openvino(made: Callable[[str], tuple[Any, Path]], case: str) -> None:
    """In chunks, beside another sequence."""
    peer, path = made(case)
    options = LoadOptions(threads=2, kv_cache_tokens=1024, kv_cache_dtype="float32")
    model = get_provider("openvino").load(Artifact.read(path), options)
    try:
        first = step([(TOKENS[:9], 0, [0]), (TOKENS, 0, [2])], model.capabilities)
        both = model.run(first).copy()
        last = model.run(step([(TOKENS[9:], 9, [0])], model.capabilities)).copy()
    finally:
        model.close()
    wanted = checkpoints.logits(peer, np.array(TOKENS))
    np.testing.assert_allclose(both, [*wanted[:9], *wanted], atol=2e-3)
    np.testing.assert_allclose(last, wanted[9:], atol=2e-3)


def test_states_that_are_not_there_are_refused(made: Callable[[str], tuple[Any, Path]]) -> None:
    _, path = made("opt-350m")
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        ("norms of the residual stream itself", {"hidden_layers": (1,)}),
        ("64 wide and its head reads 48 numbers", {"final_states": True}),
    )
    for message, options in asked:
        with (
            pytest.raises(ArtifactError, match=message),
            opened(path, "decomposed", **options),
        ):
            pass
