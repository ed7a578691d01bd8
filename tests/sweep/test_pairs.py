"""Every two features together: a batch of requests gets the tokens of the slow reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes import coarse_head
from onnxport.graphs.spec import ArchSpec
from onnxport.kv.table import blocks_for
from onnxport.providers import device
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library, matmul_isa
from onnxport.providers.device_logits import DeviceLogits
from onnxport.providers.registry import EMULATED, get_provider
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.guesses import possible
from onnxport.serving.limits import beam_blocks
from onnxport.serving.outputs import CompletionDelta, FinishReason
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.speculation.draft_model import ModelDrafter
from onnxport.serving.speculation.drafter import Drafter
from onnxport.serving.speculation.forced import ForcedDrafter
from onnxport.serving.speculation.ngram import NgramDrafter
from onnxport.serving.speculation.suffix import SuffixDrafter
from onnxport.serving.stats import SpeculationCounters
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.tokenizer import Tokenizer
from onnxport.serving.verify.decoding import LentModel
from tests.serving.adapting import random_tensors, write_adapter
from tests.sweep.pairs import Case, covering_cases, pairs_of
from tests.sweep.reference import Expected, completions

DEMO = Path(__file__).parents[2] / "demo"
MAX_TOKENS = 14
LATE_STEP, EVENT_STEP = 2, 3  # steps ahead of which something happens
POOL_TOKENS = 4096
HOST_BYTES = 64 << 20
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "is": {"enum": [1, 2, None]}},
    "required": ["name", "is"],
    "additionalProperties": False,
}

AXES: Mapping[str, Sequence[str]] = {
    "sampling": (
        *(
            "greedy",
            "drawn",
            "thinned",
            "penalized",
            "biased",
            "early",
            "scored",
            "best",
            "llama.cpp",
            "mirostat",
            "moving",
            "near",
        ),
        "stopped",
        "beams",
    ),
    "structure": ("none", "json", "regex", "choice", "grammar"),
    "speculation": ("none", "ngram", "suffix", "draft", "forced"),
    # Of two or three: slots for all, or for fewer than there are.
    "adapter": ("none", "one", "mixed", "few"),
    "blocks": ("cold", "warm", "uncached", "recompute", "recompute-uncached", "swap"),
    "chunks": ("whole", "small"),
    "lane": ("cpu", "cpu-int8", "decomposed", "openvino", "cuda"),
    "policy": ("fcfs", "priority", "fair"),
    "event": ("none", "abort", "unload"),
}
NAMED = (70, 300, 2000)
ADAPTERS: Mapping[str, Sequence[str | None]] = {  # of the requests a, b and c
    "none": (None, None, None),
    "one": ("adapter0", "adapter0", "adapter0"),
    "mixed": ("adapter0", "adapter1", "adapter0"),
    "few": ("adapter0", "adapter1", "adapter2"),
}
NUM_ADAPTERS = 3
SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "seed": 11},
    "thinned": {"temperature": 1.2, "seed": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalized": {
        **{"temperature": 0.7, "seed": 13, "repetition_penalty": 1.3},
        **{"presence_penalty": 0.6, "frequency_penalty": 0.4},
    },
    "llama.cpp": {
        **{"temperature": 0.9, "seed": 19, "top_n_sigma": 4.0, "typical_p": 0.95},
        **{"xtc_probability": 0.5, "dry_multiplier": 1.0},
    },
    "mirostat": {
        **{"temperature": 0.9, "seed": 18, "mirostat": 2, "mirostat_tau": 2.0, "n": 2},
        **{"mirostat_eta": 0.4, "presence_penalty": 0.5, "repeat_last_n": 12},
    },
    "moving": {
        **{"temperature": 0.8, "seed": 17, "dynatemp_range": 0.6, "dynatemp_exponent": 1.5},
        **{"repetition_penalty": 1.2, "repeat_last_n": 16, "top_p": 0.95},
    },
    "near": {
        **{"temperature": 1.1, "seed": 20, "adaptive_target": 0.3, "adaptive_decay": 0.7},
        **{"min_p": 0.01, "frequency_penalty": 0.3, "n": 2},
    },
    "biased": {"temperature": 0.0, "logit_bias": {70: 3.0, 71: -5.0}, "bad_words": ("the", "is")},
    "early": {"temperature": 0.0, "min_tokens": 9},
    "scored": {
        **{"temperature": 1.0, "seed": 14, "n": 2, "logprobs": 2, "prompt_logprobs": 1},
        "logprob_token_ids": NAMED,
    },
    "best": {"temperature": 1.1, "seed": 15, "best_of": 3},
    "beams": {"temperature": 0.0, "n": 2, "use_beam_search": True, "length_penalty": 0.8},
    "stopped": {"temperature": 0.0, "stop": ("a", "is"), "include_stop_str_in_output": True},
}
STRUCTURE: Mapping[str, dict[str, Any]] = {
    "none": {},
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": r"[a-f]{3,6}( [0-9]{2}){1,4}"},
    "choice": {"choice": ("the first answer", "the second answer", "neither")},
    "grammar": {"grammar": 'start: "(" start ")" | /[xyz]{1,3}/'},
}
REPLAYS = find_library() is not None  # what stands in for CUDA's attention
LANES: Mapping[str, tuple[str, LoadOptions]] = {
    "cpu": ("cpu", LoadOptions()),
    "cpu-int8": ("cpu", LoadOptions(kv_cache_dtype="int8")),
    "decomposed": ("cpu", LoadOptions(attention="decomposed", matmul_accuracy_level=1)),
    "openvino": ("openvino", LoadOptions(kv_cache_dtype="float32", matmul_accuracy_level=1)),
    "cuda": ("cuda", LoadOptions(block_size=16, matmul_accuracy_level=1, capture_graphs=REPLAYS)),
}
PAIRS = covering_cases(AXES)
# Any two of the others with few slots.
CASES = [*PAIRS, *covering_cases({**AXES, "adapter": ("few",)}, seed=1)]
# In `make fast` a few cases, one of each structure and kind of guessing; all have few slots.
FAST = 6


def test_every_pair_is_in_a_case() -> None:
    found = {pair for case in PAIRS for pair in pairs_of(case)}
    for one, other in combinations(AXES, 2):
        for left in AXES[one]:
            for right in AXES[other]:
                assert ((one, left), (other, right)) in found
    most = max(len(AXES[one]) * len(AXES[other]) for one, other in combinations(AXES, 2))
    assert len(PAIRS) < 1.7 * most


class Always:
    """Lets a drafter guess in every step, whatever it costs."""

    def __init__(self, drafter: Drafter | None, length: int = 3) -> None:
        self.drafter, self.length = drafter, length
        self.accepted: Counter[bool] = Counter()

    @property
    def counters(self) -> SpeculationCounters:
        return SpeculationCounters(0, 0, 0, ())

    @property
    def reader(self) -> None:
        return None

    def rests(self) -> bool:
        return False

    def propose(self, requests: Sequence[Request], budget: int) -> Mapping[Request, Sequence[int]]:
        if self.drafter is None:
            return {}
        lengths = [min(self.length, budget // len(requests))] * len(requests)
        if not lengths[0]:
            return {}
        found = self.drafter.propose(requests, lengths)
        guesses = {one: possible(one, guess) for one, guess in zip(requests, found, strict=True)}
        return {one: guess for one, guess in guesses.items() if guess}

    def note_planned(self, num_drafted: int) -> None:
        pass

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.accepted[True] += num_accepted
        self.accepted[False] += num_drafted - num_accepted

    def note_step(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        pass

    def forget(self, request: Request) -> None:
        if self.drafter is not None:
            self.drafter.forget(request)

    def close(self) -> None:
        pass


class FewSlots(LentModel):
    """A model that shows some of its slots for adapters."""

    def __init__(self, model: Model, num_blocks: int | None, num_slots: int) -> None:
        super().__init__(model, num_blocks)
        self._capabilities = replace(self._capabilities, max_adapters=num_slots)


class World:
    """The demo models, loaded once for each lane, and three adapters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = export_model(
            DEMO / "model", folder / "target", ExportOptions(precision="int4")
        )
        self.draft = export_model(DEMO / "draft", folder / "draft", ExportOptions(precision="int4"))
        self.models: list[Model] = []
        self.num_loaded = 0
        self.num_accepted: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()  # of the events, when they mattered
        self._expected: dict[tuple[str, ...], list[Expected]] = {}
        artifact = Artifact.read(self.target)
        self.spec: ArchSpec = artifact.manifest.model
        self.eos = frozenset(artifact.manifest.eos_token_ids)
        self.tokenizer = Tokenizer.from_folder(self.target, self.eos)
        targeted = (["q_proj", "v_proj"], ["o_proj", "gate_proj"], ["k_proj", "down_proj"])
        for seed, targets in enumerate(targeted):
            tensors = random_tensors(self.spec, rank=4, targets=targets, seed=seed)
            write_adapter(folder / f"adapter{seed}", tensors, target_modules=targets, lora_alpha=2)

    @cache  # noqa: B019
    def model(self, lane: str) -> Model:
        provider, options = LANES[lane]
        return self._load(
            self.target,
            provider,
            replace(options, max_adapters=NUM_ADAPTERS, kv_cache_tokens=POOL_TOKENS),
        )

    @cache  # noqa: B019
    def drafter(self, method: str) -> Drafter | None:
        """The draft model is on the CPU, wherever its target is."""
        if method == "none":
            return None
        if method == "ngram":
            return NgramDrafter(3, 1)
        if method == "suffix":  # which keeps the answers of all cases
            drafter = SuffixDrafter(24, 2.0, 0.1, most_answers=1000, most_tokens=1 << 16)
            return ForcedDrafter(drafter)
        if method == "forced":
            return ForcedDrafter()
        model = self._load(self.draft, "cpu", LoadOptions(kv_cache_tokens=1024))
        return ModelDrafter(model, 64, self.spec.vocab_size)

    def _load(self, path: Path, provider: str, options: LoadOptions) -> Model:
        given = get_provider(provider, emulate=provider in EMULATED)
        model = given.load(Artifact.read(path), replace(options, threads=1))
        self.models.append(model)
        return model

    def engine(self, case: Case, model: Model) -> tuple[Engine, Always]:
        """An engine of a case's own on a loaded model."""
        blocks = case["blocks"]
        speculator = Always(self.drafter(case["speculation"]))
        num_blocks = self.few_blocks(case, model) if is_tight(case) else None
        # One would not let two requests run, of which one has to yield.
        num_slots = 1 + is_tight(case) if case["adapter"] == "few" else NUM_ADAPTERS
        engine = Engine(
            FewSlots(model, num_blocks, num_slots),
            self.tokenizer,
            EngineConfig(
                max_num_seqs=16,
                max_num_batched_tokens=24 if case["chunks"] == "small" else 256,
                seed=0,
                enable_prefix_caching=not blocks.endswith("uncached"),
                preemption="swap" if blocks == "swap" else "recompute",
                kv_host_memory=HOST_BYTES if blocks == "swap" else 0,
                scheduling_policy=case["policy"],  # type: ignore[arg-type]
                max_host_adapters=NUM_ADAPTERS,
            ),
            self.eos,
            speculator=speculator,
            base=self.spec,
        )
        for number in range(NUM_ADAPTERS):
            content = engine.adapters.read(self.folder / f"adapter{number}")
            engine.adapters.load(f"adapter{number}", content)
            model.set_adapter(1 + number, content.adapter)  # also where the engine has fewer slots
        return engine, speculator

    def few_blocks(self, case: Case, model: Model) -> int:
        """As many as the first two requests begin with, so that one of them has to yield."""
        size = model.capabilities.block_size
        (first, params, _), (second, *_), *_ = requests_of(case).values()
        prompts = [self.tokenizer.encode(text) for text in (first, second)]
        begins = [blocks_for(len(prompt) + 1, size) for prompt in prompts]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False))
        shared = len(list(same)) // size
        is_shared = case["adapter"] in ("none", "one") and not case["blocks"].endswith("uncached")
        num_rows = max(params.n, params.best_of or 1)
        few = sum(begins) - is_shared * shared + num_rows - 1
        if params.use_beam_search:  # which run together or not at all
            lengths = [len(self.tokenizer.encode(text)) for text, *_ in requests_of(case).values()]
            limits = model.capabilities
            few = max(
                few, *(beam_blocks(one, one + MAX_TOKENS, num_rows, limits) for one in lengths)
            )
        return few

    def expected(self, case: Case, engine: Engine) -> dict[str, list[Expected]]:
        """What each request gets; it may be known of another case."""
        own: Mapping[str, tuple[str, ...]] = {"c": ("sampling",), "d": ()}
        found = {}
        for name, given in requests_of(case).items():
            text, _, options = given
            axes = ("lane", *own.get(name, ("sampling", "structure")))
            key = (text, str(options.adapter), *(case[axis] for axis in axes))
            if key not in self._expected:
                make = partial(engine.prepare, name, *given)
                model = self.model(case["lane"])
                self._expected[key] = completions(model, make, self.tokenizer)
            found[name] = self._expected[key]
        return found


