"""Measure what structured output costs: steps with a grammar for every row against steps without.

    python -m benchmarks.structured --artifact DIR [--rows 1,8,32] [--rounds 3] [--forms …]
        [--temperature 1.0]

The artifact's weights are used with a made-up byte-level tokenizer that fills its vocabulary, so
that an artifact of random weights, which has no tokenizer worth its name, can be measured with as
many tokens as the real model has. Rounds alternate between with and without, and each has a form of
its own, so that it begins without any masks from before. With temperature 0 the steps without have
a coarse head where that pays, and those with a grammar have not. "Beside" is how long the masks
of a step take, in the thread that computes them while the model runs.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import open_model
from onnxport.serving import sampling
from onnxport.serving.config import EngineConfig
from onnxport.serving.draft import StepPlan
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.tokenizer import Tokenizer

STEPS = 40
WARM_UP = 8
MOST_TOKENS = 400  # of a text; more than there are steps
END = "<|end|>"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "string", "format": "date"},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "parent": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    },
    "required": ["name", "born", "score", "tags", "parent"],
    "additionalProperties": False,
}
FORMS = ("json schema", "json object", "regex", "regex that counts")


def form_of(name: str, number: int) -> StructuredOutputs:
    """Return a form that no round before had, so that no masks of it are known yet."""
    if name == "regex":
        return StructuredOutputs(regex=rf"([a-z]{{2,8}} [0-9]{{1,3}}[,;] )+END{number}")
    if name == "regex that counts":
        return StructuredOutputs(regex=rf"([a-z]{{2,8}} [0-9]{{1,3}}[,;] ){{{500 + number}}}")
    if name == "json object":  # as json_object is, but for a title, which changes nothing
        return StructuredOutputs(json={"type": "object", "title": str(number)})
    return StructuredOutputs(json={"type": "array", "items": RECORD, "minItems": 200 + number})


def make_tokenizer(vocab_size: int) -> FastTokenizer:
    """Return a byte-level tokenizer of as many tokens: bytes, words, punctuation, digits."""
    dice = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    weights = [12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    ends = ["", "", "", '":', '",', ",", ".", "}", "]", '"', "\u010a", "()", ";"]
    vocab = {
        char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    while len(vocab) < vocab_size - 1:
        word = "".join(dice.choices(letters, weights, k=dice.randint(1, 9)))
        if dice.random() < 0.1:
            word = str(dice.randrange(10**5))
        word = word.capitalize() if dice.random() < 0.2 else word
        start = dice.choice(["", "\u0120", "\u0120", '"', '{"', "\u0120\u0120"])
        vocab.setdefault(start + word + dice.choice(ends), len(vocab))
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def open_with_tokenizer(path: Path) -> Engine:
    """Return an engine of the artifact's model and the tokenizer above."""
    size = Artifact.read(path).manifest.model.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(size).save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        tokenizer = Tokenizer.from_folder(Path(folder), frozenset({size - 1}))
    model = open_model(path, "cpu", LoadOptions())
    return Engine(model, tokenizer, EngineConfig(max_num_seqs=64))


def step_ms(
    engine: Engine, rows: int, seed: int, form: StructuredOutputs | None, temperature: float
) -> float:
    """Return the median milliseconds of a step in which `rows` sequences decode.

    A text may end by itself, as JSON does: then another one takes its place, and the step that
    reads its prompt does not count.
    """
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=MOST_TOKENS, structured_outputs=form
    )
    running: set[str] = set()
    numbers = count()
    times: list[float] = []
    while len(times) < STEPS + WARM_UP:
        is_whole = len(running) == rows
        while len(running) < rows:
            number = next(numbers)
            running.add(str(number))
            prompt = [5 + number % 1000, 6 + number // 1000, 7]
            engine.submit(engine.prepare(str(number), prompt, params))
        start = time.perf_counter()
        deltas = engine.step()
        if is_whole and len(deltas) == rows:
            times.append(time.perf_counter() - start)
        running -= {delta.request_id for delta in deltas if delta.finish_reason}
    for name in running:
        engine.abort(name)
    return 1e3 * median(times[WARM_UP:])


def timed(call: Callable[[StepPlan], Any], seconds: list[float]) -> Callable[[StepPlan], Any]:
    """Return `call`, which adds to `seconds` what each call takes."""

    def run(plan: StepPlan) -> Any:
        start = time.perf_counter()
        masks = call(plan)
        seconds.append(time.perf_counter() - start)
        return masks

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0, help="of all rows; 0: greedy")
    parser.add_argument("--forms", default=",".join(FORMS), help="some of them, by commas")
    arguments = parser.parse_args()
    forms = arguments.forms.split(",")
    if unknown := set(forms) - set(FORMS):
        parser.error(f"no form {', '.join(sorted(unknown))}; there are {', '.join(FORMS)}")
    engine = open_with_tokenizer(arguments.artifact)
    grammar_masks = sampling.grammar_masks
    numbers = count(1)
    print("| form | rows | step ms without | with | ratio | masks beside ms |")
    print("|---|---|---|---|---|---|")
    for name in forms:
        for rows in map(int, arguments.rows.split(",")):
            without, with_form = [], []
            beside: list[float] = []
            sampling.grammar_masks = timed(grammar_masks, beside)
            for _ in range(arguments.rounds):
                number = next(numbers)
                form = form_of(name, number)
                without.append(step_ms(engine, rows, number, None, arguments.temperature))
                with_form.append(step_ms(engine, rows, number, form, arguments.temperature))
            left, right = median(without), median(with_form)
            ratio = median(b / a for a, b in zip(without, with_form, strict=True))
            own = 1e3 * median(beside)
            print(f"| {name} | {rows} | {left:.2f} | {right:.2f} | {ratio:.3f} | {own:.2f} |")
    engine.close()


if __name__ == "__main__":
    main()
