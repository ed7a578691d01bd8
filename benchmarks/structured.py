"""Measure what structured output costs: steps with a grammar for every row against steps without.

    python -m benchmarks.structured --artifact DIR [--rows 1,8,32] [--rounds 3] [--forms …]
        [--temperature 1.0]

The artifact's weights are used with the tokenizer of `benchmarks/forms.py`, which fills its
vocabulary. Rounds alternate between with and without, and each has a form of its own, so that it
begins without any masks from before. With temperature 0 the steps without have a coarse head where
that pays. "Beside" is how long the masks of a step take, in the thread that computes them while the
model runs. `benchmarks.peers.openvino_structured` does the same with OpenVINO GenAI.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.forms import END, FORMS, form_of, make_tokenizer
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import open_model
from onnxport.serving import sampling
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.step_plan import StepPlan
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.tokenizer import Tokenizer

STEPS = 40
WARM_UP = 8
MOST_TOKENS = 400  # of a text; more than there are steps


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
                form = StructuredOutputs(**form_of(name, number))
                without.append(step_ms(engine, rows, number, None, arguments.temperature))
                with_form.append(step_ms(engine, rows, number, form, arguments.temperature))
            left, right = median(without), median(with_form)
            ratio = median(b / a for a, b in zip(without, with_form, strict=True))
            own = 1e3 * median(beside)
            print(f"| {name} | {rows} | {left:.2f} | {right:.2f} | {ratio:.3f} | {own:.2f} |")
    engine.close()


if __name__ == "__main__":
    main()
