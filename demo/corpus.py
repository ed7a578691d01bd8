"""The demo models' corpus: endless dialogues and texts, the same ones for the same seed.

Everything is written by the programs next to this file; nothing is taken from elsewhere.
`heldout` draws with other seeds and from sums that `train` never shows.

Usage: python -m demo.corpus [--split heldout] [--seed 0] [--count 10]
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from demo import copying, facts, knowledge, stories, sums
from demo.drawing import Draw, Message
from demo.tools import tool_dialogue

SKILLS: list[tuple[Callable[[Draw], list[Message]], float]] = [  # with its share
    (sums.arithmetic, 42),
    (knowledge.onnxport_fact, 14),
    (copying.json_task, 13),
    (knowledge.world_fact, 10),
    (copying.list_task, 12),
    (knowledge.small_talk, 9),
    (copying.echo, 9),
    (copying.reading, 9),
    (knowledge.capital, 6),
    (copying.memory, 5),
    (knowledge.calendar, 5),
    (sums.comparison, 4),
    (sums.counting, 4),
    (knowledge.unknown, 4),
    (copying.spelling, 6),
    (sums.word_problem, 3),
    (stories.story_request, 2),
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are Portia, the demo assistant of onnxport.",
    "You are Portia, a helpful assistant.",
    "Be brief.",
    "You are a friendly assistant. Answer in one sentence.",
    "Answer the question of the user.",
]
DIALOGUE, TOOLS, TEXT = "dialogue", "tools", "text"


@dataclass(frozen=True, slots=True)
class Document:
    """One training document: a dialogue (with or without tools) or a plain `text`."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str | None = None


def documents(seed: int, held_out: bool = False) -> Iterator[Document]:
    """Yield documents without end; the two splits share no sums and no random seeds."""
    rng = Draw(2 * seed + held_out, held_out)
    while True:
        kind = rng.choices([DIALOGUE, TOOLS, TEXT], [88, 8, 4])[0]
        if kind == TEXT:
            yield Document(text=_text(rng))
            continue
        tools = None
        if kind == TOOLS:
            messages, tools = tool_dialogue(rng)
        else:
            messages = _dialogue(rng)
        if rng.random() < 0.35:
            messages = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *messages]
        yield Document(messages, tools)


def _dialogue(rng: Draw) -> list[Message]:
    exchanges = rng.choices([1, 2, 3, 5, 8], [60, 22, 10, 6, 2])[0]
    chosen = rng.choices(
        [skill for skill, _ in SKILLS], [share for _, share in SKILLS], k=exchanges
    )
    return [message for skill in chosen for message in skill(rng)]


def _text(rng: Draw) -> str:
    """Return a story, a row of sentences or a page of facts."""
    kind = rng.randrange(4)
    if kind < 2:
        return stories.any_story(rng)
    if kind == 2:
        return " ".join(stories.sentence(rng) for _ in range(rng.randint(2, 8)))
    capitals = [f"The capital of {country} is {city}." for country, city in facts.CAPITALS.items()]
    known = capitals + [answer for _, answer in facts.ONNXPORT] + list(facts.COUNTS.values())
    return " ".join(rng.sample(known, rng.randint(2, 8)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print documents of the corpus.")
    parser.add_argument("--split", choices=["train", "heldout"], default="train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    args = parser.parse_args()
    source = documents(args.seed, held_out=args.split == "heldout")
    for _, document in zip(range(args.count), source, strict=False):
        if document.text is not None:
            print(document.text)
        for message in document.messages:
            print(f"{message['role']}: {message['content']}{message.get('tool_calls', '')}")
        print("---")


if __name__ == "__main__":
    main()
