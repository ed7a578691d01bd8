"""llama.cpp's grammars: every text that one has may be written, and no other."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import RequestError
from onnxport.serving.grammar import GrammarError
from onnxport.serving.structured import repeats
from onnxport.serving.structured.compiler import compile_grammar
from onnxport.serving.structured.gbnf import lark_of
from onnxport.serving.structured.spec import StructuredOutputs
from tests.serving.structured import LIMITS, accepts, compiled, ids_of, tokenizer, vocabulary
from tests.serving.tokenizers_for_tests import EOS, TOOL
from tests.tiers import examples

# A part is a text, a list of alternatives, each a list of parts, a name, or a part with counts.
Part = Any
NAMES = ("root", "a", "b-c")
JSON = r"""
root  ::= value
value ::= object | list | text | number | ("true" | "false" | "null") ws

object ::= # of texts
  "{" ws (
    text ":" ws value
    ("," ws text ":" ws value)*
  )? "}" ws
list   ::= "[" ws ( value ( "," ws value )* )? "]" ws
text   ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root  ::= (sum "=" ws term "\n")+
sum   ::= term ([-+*/] term)*
term  ::= name | num | "(" ws sum ")" ws
name  ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""

RECURSIVE = 'nested ::= "<" nested? ">"'  # which makes a grammar rules, and no terminal


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            JSON,
            ['{"a": [1, 2.5, "x\\u00e4/"],\n\t"b": true}', "[]", '"é"', "-0"],
            ["{", "01", '"\n"'],
        ),
        (SUMS, ["x=1\n", "x=1\na+b*2=(c)\n\n", "1+1=2 \n \n"], ["x=1", "=1\n", "x==1\n"]),
        ('root ::= [a-z]+ "x"', ["ax", "axbx"], ["x", "ab"]),
        ('root ::= word "x"\nword ::= [a-z]+', ["ax", "axbx"], ["x", "ab"]),
        (
            'root ::= (one | two)+ "."\none ::= "x" [a-z]*\ntwo ::= "xy" [0-9]+',
            ["xaxy1xy2."],
            ["xy1"],
        ),
        ("root ::= .{2}", ["a\n", "é!"], ["a", "abc"]),
        (r'root ::= "\u0041\U0001F600\x42" [\u00e4\x43]', ["A😀Bä", "A😀BC"], ["A😀B", "A😀BD"]),
        (r'root ::= "[\]\\[" [\]\\a]', ["[]\\[]", "[]\\[\\"], ["[]\\["]),
        (r'root ::= "\\u0041" "\""', ['\\u0041"'], ['A"']),
        ("root ::= [a&&b~~c/]+", ["a&b~c/"], ["d"]),
        ('root ::= yes | no\r\nyes ::= "y"\r\nno ::= "n"\r\n', ["y", "n"], ["yn"]),
        (
            'root ::= Foo foo foo-bar foo_bar start\nFoo ::= "1"\nfoo ::= "2"\nfoo-bar ::= "3"\n'
            'foo_bar ::= "4"\nstart ::= "5"',
            ["12345"],
            ["12355"],
        ),
        ('root ::= "a" {2,3} [b] {2}', ["aabb", "aaabb"], ["abb", "aab"]),
        ("root ::= [あ-ん]+", ["かき"], ["カ"]),
        ('root ::= "a" | root "b"', ["abb"], ["b"]),
        ('root ::= "a" "b"{0} ("c" "d"){0,0} "e"{1,1}', ["ae"], ["abe", "acde", "aee"]),
        ('root ::= "a\tb\x01\x7f" [\t\n]', ["a\tb\x01\x7f\t", "a\tb\x01\x7f\n"], ["ab"]),
        ("root ::= [+--]+", ["+", ",", "-"], ["*", "."]),
        ("root ::= [%--]+", ["%&+,-"], ["$", "."]),
        ("root ::= [--9]+", ["-./09"], [",", ":"]),
        ("root ::= [!--a-c-]+", ["!,-abc"], ["d", ".", "^"]),
        (r"root ::= [a\x2dc]+", ["a-c"], ["b"]),
        ("root ::= [^+--]", ["*", "."], ["+", ",", "-"]),
        ("root ::= [x^]", ["^"], ["y"]),
        (r'root ::= [a\-z]+ "\-"', ["az--"], ["b-", "a"]),
        ('root ::= ... "ab" ..', ["ab🟠abéb"], ["abaab", "abcabc"]),
    ],
)
def test_grammars_in_all_of_their_syntax(grammar: str, right: list[str], wrong: list[str]) -> None:
    rules = grammar.replace("root ::= ", "root ::= nested | ", 1) + f"\n{RECURSIVE}"
    for form in (compiled(StructuredOutputs(grammar=each)) for each in (grammar, rules)):
        for text in right:
            assert accepts(form, text), text
        for text in wrong:
            assert not accepts(form, text), text


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ('a ::= "x"', "no rule named root"),
        ("root ::= a", "no rule named 'a'"),
        ("root ::= (", "Expected"),
        ('root ::= "a', "Unexpected end"),
        (r'root ::= "\q"', "escape"),
        (r'root ::= "\uD800"', "no character"),
        ("root ::= [^a--b]", "ends before it begins"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "is empty"),
        ("root ::= [^]", "is empty"),
        ('root ::= "a"{3,2}', "whose end is less"),
        ("root ::= <[1000]>", "there is no token"),
        ("root ::= !<[1000]>", "there is no token"),
        ("root ::= <the sea>", "no single token"),
        (f"root ::= {EOS}", "is an end token"),
        ("root ::= <[340]>", "or one without a text"),
        ("root ::= !", "Expected"),
        ("root ::= <a", "Expected"),
        ("root ::= " + "(" * 5000, "groups in groups in GBNF, too deep"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as error:
        compiled(StructuredOutputs(grammar=grammar, param="grammar"))
    assert error.value.param == "grammar"


@pytest.mark.parametrize("rest", ["", f"\n{RECURSIVE}"], ids=["plain", "recursive"])
@pytest.mark.parametrize("depth", [8, 9, 15, 25, 60])
def test_groups_in_groups(depth: int, rest: str) -> None:
    """The library's limit is less; llama.cpp writes a number of 16 digits with 15 groups."""
    digits = "[0-9]" + " ([0-9]" * depth + ")?" * depth
    number = "number" + (" | nested" if rest else "")
    grammar = f"root ::= {number}\nnumber ::= [0-9] | [1-9] ({digits})?{rest}"
    form = compiled(StructuredOutputs(grammar=grammar))
    for length, right in ((1, True), (9, True), (depth + 2, True), (depth + 3, False)):
        assert accepts(form, "7" * length) == (right or length == 9 < depth), length


def words(number: int) -> str:
    return " | ".join(f'"w{one:07}"' for one in range(number))


def test_long_lists_of_words() -> None:
    form = compiled(StructuredOutputs(grammar=f"root ::= {words(10_000)}"))
    assert accepts(form, "w0009999")
    assert not accepts(form, "w0010000")
    listed = compiled(StructuredOutputs(grammar=f"root ::= nested | {words(5000)}\n{RECURSIVE}"))
    assert accepts(listed, "w0004999")
    assert accepts(listed, "<<>>")


def test_lists_of_words_that_are_too_long() -> None:
    for number in (5600, 10_000):
        grammar = f"root ::= nested | {words(number)}\n{RECURSIVE}"
        with pytest.raises(RequestError, match="at most 50000 are supported"):
            compiled(StructuredOutputs(grammar=grammar))


def test_rules_that_stand_in_others_twice_are_no_terminal() -> None:
    """It would have a billion characters."""
    rules = "\n".join(f"r{one} ::= r{one + 1} r{one + 1}?" for one in range(30))
    form = compiled(StructuredOutputs(grammar=f'root ::= r0\n{rules}\nr30 ::= "x"'))
    assert accepts(form, "xxx")


@pytest.mark.parametrize("end", ['"x"', '"x" | r0'], ids=["plain", "recursive"])
@pytest.mark.parametrize("rule", ['("a" ({0} | [b])?)+', "{0}* {0}* {0}*"])
def test_long_chains_of_rules(rule: str, end: str) -> None:
    """As one terminal these would take more than the compiler's stack, which ends the process."""
    rules = (f"r{one} ::= {rule.format(f'r{one + 1}')}\n" for one in range(800))
    grammar = f"root ::= r0*\n{''.join(rules)}r800 ::= {end}"
    with ThreadPoolExecutor(1) as threads:
        try:
            threads.submit(compiled, StructuredOutputs(grammar=grammar)).result()
        except RequestError as error:
            assert "too" in str(error)  # noqa: PT017


def test_rules_that_could_take_all_of_the_stack() -> None:
    rules = "".join(f'r{one} ::= ("a" (r{one + 1} | [b])?)+\n' for one in range(1990))
    with pytest.raises(RequestError, match="parts deep, at most 5000 are supported"):
        compiled(StructuredOutputs(grammar=f'root ::= r0\n{rules}r1990 ::= "x"'))


PARAGRAPHS = "some text, and more of it\nin lines\n" * 40


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= nested | para+\npara ::= [^#<>]+ "\\n"?',
        'root ::= nested | line*\nline ::= [^\\n<>]* "\\n"?',
        "root ::= nested | (w)*\nw ::= [a-z ,\\n]+",
        "root ::= nested | (w*)*\nw ::= ([a-z ,\\n]+)+",
        'root ::= nested | line*\nline ::= word+ "\\n"?\nword ::= [a-z, ]+ ("," | " ")?',
        'root ::= nested | ([a-z, \\n]* "\\n")+',
        "root ::= nested | ([a-z] [a-z, \\n]*)+",
        "root ::= nested | ([a-z, \\n]+){2,}",
        "root ::= nested | (([a-z, ]+ | [^,<>]+) [ ]?)+",
    ],
)
def test_repetitions_in_repetitions(grammar: str) -> None:
    """A position has as many items after many tokens as after few."""
    limits = replace(LIMITS, max_gbnf_row_items=60)
    spec = StructuredOutputs(grammar=f"{grammar}\n{RECURSIVE}")
    assert accepts(compile_grammar(spec, vocabulary(), limits), PARAGRAPHS)


