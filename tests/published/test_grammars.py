"""llama.cpp's own grammars in GBNF: what they are for may be written, and near misses may not."""

from __future__ import annotations

import json

import pytest

from onnxport.serving.structured.spec import StructuredOutputs
from tests.serving.structured import accepts, compiled

from .places import GRAMMARS, needs_llama_cpp

pytestmark = needs_llama_cpp

FUNCTION = "int f(int x){while(x<3){x = x+g(x, 2);}if(x==3){// three\n}else{return -x;}}"
LOOP = "char c(){for(i = 0; i<9; i = i+1){/* a * b */f (i);}return ( i )*2;}"
LONG = json.dumps({f"key {one}": [one, {"text": "some text. " * 9}] for one in range(40)})
CASES: dict[str, tuple[list[str], list[str]]] = {
    "arithmetic": (
        ["x=1\n", "(a_1 +2)*3 = y\n", "a=b\nb/2-1=c\n"],
        ["x=1", "x==1\n", "A=1\n", "(a=1\n", "a+=1\n"],
    ),
    "c": (
        ["", "int main(){return 0;}", FUNCTION, LOOP, FUNCTION + LOOP],
        ["int main(){return 0}", "int main(){return0;}", "main(){}", FUNCTION[:-1], LOOP + ";"],
    ),
    "chess": (
        ["1. e4 e5\n2. Nf3 Nc6\n3. Bb5 a6\n", "1. e4 e5\n12. O-O-O bxc1=Q+\n"],
        ["1. e4 e5\n", "1. e9 e5\n2. a3 a6\n", "1. e4 e5\n2. Nf3\n", "1. e4 e5\n2. Pf3 Nc6\n"],
    ),
    "english": (
        ["Hello, world!", "It's 5 o'clock\n[a\\b] {c|d}~", "x"],
        ["Hello,  world", "naïve", "", "end "],
    ),
    "japanese": (["こんにちは 世界", "カタカナ。\nひらがな"], ["abc", "世界!", "世界 "]),
    "json": (
        ['{"a": [1, -2.5e+1, true], "b": {"c": null}}', "{}", '{"\\u00e9":"é\\n" }', LONG],
        ["[1]", '{"a": 01}', '{"a": 1,}', '{"a": "\n"}', "{'a': 1}", LONG[:-1]],
    ),
    "json_arr": (
        ['[\n1,\n{"a": ["b"]}]', "[\n]", f"[\n{LONG}]"],
        ["[1]", "[\n1, 2]", "[\n1] ", '[\n{"a"}]'],
    ),
    "list": (
        ["- one\n- two, and more\n", "- é\n"],
        ["- one", "-one\n", "- \n", "- a\u2028b\n", "- a\x85\n", "- one\n\n"],
    ),
}


def test_all_of_them_are_tried() -> None:
    assert {one.stem for one in GRAMMARS.glob("*.gbnf")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_grammars(name: str) -> None:
    right, wrong = CASES[name]
    form = compiled(StructuredOutputs(grammar=(GRAMMARS / f"{name}.gbnf").read_text()))
    assert [text for text in right if not accepts(form, text)] == []
    assert [text for text in wrong if accepts(form, text)] == []
