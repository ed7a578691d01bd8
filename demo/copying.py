"""Skills of handling what the user wrote: lists, echoes, reading, remembering, JSON."""

import json

from demo import facts, words
from demo.drawing import Draw, Message, exchange, spin
from demo.knowledge import capital, small_talk
from demo.stories import sentence
from demo.sums import arithmetic

LIST_REQUESTS = {
    "reverse": "[Reverse|Reverse this list|Reverse the list|Reverse the order of]",
    "sort": "[Sort|Sort these numbers|Sort the numbers|Put in order]",
    "first": "[What is|Give me] the first [item|word] of [this list|the list]",
    "last": "[What is|Give me] the last [item|word] of [this list|the list]",
    "count": "[How many items are in|How many words are in] [this list|the list]",
    "bullets": "[Write as bullet points|Make a bullet list of|Turn into bullet points]",
    "join": "[Join with and|Write as a sentence with and|Join with the word and]",
}
JSON_REQUESTS = (
    "[Give me JSON with {k}: {f}|Give me a JSON object with {k}: {f}|Return JSON with {k}: {f}|"
    "JSON with {k}: {f}|Extract {k} as JSON: {f}|Extract {k} as JSON from: {f}|"
    "{f}. Give me JSON with {k}|Write JSON with {k}: {f}|Make JSON with the keys {k}: {f}|"
    "Answer in JSON with {k}: {f}|{f}. Return {k} as JSON|Give me JSON with keys {k}: {f}|"
    "Turn this into JSON with {k}: {f}|{f}. Give me JSON with {k}]"
)
JSON_FACTS = [  # a sentence, and the keys of the JSON object that repeats it
    ("{name} is {age}", "name age"),
    ("{name} is {age} years old", "name age"),
    ("My name is {name} and I am {age}", "name age"),
    ("{name} lives in {city}", "name city"),
    ("{name} is from {city}", "name city"),
    ("{name} is {age} and lives in {city}", "name age city"),
    ("The {product} costs {price}", "product price"),
    ("A {product} for {price} euros", "product price"),
    ("The {item} is {colour}", "item colour"),
    ("{owner} has a {colour} {item}", "owner item colour"),
    ("Meet {name} in {city} on {day}", "name city day"),
    ("{name} arrives on {day}", "name day"),
    ("{count} {item}s", "item count"),
]


def list_task(rng: Draw) -> list[Message]:
    if rng.random() < 0.3:
        numbers = range(1, 100 if rng.random() < 0.3 else 10)
        items = [str(n) for n in rng.sample(numbers, rng.randint(3, 5))]
        task = rng.choice([*LIST_REQUESTS, "sort", "sort"])
    else:
        items = words.distinct(rng, words.word, rng.randint(2, 6))
        task = rng.choice([key for key in LIST_REQUESTS if key != "sort"] + ["reverse"] * 2)
    listed = ", ".join(items)
    answer = {
        "reverse": lambda: ", ".join(reversed(items)),
        "sort": lambda: ", ".join(sorted(items, key=int)),
        "first": lambda: items[0],
        "last": lambda: items[-1],
        "count": lambda: str(len(items)),
        "bullets": lambda: "\n".join(f"- {item}" for item in items),
        "join": lambda: ", ".join(items[:-1]) + " and " + items[-1],
    }[task]()
    request = spin(rng, LIST_REQUESTS[task] + "[: |: |:\n]")
    return exchange(request + listed + rng.choice(["", "", "."]), answer)


def echo(rng: Draw) -> list[Message]:
    if rng.random() < 0.4:
        text, times = words.word(rng), rng.randint(2, 6)
        number = rng.choice([str(times), ["two", "three", "four", "five", "six"][times - 2]])
        ask = "[Say|Repeat|Write|Say the word|Write the word] {x} {n} times[.|]"
        return exchange(spin(rng, ask, x=text, n=number), " ".join([text] * times))
    if rng.random() < 0.5:
        text = " ".join(words.distinct(rng, words.word, rng.randint(1, 5)))
    else:
        text = sentence(rng)
    ask = "[Repeat|Repeat after me|Say|Please say|Please repeat|Echo|Copy this|Say exactly]"
    return exchange(spin(rng, ask + "[: |: | ]") + text, text)