LINES = "line ::= [a-z, ]+"


@pytest.mark.parametrize("root", ["nested | lines", "lines"], ids=["rules", "terminal"])
@pytest.mark.parametrize(
    "rules",
    [
        f'lines ::= line "\\n" lines?\n{LINES}',
        f'lines ::= line "\\n" lines | line "\\n"\n{LINES}',
        f'lines ::= "" | line "\\n" lines\n{LINES}',
        f'lines ::= line ("\\n" (lines | ""))?\n{LINES}',
        f'lines ::= line more\nmore ::= "\\n" rest\nrest ::= lines | ""\n{LINES}',
        'lines ::= [a-z] lines | other\nother ::= [, ] lines | end\nend ::= "\\n" (lines | end)?',
    ],
)
def test_rules_that_name_themselves_at_their_end(root: str, rules: str) -> None:
    """A position has as many items after many lines as after few."""
    limits = replace(LIMITS, max_gbnf_row_items=60)
    spec = StructuredOutputs(grammar=f"root ::= {root}\n{rules}\n{RECURSIVE}")
    form = compile_grammar(spec, vocabulary(), limits)
    assert accepts(form, PARAGRAPHS)
    assert not accepts(form, PARAGRAPHS + "<")
    assert not accepts(form, "A" + PARAGRAPHS)


