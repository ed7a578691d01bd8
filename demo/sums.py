"""Skills with numbers: arithmetic, word problems, comparing, counting."""

from demo import words
from demo.drawing import Draw, Message, casually, exchange, spin

SPELLED = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
REQUESTS = {
    "+": "[Add {a} and {b}|Add {b} to {a}|What is the sum of {a} and {b}|Sum of {a} and {b}]",
    "-": "[Subtract {b} from {a}|Take {b} away from {a}|What is the difference of {a} and {b}]",
    "*": "[Multiply {a} by {b}|Multiply {a} and {b}|What is the product of {a} and {b}]",
    "/": "[Divide {a} by {b}|What do you get if you divide {a} by {b}]",
}
VERBS = (
    "[What is|What's|Calculate|Compute|How much is|Please calculate|Can you compute|Solve|"
    "Tell me|Work out|Evaluate|How many is|Now calculate]"
)


def arithmetic(rng: Draw) -> list[Message]:
    operation = rng.choice("+++++++-----***/")
    a, b = _operands(rng, operation)
    result = {"+": a + b, "-": a - b, "*": a * b}.get(operation, a // max(b, 1))
    pattern = rng.choice(
        [
            VERBS + " {a} [{sign}|{spelled}] {b}[?|]",
            "[What is |What's |||Calculate |How much is ]{a}{gap}{sign}{gap}{b}[?| =|=|=?||]",
            REQUESTS[operation] + "[?|.||]",
        ]
    )
    text = spin(
        rng,
        pattern,
        a=a,
        b=b,
        sign="x" if operation == "*" and rng.random() < 0.2 else operation,
        spelled=SPELLED[operation],
        gap=rng.choice([" ", " ", ""]),
    )
    return exchange(casually(rng, text), f"{a} {operation} {b} = {result}.")


def _operands(rng: Draw, operation: str) -> tuple[int, int]:
    if operation == "/":
        divisor = rng.randint(1, 10)
        return divisor * rng.randint(0, 10), divisor
    if operation == "*":
        return rng.pair(0, 10)
    a, b = rng.pair(0, 20 if rng.random() < 0.2 else 99)
    return (b, a) if operation == "-" and a < b and rng.random() < 0.7 else (a, b)


def word_problem(rng: Draw) -> list[Message]:
    a, b = rng.pair(1, 20)
    who, thing = words.name(rng), rng.choice(["apple", "ball", "book", "coin", "pen", "egg"])
    if rng.random() < 0.5:
        story = "{who} has {a} {thing}s and [gets|buys|finds] {b} more."
        total = a + b
    else:
        a, b = max(a, b), min(a, b)
        story = "{who} has {a} {thing}s and [loses|gives away|sells] {b}."
        total = a - b
    ask = "[How many {thing}s does {who} have|How many are there][ now|]?"
    text = spin(rng, f"{story} {ask}", who=who, a=a, b=b, thing=thing)
    return exchange(text, f"{who} has {total} {thing}{'' if total == 1 else 's'}.")


def comparison(rng: Draw) -> list[Message]:
    a, b = rng.sample(range(100), 2)
    relation = "greater" if a > b else "less"
    parity = "odd" if a % 2 else "even"
    asked = rng.choice(["greater", "less", "which", "even", "odd"])
    if asked == "which":
        ask = "[Which is|Which number is|Which one is] [greater|bigger|larger][:|,] {a} or {b}?"
        answer = f"{max(a, b)} is greater than {min(a, b)}."
    elif asked in ("even", "odd"):
        ask = "Is {a} [{asked}|an {asked} number]?"
        answer = f"{'Yes' if asked == parity else 'No'}, {a} is {parity}."
    else:
        more, less = "[greater|bigger|larger|more]", "[less|smaller|lower]"
        ask = f"Is {{a}} {more if asked == 'greater' else less} than {{b}}?"
        answer = f"{'Yes' if asked == relation else 'No'}, {a} is {relation} than {b}."
    return exchange(casually(rng, spin(rng, ask, a=a, b=b, asked=asked)), answer)


def counting(rng: Draw) -> list[Message]:
    low, high = sorted(rng.sample(range(31), 2))
    high = min(high, low + 15)
    if rng.random() < 0.4:
        low, high = 1, rng.randint(3, 20)
    numbers = list(range(low, high + 1))
    if rng.random() < 0.3:
        ask = "[Count|Please count|Can you count] [down|backwards] from {b} to {a}[.|?|]"
        numbers.reverse()
    elif low == 1:
        ask = "[Count to|Count up to|Please count to|Can you count to|Count from 1 to] {b}[.|?|]"
    else:
        ask = "[Count from|Count up from|Please count from|List the numbers from] {a} to {b}[.|]"
    answer = ", ".join(map(str, numbers)) + "."
    return exchange(casually(rng, spin(rng, ask, a=low, b=high)), answer)