def spelling(rng: Draw) -> list[Message]:
    text = rng.choice(words.NOUNS + words.ADJECTIVES + words.COLOURS)
    task = rng.choice(["capitals", "capitals", "capitals", "spell", "first"])
    ask, answer = {
        "capitals": (
            "[Write {x} in capital letters|Write {x} in uppercase|Uppercase {x}|Uppercase: {x}|"
            "Uppercase the word {x}|Make {x} uppercase|Convert {x} to uppercase]",
            text.upper(),
        ),
        "spell": ("[Spell|Spell the word|How do you spell|Please spell] {x}[.|?|]", "-".join(text)),
        "first": ("[What is the first letter of|First letter of] [the word |]{x}[?|]", text[0]),
    }[task]
    return exchange(spin(rng, ask, x=text), answer)


def reading(rng: Draw) -> list[Message]:
    """Write two like sentences about two people, and ask about one of them."""
    noun = rng.choice(words.NOUNS)
    statement, ask, draw = rng.choice(
        [
            ("{who} is in {x}.", "Where is {who}?", lambda r: r.choice(words.PLACES)),
            ("{who} has a {x}.", "What does {who} have?", words.word),
            (
                f"The {noun} of {{who}} is {{x}}.",
                f"[What colour|What color|Which colour] is the {noun} of {{who}}?",
                lambda r: r.choice(words.COLOURS),
            ),
            (
                "{who} is {x} years old.",
                "[How old is {who}?|What is the age of {who}?]",
                lambda r: str(r.randint(1, 99)),
            ),
            (
                "{who} lives in {x}.",
                "[Where does {who} live?|In which city does {who} live?]",
                words.city,
            ),
        ]
    )
    people, values = words.distinct(rng, words.name, 2), words.distinct(rng, draw, 2)
    told = [statement.format(who=w, x=x) for w, x in zip(people, values, strict=True)]
    i = rng.randrange(2)
    return exchange(" ".join(told) + " " + spin(rng, ask, who=people[i]), told[i])


def memory(rng: Draw) -> list[Message]:
    """Tell a fact in one turn, and mostly ask for it in a later one."""
    draw, tell, reply, ask, answer = rng.choice(
        [
            (
                words.name,
                "[My name is|I am|Hello, I am|Hi, my name is|Hello! My name is|Call me] {x}[.||!]",
                "Nice to meet you, {x}!",
                "[What is my name|What's my name|Who am I|Do you remember my name][?|]",
                "Your name is {x}.",
            ),
            (
                lambda r: str(r.randint(10, 9999)),
                "[Remember|Remember this|Please remember]: the [code|number|pin] is {x}.",
                "I will remember it.",
                "[What is|What was|Tell me] the [code|number|pin][?|]",
                "It is {x}.",
            ),
            (
                words.city,
                "I live in {x}[.|]",
                "{x} is a good place to live.",
                "[Where do I live|In which city do I live][?|]",
                "You live in {x}.",
            ),
            (
                words.word,
                "I like {x}[.|]",
                "It is good to like {x}.",
                "[What do I like|Do you know what I like][?|]",
                "You like {x}.",
            ),
        ]
    )
    x = draw(rng)
    messages = exchange(spin(rng, tell, x=x), reply.format(x=x))
    if rng.random() < 0.4:
        messages += rng.choice([small_talk, arithmetic, capital])(rng)
    if rng.random() < 0.8:
        messages += exchange(spin(rng, ask), answer.format(x=x))
    return messages


def json_task(rng: Draw) -> list[Message]:
    if rng.random() < 0.2:
        items = words.distinct(rng, words.word, rng.randint(2, 5))
        ask = "[Give me a JSON array of|Write as a JSON array|Make a JSON list of|JSON array]"
        request = spin(rng, ask + "[: |: | ]") + ", ".join(items) + rng.choice(["", "."])
        return exchange(request, json.dumps(items))
    if rng.random() < 0.25:  # any keys and values: pure copying
        keys = words.distinct(rng, words.word, rng.randint(1, 3))
        value = {key: rng.choice([words.word(rng), rng.randint(0, 99)]) for key in keys}
        link = rng.choice([" ", " is ", " = ", ": "])
        fact = ", ".join(f"{key}{link}{item}" for key, item in value.items())
    else:
        pattern, wanted = rng.choice(JSON_FACTS)
        drawn = {
            "name": words.name(rng), "owner": words.name(rng), "city": words.city(rng),
            "product": words.word(rng), "item": words.word(rng), "day": rng.choice(facts.DAYS),
            "colour": rng.choice(words.COLOURS), "age": rng.randint(1, 99),
            "price": rng.randint(1, 99), "count": rng.randint(2, 99),
        }  # fmt: skip
        value = {key: drawn[key] for key in wanted.split()}
        fact = pattern.format(**drawn)
    keys = list(value)
    named = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
    request = spin(rng, JSON_REQUESTS, k=named, f=fact) + rng.choice(["", ".", ""])
    return exchange(request, json.dumps(value))
