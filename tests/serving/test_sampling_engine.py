"""Whatever else runs, each token of the engine is one that the slow reference may draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.intake import SEED_STEP
from onnxport.serving.params import SamplingParams
from onnxport.serving.sampler import uniform
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.helpers import null_engine, reasons, run, submit, tokens
from tests.serving.slow_sampling import changed, possible
from tests.serving.tokenizers_for_tests import byte_level
from tests.tiers import examples

TOKENIZER = Tokenizer(byte_level(), frozenset({0, 5}))
VOCAB = TOKENIZER.vocab_size
PREFIX = list(range(20, 33))
token_ids = st.integers(0, VOCAB - 1)
mixes = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.3]),
        "seed": st.integers(0, 9),
        "n": st.sampled_from([1, 1, 3]),
        "max_tokens": st.integers(6, 16),
    },
    optional={
        "top_k": st.sampled_from([3, 100]),
        "top_p": st.sampled_from([0.4, 0.95]),
        "min_p": st.sampled_from([0.05, 0.6]),
        "repetition_penalty": st.sampled_from([0.6, 1.5]),
        "presence_penalty": st.sampled_from([-2.0, 1.0]),
        "frequency_penalty": st.sampled_from([-1.0, 2.0]),
        "repeat_last_n": st.sampled_from([None, -1, 0, 4, 64]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-100.0, 4.0]), max_size=4),
        "bad_words": st.lists(st.sampled_from(["a", "bc", "the sea", "é"]), max_size=2),
        "allowed_token_ids": st.lists(token_ids, min_size=8, max_size=30),
        "min_tokens": st.integers(1, 6),
        "stop_token_ids": st.lists(st.integers(100, 120), max_size=3),
        "ignore_eos": st.booleans(),
    },
)
requests = st.lists(
    st.tuples(st.integers(1, 13), st.integers(0, 60), mixes), min_size=1, max_size=4
)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def null_logits(sequence: Sequence[int], vocab: int = VOCAB) -> NDArray[np.float32]:
    """The null model's logits after each token, all computed at once."""
    length = len(sequence)
    model = NullModel(NullOptions(vocab, num_blocks=1, block_size=length))
    return model.run(
        StepInputs(
            np.array(sequence, np.int64),
            np.zeros((1, 1), np.int32),
            np.array([0, length], np.int32),
            np.zeros(1, np.int32),
            np.array([length] * 3, np.int32),
            np.arange(length, dtype=np.int32),
        )
    )


def check(prompt: list[int], output: list[int], params: SamplingParams, index: int) -> None:
    """Check every token of one completion."""
    assert params.seed is not None
    seed = params.seed + index * SEED_STEP
    logits = null_logits([*prompt, *output])
    for place, token_id in enumerate(output):
        before = output[:place]
        values = changed(
            logits[len(prompt) + place - 1], params, prompt, before, TOKENIZER.eos_token_ids, encode
        )
        number = uniform(seed, len(prompt) + place)
        assert token_id in possible(values, params, number), (place, params)


@settings(max_examples=examples(16), deadline=None)
@given(
    several=requests,
    tier=st.sampled_from([{}, {"preemption": "swap", "kv_host_memory": 1 << 20}]),
    budget=st.sampled_from([5, 40]),
)
def test_every_token_is_one_that_the_reference_may_draw(
    several: list[tuple[int, int, dict[str, Any]]], tier: dict[str, Any], budget: int
) -> None:
    """Shared prefixes, chunks, forks and preemptions in a pool that is too small for all."""
    engine = null_engine(
        num_blocks=14,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        vocab_size=VOCAB,
        tokenizer=TOKENIZER,
        **tier,
    )
    accepted = {}
    for number, (length, last, mix) in enumerate(several):
        prompt, params = [*PREFIX[:length], last], SamplingParams(**mix)
        try:
            submit(engine, str(number), prompt, params)
        except RequestError as error:  # the mix leaves no token
            assert error.param == "allowed_token_ids"  # noqa: PT017
            continue
        accepted[str(number)] = (prompt, params)
    deltas = run(engine)
    for name, (prompt, params) in accepted.items():
        for index in range(params.n):
            output = tokens(deltas[name], index)
            check(prompt, output, params, index)
            ends = {*params.stop_token_ids}
            if not params.ignore_eos:
                ends |= TOKENIZER.eos_token_ids
            stopped = output[-1] in ends
            assert not ends & {*output[:-1]}
            assert len(output) == params.max_tokens or stopped
            assert len(output) > params.min_tokens or not stopped
        assert {*reasons(deltas[name])} <= {"length", "stop"}
    engine.close()
