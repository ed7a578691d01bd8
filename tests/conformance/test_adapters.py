"""LoRA adapters: each row gets its own, whatever else is in the batch and was loaded before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import AdapterError, ProviderError
from onnxport.graphs.lora import LoraAdapter, LoraDelta
from onnxport.providers.base import Model
from onnxport.serving.adapters.mixes import mixed
from onnxport.serving.adapters.peft import AdapterContent, fingerprint
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import RequestOptions, SamplingParams
from tests.conformance.adapting import MAX_RANK, SHAPES, SUM, SUMMED, AdaptedReference
from tests.conformance.conftest import Combination, chosen_lanes, combinations, is_fast
from tests.conformance.lanes import Lane
from tests.conformance.make import DIAGONAL, LATENT, MIXED
from tests.conformance.models import FewSlots, Slotted, step
from tests.conformance.rules import Rule, check_logits, check_tokens, rule_of
from tests.conformance.workload import PROMPTS

UNADAPTED = (*LATENT, *MIXED)  # which have no slots for adapters
WHOLE = ("cpu-custom", "cpu-decomposed", "openvino")  # lanes of every family in every precision
ROWS = (0, 2, 1, 3, 1)  # the adapter of each prompt, as a slot; 0: none
TOKENS = [prompt[:19] for prompt in PROMPTS[: len(ROWS)]]


@dataclass(frozen=True, slots=True)
class Adapted:
    """A combination that was loaded with slots for adapters."""

    lane: Lane
    model: Model
    rule: Rule
    reference: AdaptedReference

    def tables(self, lengths: list[int]) -> list[list[int]]:
        """Blocks for rows of so many tokens, each its own."""
        tables, first = [], 0
        for length in lengths:
            count = -(-length // self.model.capabilities.block_size)
            tables.append(list(range(first, first + count)))
            first += count
        return tables

    def run(self, rows: list[tuple[list[int], int]]) -> NDArray[np.float32]:
        """Logits of every token of prompts with their slots, computed whole."""
        tables = self.tables([len(tokens) for tokens, _ in rows])
        slots = np.array([slot for _, slot in rows], np.int32)
        batch = [(tokens, 0, table) for (tokens, _), table in zip(rows, tables, strict=True)]
        return self.model.run(step(batch, self.model.capabilities, adapter_slots=slots)).copy()

    def wanted(self, rows: list[tuple[list[int], int]]) -> NDArray[np.float32]:
        """What `run` should return where slot n holds adapter n."""
        return np.concatenate([self.reference.logits(tokens, slot) for tokens, slot in rows])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Some lanes run everything that adapters go with, the others each once."""
    params = []
    for lane in chosen_lanes(metafunc.config):
        for one in combinations(lane):
            pair = (one.family, one.precision)
            if (lane.name not in WHOLE and pair not in DIAGONAL) or pair in UNADAPTED:
                continue
            slow = [] if is_fast(one) else [pytest.mark.slow]
            name = f"{lane.name}-{one.family}-{one.precision}"
            params.append(pytest.param(one, marks=slow, id=name))
    metafunc.parametrize("adapted", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def adapted_reference(
    artifact: Callable[[str, str], Path],
) -> Callable[[str, str], AdaptedReference]:
    """Returns `find(family, precision) -> reference`, which all lanes share."""
    return cache(lambda family, precision: AdaptedReference(artifact(family, precision)))


@pytest.fixture(scope="module")
def adapted(
    request: pytest.FixtureRequest,
    artifact: Callable[[str, str], Path],
    adapted_reference: Callable[[str, str], AdaptedReference],
) -> Iterator[Adapted]:
    """One combination at a time, with an adapter in each slot."""
    one: Combination = request.param
    path = artifact(one.family, one.precision)
    model = one.lane.open(path, max_adapters=len(SHAPES), max_adapter_rank=MAX_RANK)
    if model.capabilities.state_slots:
        model = Slotted(model)
    rule = one.lane.rule or rule_of(model.capabilities)
    found = Adapted(one.lane, model, rule, adapted_reference(one.family, one.precision))
    for slot, adapter in found.reference.adapters.items():
        model.set_adapter(slot, adapter)
    yield found
    model.close()


def test_a_batch_of_several_and_none(adapted: Adapted) -> None:
    rows = list(zip(TOKENS, ROWS, strict=True))
    wanted = adapted.wanted(rows)
    base = adapted.wanted([(tokens, 0) for tokens in TOKENS])
    far = np.abs(wanted - base).max() / wanted.std()
    if adapted.rule.max_diff < 1:  # else it tells nothing of what adapters change
        assert far > 3 * adapted.rule.max_diff, "the adapters change too little to be seen"
    found = adapted.run(rows)
    check_logits(adapted.rule, wanted, found, "a mixed batch")
    begin = 0
    for tokens, slot in rows:
        alone = adapted.run([(tokens, slot)])
        own = found[begin : begin + len(tokens)]
        begin += len(tokens)
        check_logits(adapted.rule, own, alone, f"adapter {slot} alone")
        if adapted.lane.name.startswith("cpu-custom"):
            np.testing.assert_array_equal(own, alone)


def test_a_sum_of_two_beside_others(adapted: Adapted) -> None:
    adapters = adapted.reference.adapters
    parts = [(adapters[seed], scale) for seed, scale in SUMMED]
    rows = list(zip(TOKENS[:3], (3, 0, 1), strict=True))
    try:
        adapted.model.set_adapter(3, mixed("sum", parts))
        wanted = adapted.wanted([(tokens, SUM if slot == 3 else slot) for tokens, slot in rows])
        check_logits(adapted.rule, wanted, adapted.run(rows), "a sum in a batch")
    finally:
        adapted.model.set_adapter(3, adapters[3])


def test_decoding_behind_a_prompt_and_chunks_beside(adapted: Adapted) -> None:
    """Rows of one token and of more in one step, and logits of few of them."""
    new, limits = [1, 5, 1, 7, 2], adapted.model.capabilities
    tables = adapted.tables([len(tokens) for tokens in TOKENS])
    cases = list(zip(TOKENS, new, tables, strict=True))
    slots = np.array(ROWS, np.int32)
    before = [(tokens[:-count], 0, table) for tokens, count, table in cases]
    adapted.model.run(step(before, limits, adapter_slots=slots))
    after = [(tokens[-count:], len(tokens) - count, table) for tokens, count, table in cases]
    last = (np.cumsum(new) - 1).astype(np.int32)
    found = adapted.model.run(step(after, limits, adapter_slots=slots, logits_indices=last))
    wanted = [adapted.reference.logits(t, slot)[-1] for t, slot in zip(TOKENS, ROWS, strict=True)]
    check_logits(adapted.rule, np.array(wanted), found, "the last tokens")


def test_without_any_adapter_it_is_the_model(adapted: Adapted) -> None:
    rows = [(TOKENS[0], 0), (TOKENS[1], 0)]
    expected = adapted.run(rows)
    check_logits(adapted.rule, adapted.wanted(rows), expected, "slots of none")
    tables = adapted.tables([len(tokens) for tokens, _ in rows])
    batch = [(tokens, 0, table) for (tokens, _), table in zip(rows, tables, strict=True)]
    found = adapted.model.run(step(batch, adapted.model.capabilities))
    np.testing.assert_array_equal(found, expected)


def test_slots_are_filled_and_emptied_between_steps(adapted: Adapted) -> None:
    tokens, adapters = TOKENS[2], adapted.reference.adapters
    try:
        adapted.model.set_adapter(1, adapters[2])  # more projections, in place of fewer
        check_logits(adapted.rule, adapted.wanted([(tokens, 2)]), adapted.run([(tokens, 1)]), "new")
        adapted.model.set_adapter(2, adapters[3])  # fewer, in place of more
        rows = [(tokens, 2), (tokens, 1), (tokens, 0)]
        wanted = adapted.wanted([(tokens, 3), (tokens, 2), (tokens, 0)])
        check_logits(adapted.rule, wanted, adapted.run(rows), "both changed")
        adapted.model.set_adapter(2, None)
        with pytest.raises(ProviderError, match=r"slots 2, and there is none; filled are 1, 3"):
            adapted.run(rows)
        wanted = adapted.wanted([(tokens, 2), (tokens, 0), (tokens, 3)])
        rows = [(tokens, 1), (tokens, 0), (tokens, 3)]
        check_logits(adapted.rule, wanted, adapted.run(rows), "one gone")
    finally:
        for slot, adapter in adapters.items():
            adapted.model.set_adapter(slot, adapter)
    check_logits(adapted.rule, adapted.wanted([(tokens, 2)]), adapted.run([(tokens, 2)]), "back")


def test_slots_change_hands_while_sequences_go_on(adapted: Adapted) -> None:
    """Those beside them notice nothing, and whose adapter comes back goes on in another slot."""
    adapters, limits = adapted.reference.adapters, adapted.model.capabilities
    tables = adapted.tables([len(tokens) for tokens in TOKENS[:4]])
    own = (1, 0, 2, 3)  # the adapter of each sequence
    done = [0] * len(own)

    def go(what: str, *rows: tuple[int, int, int]) -> None:
        """Compute tokens of sequences: which one, up to where, with the adapter of which slot."""
        batch = [(TOKENS[one][done[one] : end], done[one], tables[one]) for one, end, _ in rows]
        slots = np.array([slot for _, _, slot in rows], np.int32)
        found = adapted.model.run(step(batch, limits, adapter_slots=slots))
        wanted = [
            adapted.reference.logits(TOKENS[one][:end], own[one])[done[one] :]
            for one, end, _ in rows
        ]
        check_logits(adapted.rule, np.concatenate(wanted), found, what)
        for one, end, _ in rows:
            done[one] = end

    try:
        go("at first", (0, 11, 1), (1, 12, 0), (2, 9, 2))
        adapted.model.set_adapter(2, adapters[3])
        go("another in the slot of one that waits", (0, 12, 1), (1, 14, 0), (3, 10, 2))
        go("decoding", (0, 13, 1), (1, 15, 0), (3, 11, 2))
        adapted.model.set_adapter(3, adapters[2])
        go("it goes on in another slot", (0, 14, 1), (1, 16, 0), (2, 13, 3), (3, 12, 2))
        adapted.model.set_adapter(2, None)
        go("one slot is empty", (0, 15, 1), (1, 17, 0), (2, 14, 3))
    finally:
        for slot, adapter in adapters.items():
            adapted.model.set_adapter(slot, adapter)


def test_more_adapters_than_slots(adapted: Adapted) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    config = EngineConfig(4, 13, max_host_adapters=len(SHAPES))
    engine = Engine(FewSlots(adapted.model, 1), config=config)
    try:
        for seed, adapter in adapted.reference.adapters.items():
            content = AdapterContent(adapter, fingerprint(adapter), Path(f"{seed}"), None)
            engine.adapters.load(f"{seed}", content)
        for number, (tokens, seed) in enumerate(zip(TOKENS, ROWS, strict=True)):
            options = RequestOptions(adapter=f"{seed}" if seed else None)
            engine.submit(engine.prepare(f"{number}", tokens, params, options))
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None, delta.error
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
            engine.check()
        assert engine.adapters.num_swaps >= len(SHAPES) - 1
    finally:
        engine.close()
        for slot, adapter in adapted.reference.adapters.items():
            adapted.model.set_adapter(slot, adapter)
    for number, (tokens, seed) in enumerate(zip(TOKENS, ROWS, strict=True)):
        reference = adapted.reference.of(seed)
        assert len(found[f"{number}"]) == params.max_tokens
        check_tokens(adapted.rule, reference, tokens, found[f"{number}"], params)  # type: ignore[arg-type]


def test_an_adapter_that_is_too_large_spoils_no_other_row(adapted: Adapted) -> None:
    """What A makes of a token is infinite, which others may not even multiply by 0."""
    adapters, is_half = adapted.reference.adapters, False
    try:
        adapted.model.set_adapter(1, scaled(adapters[2], np.finfo(np.float16).max))
        try:
            adapted.model.set_adapter(1, scaled(adapters[2], np.finfo(np.float32).max))
        except AdapterError:
            is_half = True  # holds no more
        rows = [(TOKENS[0], 1), *zip(TOKENS[1:4], (0, 2, 3), strict=True)]
        found = adapted.run(rows)
        begin = len(TOKENS[0])
        is_infinite = not np.isfinite(found[:begin]).all()
        # OpenVINO's norms make finite numbers of what float16 holds at most.
        may_be_finite = is_half and adapted.lane.provider == "openvino"
        assert is_infinite or may_be_finite, "it is not large enough to show anything"
        check_logits(adapted.rule, adapted.wanted(rows[1:]), found[begin:], "other rows")
    finally:
        adapted.model.set_adapter(1, adapters[1])


def scaled(adapter: LoraAdapter, largest: float) -> LoraAdapter:
    """An adapter whose numbers of A are as large as a type can hold, with their signs."""
    return LoraAdapter(
        {
            key: LoraDelta(np.copysign(np.float32(largest), delta.a), delta.b)
            for key, delta in adapter.deltas.items()
        }
    )


def test_what_was_loaded(adapted: Adapted) -> None:
    found = adapted.model.capabilities
    assert (found.max_adapters, found.max_adapter_rank) == (len(SHAPES), MAX_RANK)