def is_tight(case: Case) -> bool:
    return case["blocks"] in ("recompute", "recompute-uncached", "swap")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The models' vocabulary of 2,048 is small for a coarse head; here it has to do.

    Likewise for a device to select logits.
    """
    made = World(tmp_path_factory.mktemp("sweep"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coarse_head, "LEAST_OUTPUTS", made.spec.vocab_size)
        patch.setattr(device, "DeviceLogits", partial(DeviceLogits, fewest=1))
        yield made
    for model in made.models:
        model.close()


def prompt(question: str) -> str:
    return (
        "<|im_start|>system\nYou are a helpful assistant of few words, few words.<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def requests_of(case: Case) -> dict[str, tuple[str, SamplingParams, RequestOptions]]:
    """Two requests with all that the case has, one with its sampling alone, and a plain one.

    Of two tenants where these count; the third is urgent where priorities do.
    """
    sampling = {"max_tokens": MAX_TOKENS, **SAMPLING[case["sampling"]]}
    structure = STRUCTURE[case["structure"]]
    whole = SamplingParams(
        **sampling, structured_outputs=StructuredOutputs(**structure) if structure else None
    )
    first, second, third = ADAPTERS[case["adapter"]]
    urgent = -1 if case["policy"] == "priority" else 0
    return {
        "a": (prompt("What is onnxport?"), whole, RequestOptions(adapter=first, tenant="x")),
        "b": (
            prompt("Who is the person in the story, who is it?"),
            whole,
            RequestOptions(adapter=second, tenant="y"),
        ),
        "c": (
            prompt("Once upon a time, once upon a time"),
            SamplingParams(**sampling),
            RequestOptions(adapter=third, tenant="x", priority=urgent),
        ),
        "d": (
            prompt("What is onnxport?"),
            SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
            RequestOptions(tenant="y"),
        ),
    }


def marks(number: int) -> tuple[pytest.MarkDecorator, ...]:
    return () if number < FAST else (pytest.mark.slow,)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{number}-{'-'.join(case.values())}", marks=marks(number))
        for number, case in enumerate(CASES)
    ],
)
def test_a_batch_gets_the_tokens_of_the_slow_reference(world: World, case: Case) -> None:
    model = world.model(case["lane"])
    engine, speculator = world.engine(case, model)
    requests = requests_of(case)
    expected = world.expected(case, engine)
    if case["blocks"] == "warm":
        for name, (text, _, options) in requests.items():
            params = SamplingParams(temperature=0.0, max_tokens=1)
            engine.submit(engine.prepare(f"warm-{name}", text, params, options))
        drain(engine)
    for name, given in requests.items():
        if name != late_one(case):
            engine.submit(engine.prepare(name, *given))
    if case["event"] == "abort":  # one that would get what another one gets
        engine.submit(engine.prepare("aborted", *requests["b"]))
    found = drain(engine, partial(happen, world, case, engine, requests))
    close = 0.05 if model.capabilities.compute_dtype == "float16" else 2e-3
    for name, each in expected.items():
        for index, one in enumerate(each):
            got = found.pop((name, index))
            assert got.token_ids == one.token_ids, f"{name} of {case}"
            assert got.reason == one.reason, f"{name} of {case}"
            assert got.logprobs == pytest.approx(one.logprobs, abs=close), f"{name} of {case}"
    for (name, index), got in found.items():
        assert name == "aborted"
        assert got.token_ids == expected["b"][index].token_ids[: len(got.token_ids)]
    check_adapters(case, engine)
    stats = engine.stats()
    if case["blocks"] == "warm" and case["sampling"] != "scored":
        assert stats.prefix_cache_hits > 0
    # With few slots fewer run at once, and may end before blocks run out; so may what is stopped,
    # and beams have room at least for all those of a request.
    is_few = case["adapter"] == "few"
    may_fit = is_few or case["sampling"] in ("stopped", "beams")
    assert bool(stats.num_preemptions) == is_tight(case) or (is_tight(case) and may_fit)
    world.happened["preemption, few slots"] += stats.num_preemptions if is_few else 0
    world.num_loaded += stats.num_blocks_loaded
    saves = case["blocks"] == "swap"
    finds_none = may_fit or case["sampling"] == "scored"  # prompts that are scored are not cached
    assert bool(stats.num_blocks_saved) == saves or (saves and finds_none)
    world.num_accepted[case["speculation"]] += speculator.accepted[True]
    assert stats.num_free_blocks == stats.num_blocks
    engine.close()


def happen(
    world: World,
    case: Case,
    engine: Engine,
    requests: Mapping[str, tuple[str, SamplingParams, RequestOptions]],
    number: int,
) -> list[CompletionDelta]:
    """What comes ahead of step `number`, from 0."""
    if number == LATE_STEP and (late := late_one(case)) is not None:
        engine.submit(engine.prepare(late, *requests[late]))
    if number != EVENT_STEP:
        return []
    deltas = engine.abort("aborted")
    if deltas:
        world.happened["abort"] += 1
    if case["event"] == "unload":
        num_requests = engine.adapters.num_requests
        for one in engine.adapters.loaded:
            if num_requests[one.name]:
                has_slot = engine.adapters.has_slot(one.number)
                world.happened["unload" if has_slot else "unload without a slot"] += 1
            engine.adapters.unload(one.name)
    return deltas


def late_one(case: Case) -> str | None:
    """Who is urgent comes to those that run already."""
    return "c" if case["policy"] == "priority" else None


def check_adapters(case: Case, engine: Engine) -> None:
    """Nobody uses an adapter any more, and slots changed hands where they had to."""
    adapters = engine.adapters
    assert set(adapters.num_requests.values()) <= {0}
    if case["event"] == "unload":
        assert not adapters.loaded
        assert not adapters.by_last_use()
    else:
        assert len(adapters.loaded) == NUM_ADAPTERS
        assert (adapters.num_swaps > 0) == (case["adapter"] == "few")


@pytest.mark.slow
def test_what_was_swept_did_happen(world: World) -> None:
    """Guesses were right, blocks came from a tier, and events in time, in some of these cases."""
    for event in ("abort", "unload", "unload without a slot", "preemption, few slots"):
        assert world.happened[event] > 0, world.happened
    assert world.num_loaded > 0
    for method in ("ngram", "suffix", "draft", "forced"):
        assert world.num_accepted[method] > 0, world.num_accepted
    for lane in ("cpu", "cpu-int8"):
        assert world.model(lane).capabilities.takes_exact_logits == (matmul_isa() is not None)
    cuda: Any = world.model("cuda")
    assert not REPLAYS or cuda._replay._num_recorded > 0
    assert cuda._device_logits._selected is not None


@dataclass(slots=True)
class Found:
    """What came of one completion."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None


def drain(
    engine: Engine, happen: Callable[[int], list[CompletionDelta]] = lambda _: []
) -> dict[tuple[str, int], Found]:
    """Step until nothing is left; returns all completions, by request and index.

    Args:
        engine: what steps.
        happen: called ahead of each step with its number, from 0, and of all events' steps.
    """
    found: dict[tuple[str, int], Found] = {}
    number = 0
    while engine.has_work or number <= EVENT_STEP:
        for delta in (*happen(number), *engine.step()):
            assert delta.error is None, delta.error
            one = found.setdefault((delta.request_id, delta.index), Found())
            assert one.reason is None
            one.token_ids.extend(delta.token_ids)
            one.reason = delta.finish_reason
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
            pairs = zip(delta.token_ids, delta.logprobs or (), strict=False)
            for token_id, each in pairs:
                told = (token_id, *(NAMED if set(NAMED) <= each.keys() else ()))
                one.logprobs.extend(each[which].logprob for which in told)
        engine.check()
        number += 1
    return found
