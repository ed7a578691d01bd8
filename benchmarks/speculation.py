"""Measure what speculation brings, and what it costs where it cannot help.

    python -m benchmarks.speculation --artifact MODEL --draft DRAFT

The same requests with and without, in one process; the two take turns batch by batch, and who
begins takes turns too, so that a machine whose speed varies does so for both. The first round
warms up.
Figures are tokens a second after the first token of each request, and the ratio within a round.
Each pair of outputs is compared: any difference ends the run.

* `text`: the model's own answers, greedy. Guesses by the draft model, by n-grams and by suffixes.
* `repeat`: the same requests again, of which suffix decoding has kept the answers. In its other
  cases it has none: they are let go before each batch.
* `repetition`: the same after a prompt that repeats itself.
* `random`: tokens drawn nearly at random, which no n-gram foretells.
* `wrong`: a drafter whose guesses are always there and never right: the worst that can be.
* `told`: a drafter that is asked, and then told what is right, so that a guess is right as often as
  `--accepted` says where those before it are. What a head brings that agrees so often with its
  model: weights that agree cannot be had everywhere, and what a head costs is the same.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from onnxport import LLM, SamplingParams
from onnxport.graphs.manifest import MTP_FOLDER
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.outputs import RequestOutput
from onnxport.serving.request import Request
from onnxport.serving.speculation.config import SpeculationConfig, SpeculationMethod
from onnxport.serving.speculation.drafter import Drafter
from onnxport.serving.speculation.forced import ForcedDrafter
from onnxport.serving.speculation.suffix import SuffixDrafter
from onnxport.serving.verify.machine import this_machine

TEXTS = (
    "What is onnxport?",
    "What is a paged KV cache?",
    "Count from 3 to 20.",
    "Tell me a story.",
    "Name the colours of the rainbow.",
    "How do I serve a model?",
    "What can you do?",
    "Who are you?",
)
REPEATED = "name: Ada, age: 36, city: London; name: Alan, age: 41, city: London; "
PROMPT_TOKENS = 64
HOT = 8.0  # a temperature at which hardly any token is likelier than another


class Asking:
    """A drafter that asks another one, and says something else."""

    def __init__(self, inner: Drafter, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self.is_cheap = inner.is_cheap
        self.num_behind = inner.num_behind
        self.forget = inner.forget
        self.close = inner.close


class Wrong(Asking):
    """Spoils the guesses of another one, and makes up those that it has not."""

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """Ask, and change every guess."""
        found = self._inner.propose(requests, lengths)
        if self.is_cheap:
            found = [tokens or [7] * length for tokens, length in zip(found, lengths, strict=True)]
        return [[(token_id + 1) % self._vocab_size for token_id in tokens] for tokens in found]


class Told(Asking):
    """Puts what comes in the place of another one's guesses, right or wrong."""

    def __init__(self, inner: Drafter, vocab_size: int, rate: float) -> None:
        super().__init__(inner, vocab_size)
        self._rate = rate
        self._dice = random.Random(0)
        self.future: dict[tuple[int, ...], tuple[int, ...]] = {}  # by prompt

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """Ask, and replace each guess."""
        found = self._inner.propose(requests, lengths)
        return [self._guess(*one) for one in zip(requests, found, strict=True)]

    def _guess(self, request: Request, found: Sequence[int]) -> list[int]:
        start = request.num_output_tokens
        right = self.future[request.prompt_token_ids][start : start + len(found)]
        told = [(one + (self._dice.random() >= self._rate)) % self._vocab_size for one in right]
        return [*told, *found[len(told) :]]


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    name: str
    method: SpeculationMethod
    rows: int

    @property
    def label(self) -> str:
        """The case in one word."""
        return f"{self.name}, {self.method}, {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured; tokens a second are medians over the rounds."""

    case: str
    plain_tokens_per_s: float
    tokens_per_s: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    drafted_per_token: float  # guesses for each token that came out
    accepted_share: float  # of the guesses


