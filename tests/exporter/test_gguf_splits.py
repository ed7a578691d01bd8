"""How texts are cut, by every name that a GGUF file may have for it.

The cuts are llama.cpp's, whose tokens of 1500 random texts were compared by hand for each name
(llama-cpp-python 0.3.36). It differs where it writes a model's expression in another way: words of
gpt-4o, tekken, kimi-k2 and youtu have no combining marks there; digits of afmoe and tiny_aya take
along what stands before them; and DeepSeek's signs are without the spaces of U+3000 and of others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from tokenizers import Tokenizer

from onnxport.exporter.gguf.splits import SPLITS
from onnxport.serving.tokenizer import byte_alphabet

TEXT = (
    "It's x'LL Gro\u0308ße,  HTTPServer12 fooBar 1234567ab १२३४ 漢字かな한글 ۔¿“q”…  a_b/c$\n/\n\n"
    "   \t!\r\n x"
)
CUTS: Mapping[str, str] = {
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling olmo mpt": (
        "It|'s| x|'|LL| Gro|\u0308|ße|,| | HTTPServer|12| fooBar| 1234567|ab| १२३४| 漢字かな한글|"
        " ۔¿“|q|”…| | a|_|b|/|c|$|\n|/|\n\n   |\t|!|\r\n| x"
    ),
    "refact smollm starcoder codeshell exaone minerva-7b mellum2 command-r": (
        "It|'s| x|'|LL| Gro|\u0308|ße|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|३|"
        "४| 漢字かな한글| ۔¿“|q|”…| | a|_|b|/|c|$|\n|/|\n\n   |\t|!|\r\n| x"
    ),
    (
        "llama3 llama-v3 llama-bpe lfm2 falcon3 falcon-h1 pixtral midm-2.0 glm4 glm5 dbrx "
        "smaug-bpe chatglm-bpe minicpm5"
    ): (
        "It|'s| x|'LL| Gro|\u0308ße|,| | HTTPServer|12| fooBar| |123|456|7|ab| |१२३|४|"
        " 漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$\n|/\n\n|   |\t|!\r\n| x"
    ),
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez kormo f2llmv2 hunyuan grok-2 solar-open "
        "bailingmoe bailingmoe2 llada-moe ufakzeka"
    ): (
        "It|'s| x|'LL| Gro|\u0308ße|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|३|४|"
        " 漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$\n|/\n\n|   |\t|!\r\n| x"
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (
        "It's| x'LL| Gro\u0308ße|,| | HTTPServer|12| foo|Bar| |123|456|7|ab| |१२३|४| 漢字かな한글|"
        " ۔¿“|q|”…| | a|_b|/c|$\n/\n\n|   |\t|!\r\n| x"
    ),
    "tekken": (
        "It|'s| x|'LL| Gro\u0308ße|,| | HTTPServer|1|2| foo|Bar| |1|2|3|4|5|6|7|ab| |१|२|३|४|"
        " 漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$\n/\n\n|   |\t|!\r\n| x"
    ),
    "kimi-k2": (
        "It's| x'LL| Gro\u0308ße|,| | HTTPServer|12| foo|Bar| |123|456|7|ab| |१२३|४| |漢字|"
        "かな한글| ۔¿“|q|”…| | a|_b|/c|$\n|/\n\n|   |\t|!\r\n| x"
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (
        "It|'s| x|'LL| Gro\u0308ße|,| | HTTPServer|12| fooBar| |123|456|7|ab| |१२३|४| |漢字かな|"
        "한글| ۔¿“|q|”…| | a|_b|/c|$\n|/\n\n|   |\t|!\r\n| x"
    ),
    "tiny_aya cohere2moe": (
        "It's| x'LL| Gro\u0308ße|,| | HTTPServer|12| foo|Bar| |123|456|7|ab| |१|२३४| 漢字かな한글|"
        " ۔¿“|q|”…| | a|_b|/c|$\n/\n\n|   |\t|!\r\n| x"
    ),
    "poro-chat bloom gpt3-finnish": (
        "It's| x'LL| Gro\u0308ße|, | HTTPServer12| fooBar| 1234567ab| १२३४| 漢字かな한글| ۔|¿“q”|"
        "… | a_b/c$|\n|/|\n\n   \t!\r\n| x"
    ),
    "viking": (
        "It's| x'LL| Gro\u0308ße|, | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|३|४|"
        " 漢字かな한글| ۔|¿“q”|… | a_b/c$|\n|/|\n\n   \t!\r\n| x"
    ),
    "qwen35": (
        "It|'s| x|'LL| Gro\u0308ße|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|३|४|"
        " 漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$\n|/\n\n|   |\t|!\r\n| x"
    ),
    "deepseek-llm": (
        "It|'|s| x|'|LL| Gro|\u0308|ß|e|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|"
        "३|४| |漢字かな한글| ۔¿|“|q|”|…| | a|_|b|/|c|$|\n|/|\n|\n|   |\t!|\r|\n| x"
    ),
    "deepseek-coder": (
        "It|'|s| x|'|LL| Gro|\u0308|ße|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|"
        "३|४| |漢字かな한글| ۔¿|“|q|”…| | a|_|b|/|c|$|\n|/|\n|\n|   |\t!|\r|\n| x"
    ),
    "falcon": (
        "It|'|s| x|'|LL| Gro|\u0308|ße|,| | HTTPServer|12| fooBar| |123|456|7|ab| १२३४|"
        " 漢字かな한글| |۔¿“|q|”…| | a|_|b|/|c|$|\n|/|\n\n   \t|!|\r\n| x"
    ),
    "seed-coder": (
        "It|'s| x|'LL| Gro|\u0308ße|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|३|४|"
        " 漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$|\n|/|\n\n|   |\t|!|\r\n| x"
    ),
    "afmoe": (
        "It|'s| x|'LL| Gro\u0308ße|,| | HTTPServer|12| fooBar| |1|234|567|ab| |१|२३४| |"
        "漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$\n|/\n\n|   |\t|!\r\n| x"
    ),
    "superbpe": (
        "It's x'LL Gro\u0308ße,  HTTPServer|12| fooBar |1|234|567|ab |१|२३४|"
        " 漢字かな한글 ۔¿“q”…  a_b/c$\n/\n\n   \t!\r\n x"
    ),
    "exaone-moe": (
        "It|'s| x|'LL| Gro\u0308ße|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|३|४|"
        " 漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$\n|/\n|\n|   |\t|!\r|\n| x"
    ),
    "youtu": (
        "It's| x'LL| Gro\u0308ße|,| | HTTPServer|1|2| foo|Bar| |1|2|3|4|5|6|7|ab| |१|२|३|४| |"
        "漢字かな|한글| ۔¿|“|q|”…| | a|_b|/c|$\n/\n\n|   |\t|!\r\n| x"
    ),
    "spark2_5": (
        "It|'s| x|'LL| Gro\u0308ße|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|३|४|"
        " |漢字かな|한글| ۔¿“|q|”…| | a|_b|/c|$|\n|/|\n|\n|   |\t|!|\r|\n| x"
    ),
    "jais-2": (
        "It|'s| x|'LL| Gro|\u0308ße|,| | HTTPServer|12| fooBar| |123|456|7|ab| |१२३|४|"
        " 漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$\n|/\n\n|  | |\t|!\r\n| x"
    ),
    "laguna": (
        "It|'s| x|'LL| Gro|\u0308ße|,| | HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|३|४|"
        " 漢字かな한글| ۔¿“|q|”…| | a|_b|/c|$|\n|/|\n\n|   |\t|!\r|\n| x"
    ),
    "chameleon": (
        "It|'|s| x|'|LL| Gro|\u0308|ße|,|  |HTTPServer|1|2| fooBar| |1|2|3|4|5|6|7|ab| |१|२|"
        "३|४| 漢字かな한글| |۔|¿|“|q|”|…|  |a|_|b|/|c|$|\n|/|\n|\n|  | |\t|!|\r|\n| x"
    ),
}
NAMED = {name: cut for names, cut in CUTS.items() for name in names.split()}
ALPHABET = byte_alphabet()


def words(name: str, text: str) -> list[str]:
    described = {
        "model": {"type": "BPE", "vocab": {}, "merges": []},
        "pre_tokenizer": SPLITS[name].pre_tokenizer(),
    }
    cut = Tokenizer.from_str(json.dumps(described)).pre_tokenizer.pre_tokenize_str(text)
    return [bytes(ALPHABET[one] for one in word).decode() for word, _ in cut]


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_words_of_every_name(name: str) -> None:
    assert "|".join(words(name, TEXT)) == NAMED[name]


@pytest.mark.parametrize("name", ["afmoe", "superbpe", "tiny_aya"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 200_000])
def test_digits_are_counted_from_the_last_one(name: str, count: int) -> None:
    """In time that grows with their number: its square would be hours."""
    cut = words(name, "a " + "1" * count + " b")
    digits = [word for word in cut if word.isdigit()]
    first = count % 3 or 3
    assert [len(word) for word in digits] == [first, *[3] * ((count - first) // 3)]


def test_digits_before_a_letter() -> None:
    """Tiny Aya has them from behind where a word ends alone."""
    assert words("tiny_aya", "1234567a 1234567") == ["123", "456", "7", "a", " ", "1", "234", "567"]
    assert words("afmoe", "1234567a") == ["1", "234", "567", "a"]


def test_which_names_mean_more_than_a_cut() -> None:
    composed = {name for name, split in SPLITS.items() if split.composed}
    assert composed >= {"qwen2", "qwen35", "olmo", "mpt", "command-r", "cohere2moe"}
    assert not composed & {"llama-bpe", "deepseek-v3", "gpt-4o", "tekken", "smollm", "glm4"}
    whole = {name for name, split in SPLITS.items() if split.whole_words}
    llamas = {"llama3", "llama-v3", "llama-bpe", "lfm2", "falcon3", "falcon-h1", "pixtral"}
    own = {"midm-2.0", "glm4", "glm5", "tekken", "kimi-k2", "youtu", "minicpm5"}
    assert whole == llamas | own
    begins = {name for name, split in SPLITS.items() if split.begins}
    assert begins == llamas | {"midm-2.0", "tekken", "chameleon"}
