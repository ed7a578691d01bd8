"""Skills of knowing: small talk, onnxport, the world, the calendar, and saying "I do not know"."""

from collections.abc import Callable

from demo import facts, words
from demo.drawing import Draw, Message, capitalized, casually, exchange, spin, with_article


def small_talk(rng: Draw) -> list[Message]:
    question, answer = rng.choice(facts.SMALL_TALK)
    return exchange(casually(rng, spin(rng, question)), answer)


def onnxport_fact(rng: Draw) -> list[Message]:
    question, answer = rng.choice(facts.ONNXPORT)
    return exchange(casually(rng, spin(rng, question)), answer)


def unknown(rng: Draw) -> list[Message]:
    question = spin(
        rng,
        rng.choice(facts.UNKNOWN) + "[?|?|]",
        year=rng.randint(1500, 2040),
        place=rng.choice([words.city(rng), rng.choice(list(facts.CAPITALS))]),
        thing=rng.choice([*rng.sample(words.THINGS, 2), words.made_up_word(rng)]),
        name=words.name(rng),
        country=words.made_up_word(rng, 2).capitalize(),
    )
    return exchange(casually(rng, question), facts.UNKNOWN_ANSWER)


def capital(rng: Draw) -> list[Message]:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    if rng.random() < 0.15:
        return exchange(*_capital_or_not(rng, country, city))
    ask = rng.choices(
        [
            "[What is|What's|Tell me|Do you know|Name|Which city is|Give me] the capital "
            "[city |||]of {country}[?|]",
            "[Capital of {country}|{country} capital|What is {country}'s capital][?|]",
            "[Which country has the capital {city}|{city} is the capital of which country|"
            "Of which country is {city} the capital][?|]",
        ],
        [70, 15, 15],
    )[0]
    question = spin(rng, ask, country=country, city=city)
    answer = "The capital of {country} is {city}."
    messages = exchange(casually(rng, question), answer.format(country=country, city=city))
    if rng.random() < 0.15:
        country, city = rng.choice(list(facts.CAPITALS.items()))
        follow_up = spin(rng, "[And of|And|What about|And what about] {c}[?|]", c=country)
        messages += exchange(follow_up, answer.format(country=country, city=city))
    return messages


def _capital_or_not(rng: Draw, country: str, city: str) -> tuple[str, str]:
    if rng.random() < 0.5:
        question = casually(rng, f"Is {city} the capital of {country}?")
        return question, f"Yes, the capital of {country} is {city}."
    other = rng.choice([name for name in facts.CAPITALS if name != country])
    question = casually(rng, f"Is {city} the capital of {other}?")
    return question, f"No, the capital of {other} is {facts.CAPITALS[other]}."


def world_fact(rng: Draw) -> list[Message]:
    kinds: list[Callable[[Draw], tuple[str, str]]] = [
        _colour, _sound, _opposite, _translation, _translation, _count, _examples, _kind,
    ]  # fmt: skip
    question, answer = rng.choice(kinds)(rng)
    return exchange(casually(rng, question), answer)


def _colour(rng: Draw) -> tuple[str, str]:
    thing, colour = rng.choice(list(facts.COLOURS_OF.items()))
    ask = "[What colour is|What color is|Which colour is|Which color has] {x}[?|]"
    return spin(rng, ask, x=thing), f"{capitalized(thing)} is {colour}."


def _sound(rng: Draw) -> tuple[str, str]:
    animal, sound = rng.choice(list(facts.SOUNDS.items()))
    ask = "[What sound does|Which sound does|What does] {x} [make|say][?|]"
    one = with_article(animal)
    return spin(rng, ask, x=one), f"{capitalized(one)} says {sound}."


def _opposite(rng: Draw) -> tuple[str, str]:
    one, other = rng.choice(list(facts.OPPOSITES.items()))
    ask = "[What is|What's|Give me|Tell me|Name] the opposite of [the word |]{x}[?|]"
    return spin(rng, ask, x=one), f"The opposite of {one} is {other}."


def _translation(rng: Draw) -> tuple[str, str]:
    language = rng.choice(list(facts.TRANSLATIONS))
    one, other = rng.choice(list(facts.TRANSLATIONS[language].items()))
    ask = (
        "[How do you say {x} in {y}?|How do I say {x} in {y}?|What is {x} in {y}?|Say {x} in {y}|"
        "Translate {x} to {y}|Translate {x} into {y}.|What is the {y} word for {x}?|{x} in {y}?]"
    )
    quoted = rng.choice([one, one, f'"{one}"'])
    return spin(rng, ask, x=quoted, y=language), f"{capitalized(one)} in {language} is {other}."


def _count(rng: Draw) -> tuple[str, str]:
    question, answer = rng.choice(list(facts.COUNTS.items()))
    return f"How many {question}?", answer


def _examples(rng: Draw) -> tuple[str, str]:
    kind, members = rng.choice(list(facts.KINDS.items()))
    count = rng.randint(2, min(5, len(members)))
    number = rng.choice([str(count), ["two", "three", "four", "five"][count - 2]])
    ask = "[Name|List|Give me|Tell me|Write|Can you name] {n} {k}[?|.|, please|]"
    return spin(rng, ask, n=number, k=kind), ", ".join(members[:count]) + "."


def _kind(rng: Draw) -> tuple[str, str]:
    actual = rng.choice(list(facts.KINDS))
    claimed = rng.choice([actual, rng.choice(list(facts.KINDS))])
    thing = rng.choice(facts.KINDS[actual])
    one = with_article("city" if claimed == "cities" else claimed.removesuffix("s"))
    if thing in facts.KINDS[claimed]:
        return f"Is {thing} {one}?", f"Yes, {thing} is {one}."
    return f"Is {thing} {one}?", f"No, {thing} is not {one}."


def calendar(rng: Draw) -> list[Message]:
    names, unit, whole = rng.choice([(facts.DAYS, "day", "week"), (facts.MONTHS, "month", "year")])
    i = rng.randrange(len(names))
    asked = rng.choice(["after", "before", "all", "length", "first"])
    if asked == "after":
        ask = "[What|Which] {u} [comes after|is after|follows] {x}[?|]"
        answer = f"{names[(i + 1) % len(names)]} comes after {names[i]}."
    elif asked == "before":
        ask = "[What|Which] {u} [comes before|is before] {x}[?|]"
        answer = f"{names[i - 1]} comes before {names[i]}."
    elif asked == "all":
        ask = "[List|Name|What are|Tell me|Write] [the|all] {u}s of the {w}[.|?|]"
        answer = ", ".join(names) + "."
    elif asked == "length":
        month, days = rng.choice(list(zip(facts.MONTHS, facts.MONTH_LENGTHS, strict=True)))
        ask = f"[How many days are in {month}|How many days does {month} have]?"
        answer = f"{month} has {days} days."
    else:
        ask = "[What|Which] is the first {u} of the {w}[?|]"
        answer = f"The first {unit} of the {whole} is {names[0]}."
    return exchange(casually(rng, spin(rng, ask, u=unit, w=whole, x=names[i])), answer)