def prompts(case: Case, llm: LLM, folder: Path, number: int) -> list[list[int]]:
    """Return as many prompts, of token ids."""
    tokenizer = llm.get_tokenizer()
    if case.name == "random" or tokenizer is None:
        dice = random.Random(0)
        vocab = llm.capabilities.vocab_size
        return [[dice.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(number)]
    if case.name == "repetition":
        ids = tokenizer.encode(REPEATED * 12)
        return [ids[start % 7 :][: 3 * PROMPT_TOKENS] for start in range(number)]
    template = ChatTemplate.read(folder)
    if not template:
        return [tokenizer.encode(text) for text in islice(cycle(TEXTS), number)]
    texts = [template.render([{"role": "user", "content": text}], None, True) for text in TEXTS]
    ids_of_all = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return list(islice(cycle(ids_of_all), number))


def decoded(outputs: Sequence[RequestOutput]) -> tuple[int, float]:
    """Return tokens, and seconds from the first token of any request to the last one of all."""
    tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    starts = [output.metrics.first_token_time_s for output in outputs]
    ends = [output.metrics.last_token_time_s for output in outputs]
    assert None not in starts
    assert None not in ends
    return tokens, max(filter(None, ends)) - min(filter(None, starts))


@dataclass(slots=True)
class Run:
    """What one of the two models made of a round."""

    llm: LLM
    tokens: int = 0
    seconds: float = 0.0
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, given: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        """Run a batch."""
        prompts = [{"prompt_token_ids": one} for one in given]
        outputs = self.llm.generate(prompts, list(params))  # type: ignore[arg-type]
        tokens, seconds = decoded(outputs)
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.texts += [tuple(output.outputs[0].token_ids) for output in outputs]


def futures(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What comes after each prompt."""
    given = [{"prompt_token_ids": one} for one in prompts]
    outputs = llm.generate(given, list(params))  # type: ignore[arg-type]
    return {
        tuple(prompt): tuple(output.outputs[0].token_ids)
        for prompt, output in zip(prompts, outputs, strict=True)
    }


def forget_answers(drafter: Asking | ForcedDrafter) -> None:
    """Let go of the answers that suffix decoding has kept."""
    forced = drafter._inner if isinstance(drafter, Asking) else drafter
    assert isinstance(forced, ForcedDrafter)
    suffixes = forced._otherwise
    assert isinstance(suffixes, SuffixDrafter)
    assert suffixes.answers is not None
    suffixes.answers.clear()


def round_of(
    case: Case, plain: LLM, guessing: LLM, options: argparse.Namespace
) -> tuple[float, float]:
    """Run a case with both, in turns; returns tokens a second over its batches, of each."""
    temperature = HOT if case.name == "random" else 0.0
    ids = prompts(case, plain, options.artifact, options.streams * case.rows)
    params = [
        SamplingParams(
            temperature=temperature,
            seed=number,
            max_tokens=options.tokens,
            ignore_eos=case.name in ("random", "repetition", "told"),
        )
        for number in range(len(ids))
    ]
    runs = without, having = Run(plain), Run(guessing)
    drafter = guessing._engine._guessing._guesses._asker.drafter  # type: ignore[union-attr]
    if isinstance(drafter, Told):
        drafter.future = futures(plain, ids, params)
    for number in range(options.streams):
        batch = slice(number * case.rows, (number + 1) * case.rows)
        if case.method == "suffix" and case.name != "repeat":
            forget_answers(drafter)
        for run in runs[:: -1 if number % 2 else 1]:
            run.add(ids[batch], params[batch])
    if without.texts != having.texts:
        raise SystemExit(f"{case.label}: speculation has changed the output")
    return without.tokens / without.seconds, having.tokens / having.seconds


def measure(case: Case, options: argparse.Namespace) -> Figures:
    """Run a case with and without speculation, in turns."""
    if case.method in ("ngram", "suffix"):
        config = SpeculationConfig(
            case.method,
            options.num_speculative_tokens,
            disable_by_batch_size=options.most_rows,
        )
    else:
        config = SpeculationConfig(
            case.method,
            options.num_speculative_tokens,
            model={"eagle3": options.head, "draft_model": options.draft}.get(case.method),
            provider=options.draft_provider,
            threads=options.draft_threads,
            kv_cache_tokens=16_384,
            disable_by_batch_size=options.most_rows,
        )
    with ExitStack() as stack:
        plain, guessing = (
            stack.enter_context(
                LLM(
                    options.artifact,
                    provider=options.provider,
                    threads=options.threads,
                    kv_cache_tokens=16_384,
                    max_num_seqs=max(8, case.rows),
                    speculation=speculation,
                )
            )
            for speculation in (None, config)
        )
        asker = guessing._engine._guessing._guesses._asker  # type: ignore[union-attr]
        if case.name == "told":
            asker.drafter = Told(asker.drafter, plain.capabilities.vocab_size, options.accepted)
        if case.name == "wrong":
            asker.drafter = Wrong(asker.drafter, plain.capabilities.vocab_size)
        return compare(case, plain, guessing, options)


def compare(case: Case, plain: LLM, guessing: LLM, options: argparse.Namespace) -> Figures:
    """Alternate between two models and return the figures."""
    without, having = [], []
    before = guessing.stats()
    for number in range(options.rounds + 1):
        slow, fast = round_of(case, plain, guessing, options)
        if number:
            without.append(slow)
            having.append(fast)
        else:
            before = guessing.stats()
    after = guessing.stats()
    assert before.speculation is not None
    assert after.speculation is not None
    drafted = after.speculation.num_draft_tokens - before.speculation.num_draft_tokens
    accepted = after.speculation.num_accepted_tokens - before.speculation.num_accepted_tokens
    ratios = [fast / slow for slow, fast in zip(without, having, strict=True)]
    return Figures(
        case.label,
        median(without),
        median(having),
        median(ratios),
        min(ratios),
        max(ratios),
        drafted / (after.generation_tokens - before.generation_tokens),
        accepted / max(1, drafted),
    )


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Return what to measure."""
    methods: list[SpeculationMethod] = ["ngram", "suffix"]
    methods += ["draft_model"] if options.draft else []
    methods += ["eagle3"] if options.head else []
    methods += ["mtp"] if (options.artifact / MTP_FOLDER).is_dir() else []
    for rows in options.rows:
        for method in methods:
            yield Case("text", method, rows)
            yield Case("wrong", method, rows)
            if options.accepted is not None and method not in ("ngram", "suffix"):
                yield Case("told", method, rows)
        yield Case("repeat", "suffix", rows)
        for method in methods[:2]:
            yield Case("repetition", method, rows)
            yield Case("random", method, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="a draft model's artifact")
    parser.add_argument("--head", type=Path, help="a head's artifact")
    parser.add_argument("--accepted", type=float, help="the share of guesses that `told` has right")
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--draft-provider", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft-threads", type=int, help="as in the speculative config")
    parser.add_argument("--tokens", type=int, default=256, help="generated a request")
    parser.add_argument("--streams", type=int, default=8, help="batches a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-speculative-tokens", type=int, help="as in the speculative config")
    parser.add_argument("--most-rows", type=int, help="disable_by_batch_size")
    parser.add_argument("--only", help="the cases whose name has this in it")
    options = parser.parse_args()
    if options.accepted is not None and not (options.draft or options.head):
        parser.error("--accepted is of a draft model or head: name one with --draft or --head")
    print(json.dumps(asdict(this_machine())))
    print(
        "| case | without, tok/s | with, tok/s | ratio (low–high) | guesses a token | right |\n"
        "|---|---|---|---|---|---|",
        flush=True,
    )
    for case in cases(options):
        if options.only and options.only not in case.label:
            continue
        one = measure(case, options)
        print(
            f"| {one.case} | {one.plain_tokens_per_s:.4g} | {one.tokens_per_s:.4g} "
            f"| {one.ratio:.2f} ({one.lowest_ratio:.2f}–{one.highest_ratio:.2f}) "
            f"| {one.drafted_per_token:.2f} | {one.accepted_share:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