def test_tokens() -> None:
    grammar = "root ::= <[10]> content <[11]>\ncontent ::= (!<[11]>)*"
    for middle in ([], [5, 6, 7], text_ids("the sea <tool"), [10]):
        assert takes(grammar, [10, *middle, 11])
    for wrong in ([10, 11, 11], [10, 5], [*text_ids("the"), 11], [11], [10, 0, 11]):
        assert not takes(grammar, wrong)


def test_tokens_by_their_names() -> None:
    """Others that spell the same are no such token; of an end there is none either way."""
    grammar = f'root ::= "a"{TOOL}!{TOOL}{{2}} !{EOS} ("<no>" # <no token>\n)? [<no>]?'
    [tool] = text_ids(TOOL)
    begin = text_ids("a")
    assert takes(grammar, [*begin, tool, 5, 6, tool])
    assert takes(grammar, [*begin, tool, 5, 6, tool, *text_ids("<no>n")])
    assert not takes(grammar, [*begin, tool, 5, tool, 6])
    assert not takes(grammar, [*begin, *text_ids("<tool"), *text_ids(" call>"), 5, 6, 7])
    assert not takes(grammar, [*begin, tool, 5, 6, 340])


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= !<[5]>* "a"',
        'root ::= "a" !<[5]>+ "b"',
        'root ::= !<[5]> | "ab"',
        'root ::= x y\nx ::= "a" | !<[5]> x\ny ::= "b"',
        "root ::= (x [a-z])+\nx ::= (!<[5]>)?",
        "root ::= x <[5]>\nx ::= [a-z]* !<[6]> x | <[6]>",
    ],
)
def test_any_token_or_text(grammar: str) -> None:
    """The library would never take a token for the text."""
    with pytest.raises(RequestError, match=r"a token with ! may come where text may come"):
        compiled(StructuredOutputs(grammar=grammar))


