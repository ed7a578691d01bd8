"""Words of `words.txt`, and made-up ones, for tasks that copy their input."""

from collections.abc import Callable
from pathlib import Path
from random import Random

_LISTS = dict(
    line.split(": ") for line in Path(__file__).with_name("words.txt").read_text().splitlines()
)
NAMES, CITIES, COLOURS, NOUNS, ADJECTIVES, VERBS = (
    _LISTS[key].split() for key in ("names", "cities", "colours", "nouns", "adjectives", "verbs")
)
THINGS = [thing.replace("_", " ") for thing in _LISTS["things"].split()]
PLACES = [f"the {place}" for place in _LISTS["places"].split()]
_ONSETS, _VOWELS = _LISTS["onsets"].split(), _LISTS["vowels"].split()
_CODAS = ["" if coda == "-" else coda for coda in _LISTS["codas"].split()]


def made_up_word(rng: Random, syllables: int | None = None) -> str:
    """Return a lower-case word that means nothing, of 1 to 3 `syllables`."""
    count = syllables or rng.choice([1, 2, 2, 2, 3])
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count)
    )


def word(rng: Random) -> str:
    """Return a noun or adjective, one time in four a made-up one."""
    return made_up_word(rng) if rng.random() < 0.25 else rng.choice(NOUNS + ADJECTIVES)


def name(rng: Random) -> str:
    """Return a first name, one time in three a made-up one."""
    return made_up_word(rng).capitalize() if rng.random() < 0.35 else rng.choice(NAMES)


def city(rng: Random) -> str:
    """Return a city, one time in four a made-up one."""
    return made_up_word(rng, 2).capitalize() if rng.random() < 0.25 else rng.choice(CITIES)


def distinct(rng: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    """Return `count` different results of `draw(rng)`."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
