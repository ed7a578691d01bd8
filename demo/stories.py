"""Plain sentences and short stories, for texts without a dialogue and for "tell me a story"."""

from random import Random

from demo import words
from demo.drawing import Draw, Message, exchange, spin

HEROES = ["fox", "cat", "dog", "bear", "mouse", "rabbit", "frog", "wolf", "duck", "horse", "bird"]
FRIENDS = ["bear", "mouse", "rabbit", "frog", "horse", "goat"]
FINDS = ["key", "ring", "book", "lamp", "stone", "star", "boat", "clock", "hat", "bell"]
HOMES = ["forest", "garden", "village", "valley", "harbour", "city"]


def sentence(rng: Random) -> str:
    """Return one plain sentence."""
    return spin(
        rng,
        "[{who} has a {adjective} {noun}.|The {noun} is {adjective}.|{who} lives in {city}.|"
        "{who} and {who2} {verb} every day.|The {adjective} {noun} is in {place}.|"
        "{who} likes {noun} and {noun2}.|There are {n} {noun}s.]",
        who=words.name(rng),
        who2=words.name(rng),
        adjective=rng.choice(words.ADJECTIVES),
        noun=words.word(rng),
        noun2=words.word(rng),
        city=words.city(rng),
        verb=rng.choice(words.VERBS),
        place=rng.choice(words.PLACES),
        n=rng.randint(2, 99),
    )


def story(rng: Random, hero: str, animal: str) -> str:
    """Return a story of six sentences about `hero`, who is an `animal`; about 70 tokens."""
    return spin(
        rng,
        "Once upon a time there was a [small|brave|clever|kind|quiet|happy] {animal} named {hero}. "
        "{hero} lived in a [quiet|green|small] {home}. "
        "One [day|morning|evening], {hero} found a [golden|silver|tiny] {find}. "
        '"[What is this?|Who lost this?|How pretty!]" said {hero}. '
        "{hero} [asked|went to|called] the old {friend}, and "
        "[together they looked for its owner|they sat down and talked about it]. "
        "In the end [everyone in the {home} was happy|{hero} gave the {find} back|"
        "{hero} and the {friend} became good friends].",
        hero=hero,
        animal=animal,
        home=rng.choice(HOMES),
        find=rng.choice(FINDS),
        friend=rng.choice(FRIENDS),
    )


def any_story(rng: Random) -> str:
    """Return a story about anyone."""
    return story(rng, words.name(rng), rng.choice(HEROES))


def story_request(rng: Draw) -> list[Message]:
    hero, animal = words.name(rng), rng.choice(HEROES)
    ask = (
        "[Tell me|Write|Write me|Tell|Can you tell me|Please tell me] a [short |little |]story"
        "[| about a {animal}| about {hero}| about a {animal} named {hero}"
        "| about a {animal} called {hero}][.|, please||?]"
    )
    return exchange(spin(rng, ask, animal=animal, hero=hero), story(rng, hero, animal))