def test_any_token_and_text() -> None:
    grammar = 'root ::= "a" ("b" | "c" x)* <[10]>\nx ::= (!<[11]> | <[12]> "d")* <[11]> "e"'
    assert takes(grammar, [*text_ids("abbc"), 5, 6, 11, *text_ids("eb"), 10])
    assert not takes(grammar, [*text_ids("abbc"), 5, 6, *text_ids("e")])


def test_many_rules_in_each_other_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []

    def named(node: Any, real: Any = repeats._named) -> list[str]:
        looked.append(node)
        found: list[str] = real(node)
        return found

    monkeypatch.setattr(repeats, "_named", named)
    rules = "\n".join(f'r{one} ::= r{one + 1} | "{one}"' for one in range(1000))
    lark_of(f'root ::= "(" root ")" | r0\n{rules}\nr1000 ::= "x"')
    assert len(looked) < 10_000


def test_many_rules_with_any_token() -> None:
    rules = "\n".join(f"r{one} ::= r{one + 1} | (((r{one + 1})))" for one in reversed(range(1500)))
    with pytest.raises(RequestError, match="too large for a token with !"):
        compiled(StructuredOutputs(grammar=f"root ::= r0\nr1500 ::= !<[5]>\n{rules}"))


def text_ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def takes(grammar: str, ids: list[int]) -> bool:
    """Whether a text may be these tokens."""
    sequence = compiled(StructuredOutputs(grammar=grammar)).sequence(0)
    tokens = array("q", ids)
    if sequence.num_possible(array("q"), tokens) < len(ids):
        return False
    return tokenizer().eos_token_ids <= set(ids_of(sequence.masks(tokens)[0]))


