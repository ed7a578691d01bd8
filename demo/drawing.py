"""The means by which every skill writes its exchange: seeded draws and a small notation."""

import re
from random import Random
from typing import Any

Message = dict[str, Any]  # as in an OpenAI request: role, content, perhaps tool_calls

OPENINGS = ("Please tell me, ", "Tell me, ", "Hey, ", "Portia, ", "So, ", "And ",
            "I want to know: ", "Can you tell me: ", "Quick question: ", "Hi! ")  # fmt: skip


class Draw(Random):
    """Seeded randomness that knows its split: each number pair belongs to one of the two.

    Args:
        seed: makes everything drawn repeatable.
        held_out: draw number pairs from the eleventh that training never shows.
    """

    def __init__(self, seed: int, held_out: bool = False) -> None:
        super().__init__(seed)
        self.held_out = held_out

    def pair(self, low: int, high: int) -> tuple[int, int]:
        """Return two integers in [low, high] that belong to this split."""
        while True:
            a, b = self.randint(low, high), self.randint(low, high)
            if is_held_out(a, b) == self.held_out:
                return a, b


def is_held_out(a: int, b: int) -> bool:
    """Say whether training never draws `a` and `b` in this order.

    Modulo 11, so that every pair of last digits and of first digits is still seen. The other order
    may be drawn: training may show b + a, and a - b where it swapped the two of a difference.
    """
    return (2 * a + 4 * b) % 11 == 5


def spin(rng: Random, pattern: str, **slots: object) -> str:
    """Choose in every "[a|b]" of `pattern`, then fill in its "{slots}"."""
    chosen = re.sub(r"\[([^][]*)\]", lambda group: rng.choice(group[1].split("|")), pattern)
    return chosen.format(**slots)


def exchange(user: str, assistant: str) -> list[Message]:
    """Return one question and its answer."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def casually(rng: Random, question: str) -> str:
    """Type `question` the way people do: sometimes in lower case, bare, or with manners."""
    if rng.random() < 0.08 and question.endswith("?"):
        question = rng.choice(OPENINGS) + question[0].lower() + question[1:]
    if rng.random() < 0.2:
        question = question.rstrip("?.!")
    return question.lower() if rng.random() < 0.15 else question


def capitalized(text: str) -> str:
    """Return `text` with a capital first letter and the rest as it is."""
    return text[0].upper() + text[1:]


def with_article(noun: str) -> str:
    """Return `noun` after "a" or "an"."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun
