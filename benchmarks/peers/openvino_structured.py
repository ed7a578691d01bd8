"""Measure what structured output costs OpenVINO GenAI: as `benchmarks.structured` does for ours.

    PEER_PYTHON -m benchmarks.peers.openvino_structured MODEL_IR [--rows 1,8] [--rounds 3]
        [--forms …] [--temperature 0]

MODEL_IR is as for `benchmarks.peers.openvino_genai`; its weights are used with the tokenizer of
`benchmarks/forms.py`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from openvino_tokenizers import convert_tokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.forms import END, FORMS, form_of, make_tokenizer

STEPS, WARM_UP = 40, 8
MOST_TOKENS = 400


class Pipeline:
    """The pipeline, with a tokenizer that fills the model's vocabulary."""

    def __init__(self, model: Path, threads: int, folder: Path) -> None:
        size = json.loads((model / "config.json").read_text())["vocab_size"]
        self._end = size - 1
        for file in model.glob("openvino_model.*"):
            (folder / file.name).symlink_to(file.resolve())
        for name in ("config.json", "generation_config.json"):
            (folder / name).write_text((model / name).read_text())
        words = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(size), eos_token=END)
        words.save_pretrained(folder)
        converted = convert_tokenizer(words, with_detokenizer=True)
        for made, kind in zip(converted, ("tokenizer", "detokenizer"), strict=True):
            openvino.save_model(made, folder / f"openvino_{kind}.xml")
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = 1000
        scheduler.max_num_batched_tokens = 2048
        options = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", options)
        self._numbers = count()

    def step_ms(self, rows: int, form: dict[str, Any] | None, temperature: float) -> float:
        """Return the median milliseconds of a step in which `rows` sequences decode.

        Where a text ends by itself, another one takes its place, and the step that reads its
        prompt does not count.
        """
        running: list[genai.GenerationHandle] = []
        times: list[float] = []
        while len(times) < STEPS + WARM_UP:
            is_whole = len(running) == rows
            while len(running) < rows:
                running.append(self._add(form, temperature))
            start = time.perf_counter()
            self._pipeline.step()
            elapsed = time.perf_counter() - start
            came = sum(one.can_read() for one in running)
            for one in running:
                while one.can_read():
                    one.read()
            if is_whole and came == rows:
                times.append(elapsed)
            running = [one for one in running if not self._is_over(one)]
        for one in running:
            one.stop()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return 1e3 * median(times[WARM_UP:])

    def _add(self, form: dict[str, Any] | None, temperature: float) -> genai.GenerationHandle:
        number = next(self._numbers)
        config = genai.GenerationConfig()
        config.max_new_tokens = MOST_TOKENS
        config.ignore_eos = form is None
        config.eos_token_id = self._end
        config.stop_token_ids = {self._end}
        if temperature > 0:
            config.do_sample, config.temperature, config.rng_seed = True, temperature, number
        if form is not None:
            given = {"json_schema": json.dumps(form["json"])} if "json" in form else form
            config.structured_output_config = genai.StructuredOutputConfig(**given)
        prompt = [5 + number % 1000, 6 + number // 1000, 7]
        return self._pipeline.add_request(
            number, openvino.Tensor(np.array([prompt], np.int64)), config
        )

    def _is_over(self, handle: genai.GenerationHandle) -> bool:
        return handle.get_status() != genai.GenerationStatus.RUNNING


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=1.0, help="of all rows; 0: greedy")
    parser.add_argument("--forms", default=",".join(FORMS), help="some of them, by commas")
    arguments = parser.parse_args()
    numbers = count(1)
    print("| form | rows | step ms without | with | ratio |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        pipeline = Pipeline(arguments.model, arguments.threads, Path(folder))
        for name in arguments.forms.split(","):
            for rows in map(int, arguments.rows.split(",")):
                without, with_form = [], []
                for _ in range(arguments.rounds):
                    form = form_of(name, next(numbers))
                    without.append(pipeline.step_ms(rows, None, arguments.temperature))
                    with_form.append(pipeline.step_ms(rows, form, arguments.temperature))
                ratio = median(b / a for a, b in zip(without, with_form, strict=True))
                left, right = median(without), median(with_form)
                print(f"| {name} | {rows} | {left:.2f} | {right:.2f} | {ratio:.3f} |", flush=True)
        del pipeline


if __name__ == "__main__":
    main()