def test_what_grows_without_end_ends_soon() -> None:
    """Each character may be the end of one word and the beginning of another."""
    spec = StructuredOutputs(grammar=f"root ::= nested | (w w)*\nw ::= [^<>]+\n{RECURSIVE}")
    sequence = compiled(spec).sequence(0)
    tokens = tokenizer().encode(PARAGRAPHS, add_special_tokens=False)
    with pytest.raises(GrammarError, match="items"):
        deque((sequence.masks(array("q", tokens[:end])) for end in range(len(tokens))), maxlen=0)
    short = PARAGRAPHS[:100]
    assert accepts(compiled(spec), short)
    whole = StructuredOutputs(grammar="root ::= (w w)*\nw ::= [^<>]+")  # one terminal
    assert accepts(compiled(whole), PARAGRAPHS)


def parts(depth: int) -> st.SearchStrategy[Part]:
    atoms = st.one_of(st.sampled_from(["x", "y", "xy", ""]), st.sampled_from(NAMES).map(tuple))
    if not depth:
        return atoms
    below = parts(depth - 1)
    sequences = st.lists(below, max_size=3)
    counted = st.tuples(below, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"]))
    return st.one_of(
        atoms, st.lists(sequences, min_size=1, max_size=3), counted.map(lambda one: {"of": one})
    )


def written(part: Part) -> str:
    match part:
        case str():
            return f'"{part}"'
        case tuple():
            return "".join(part)
        case list():
            return "(" + " | ".join(" ".join(map(written, one)) for one in part) + ")"
    inner, count = part["of"]
    return f"({written(inner)}){count}"


def ends(
    part: Part, rules: Mapping[str, Part], found: Mapping[Any, Any], text: str, at: int
) -> set[int]:
    """Where a part may end that begins at a place, by what is known of the rules."""
    match part:
        case str():
            return {at + len(part)} if text.startswith(part, at) else set()
        case tuple():
            return found.get(("".join(part), at), set())
        case list():
            return {end for one in part for end in in_order(one, rules, found, text, {at})}
    inner, count = part["of"]
    low, high = {"*": (0, 9), "+": (1, 9), "?": (0, 1), "{2}": (2, 2), "{0,2}": (0, 2)}.get(
        count, (1, 9)
    )
    reached, all_ends = {at}, {at} if low == 0 else set()
    for number in range(1, high + 1):
        reached = {end for place in reached for end in ends(inner, rules, found, text, place)}
        all_ends |= reached if number >= low else set()
    return all_ends


def in_order(sequence: list[Part], rules: Any, found: Any, text: str, places: set[int]) -> set[int]:
    for part in sequence:
        places = {end for place in places for end in ends(part, rules, found, text, place)}
    return places


def is_of(rules: Mapping[str, Part], text: str) -> bool:
    """Whether a text is one of a grammar: what rules reach is collected until nothing is new."""
    found: dict[tuple[str, int], set[int]] = {}
    while True:
        new = {
            (name, at): ends(rules[name], rules, found, text, at)
            for name, at in product(rules, range(len(text) + 1))
        }
        if new == found:
            return len(text) in found["root", 0]
        found = new


@settings(max_examples=examples(150), deadline=None)
@given(rules=st.fixed_dictionaries({name: parts(2) for name in NAMES}))
def test_the_texts_are_those_of_the_rules(rules: dict[str, Part]) -> None:
    texts = ["".join(one) for size in range(5) for one in product("xy", repeat=size)]
    right = [text for text in texts if is_of(rules, text)]
    grammar = "\n".join(f"{name} ::= {written(part)}" for name, part in rules.items())
    check(grammar, texts, right)
    check(grammar.replace("root ::= ", "root ::= nested | ", 1) + f"\n{RECURSIVE}", texts, right)


def check(grammar: str, texts: list[str], right: list[str]) -> None:
    try:
        form = compiled(StructuredOutputs(grammar=grammar))
    except RequestError as error:
        assert not right or "limit" in str(error) or "too" in str(error), (grammar, error)  # noqa: PT017
        return
    for text in texts:
        try:
            found = accepts(form, text)
        except GrammarError:  # it leads to what nothing fits
            found = False
        assert found == (text in right), (grammar, text)
