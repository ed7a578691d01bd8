"""Ask a demo model the fixed prompts, and measure how far it is right.

Usage, from the repository root:
    python -m demo.evaluate demo/model          # as stored
    python -m demo.evaluate demo/model --int4   # with simulated int4 weights
    python -m demo.evaluate demo/model --sums   # also accuracy on sums never seen in training
"""

import argparse
import json
import re
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.drawing import Draw
from demo.quantize import int4, int4_layers
from demo.sums import arithmetic

PROMPTS = Path(__file__).with_name("prompts.json")
Prompt = dict[str, Any]


def right(expect: dict[str, Any], reply: str) -> bool:
    """Say whether `reply` is what a prompt expects.

    `expect` has one or more of: "equals" (text), "contains" and "excludes" (texts, in any case),
    "json_equals" (value), "tool_call" ({"name", "arguments"}).

    Raises:
        ValueError: an unknown expectation.
    """
    if unknown := expect.keys() - _CHECKS.keys():
        raise ValueError(f"unknown expectations {sorted(unknown)}; allowed: {sorted(_CHECKS)}")
    return all(_CHECKS[kind](wanted, reply.strip()) for kind, wanted in expect.items())


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _is_tool_call(wanted: dict[str, Any], reply: str) -> bool:
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", reply)
    return match is not None and _parsed(match[1]) == wanted


_CHECKS = {
    "equals": lambda wanted, reply: reply == wanted,
    "contains": lambda wanted, reply: all(text.lower() in reply.lower() for text in wanted),
    "excludes": lambda wanted, reply: not any(text.lower() in reply.lower() for text in wanted),
    "json_equals": lambda wanted, reply: _parsed(reply) == wanted,
    "tool_call": _is_tool_call,
}


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the model in float32 and its tokenizer."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def untie(model: LlamaForCausalLM) -> None:
    """Give the output layer int4 weights of its own; the embedding table stays as it is."""
    model.lm_head.weight = nn.Parameter(int4(model.lm_head.weight.data))


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt,
    max_tokens: int = 120,
) -> str:
    """Return the greedy reply to a prompt's "messages" (and "tools"), or the rest of its "text"."""
    if "text" in prompt:
        text = prompt["text"]
    else:
        text = tokenizer.apply_chat_template(
            prompt["messages"],
            tools=prompt.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
        )
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(
        inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=max_tokens
    )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def sums_right(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int
) -> dict[str, list[bool]]:
    """Return, by operation, which of `count` calculations of the held-out split come out right."""
    rng = Draw(7, held_out=True)
    results: dict[str, list[bool]] = defaultdict(list)
    for _ in range(count):
        question, wanted = arithmetic(rng)
        reply = answer(model, tokenizer, {"messages": [question]}, max_tokens=24)
        operation = wanted["content"].split()[1]  # of "a + b = c."
        results[operation].append(reply == wanted["content"])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a demo model the fixed prompts.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--int4", action="store_true", help="round the weights to int4 first")
    parser.add_argument("--sums", action="store_true", help="also ask 300 held-out sums")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    args = parser.parse_args()
    model, tokenizer = load(args.folder)
    prompts = json.loads(args.prompts.read_text())
    if args.int4:
        untie(model)
    with int4_layers(model.model) if args.int4 else nullcontext():
        hits = 0
        for prompt in prompts:
            reply = answer(model, tokenizer, prompt)
            hits += (ok := right(prompt["expect"], reply))
            asked = prompt.get("text") or prompt["messages"][-1]["content"]
            print(f"{'ok   ' if ok else 'WRONG'} {asked!r} -> {reply!r}")
        print(f"{hits} of {len(prompts)} prompts right")
        if args.sums:
            results = sums_right(model, tokenizer, 300)
            print(f"held-out sums right: {sum(map(sum, results.values())) / 300:.1%}")
            for operation, answers in sorted(results.items()):
                print(f"  {operation} {sum(answers)} of {len(answers)}")


if __name__ == "__main__":
    main()
