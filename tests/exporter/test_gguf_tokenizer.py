"""Tokenizers of GGUF files give the tokens that the models' own give."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf.splits import SPLITS
from onnxport.exporter.gguf.tokenizer import write_files
from onnxport.exporter.source import special_tokens
from onnxport.serving.chat import ChatTemplate
from tests.exporter import ggufs

DEMO = Path(__file__).parents[2] / "demo" / "model"
TEXTS = (
    "Hello, world! It's 2,048 o'clock; they'LL've gone...",
    "  two  spaces,\ttabs\t\tand\n\n\nlines \r\n ",
    "Größe, café, naïve, Ærøskøbing, İstanbul",
    "Привет, мир! Ελληνικά, עברית, العربية",
    "日本語のテキストと漢字、한국어 문장, ไทย, हिन्दी में",
    "emoji 🙂👩‍👩‍👧 and math ∑∂∞ x²≠y³",
    "def f(x):\n    return x**2 # 12345678\n",
    "a",
    " ",
    "HTTPServer camelCase SNAKE_CASE Ωmega ǅungla",
)


def keys(tokenizer: Tokenizer, pre: str, **special: int) -> dict[str, Any]:
    """What a GGUF file says of a byte-level tokenizer."""
    held = json.loads(tokenizer.to_str())
    added = {one["id"]: one for one in held["added_tokens"]}
    vocab = {place: token for token, place in tokenizer.get_vocab().items()}
    types = [
        1 if place not in added else 3 if added[place]["special"] else 4 for place in sorted(vocab)
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [vocab[place] for place in sorted(vocab)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in held["model"]["merges"]],
        **{f"tokenizer.ggml.{name}_token_id": place for name, place in special.items()},
    }


def made(values: Mapping[str, Any], folder: Path, architecture: str = "llama") -> Tokenizer:
    """The tokenizer of such keys, None where one is to be left out."""
    folder.mkdir(exist_ok=True)
    kept = {key: value for key, value in values.items() if value is not None}
    write_files(kept, Path("model.gguf"), architecture, folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def demo() -> dict[str, Any]:
    """The keys of the demo model."""
    return keys(Tokenizer.from_file(str(DEMO / "tokenizer.json")), "qwen2", eos=2045, padding=2043)


def test_the_demo_models_tokens(demo: dict[str, Any], tmp_path: Path) -> None:
    expected = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    found = made(demo, tmp_path)
    assert found.get_vocab() == expected.get_vocab()
    chat = "<|im_start|>user\nhi<tool_call> {}</tool_call><|im_end|>\n"
    for text in (*TEXTS, chat):
        ids = found.encode(text).ids
        assert ids == expected.encode(text).ids
        for skip in (False, True):
            assert found.decode(ids, skip_special_tokens=skip) == expected.decode(
                ids, skip_special_tokens=skip
            )
    assert special_tokens(tmp_path, 2048).eos == (2045, 2043)
    assert special_tokens(tmp_path, 2048).pad == 2043


def words(pre: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in pre.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", sorted(SPLITS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_cut_as_by_transformers(pre: str, demo: dict[str, Any], tmp_path: Path) -> None:
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    reference = pre_tokenizers.Sequence([split, level])
    begins = {"tokenizer.ggml.bos_token_id": 2043}
    found = made({**demo, "tokenizer.ggml.pre": pre, **begins}, tmp_path)
    for text in TEXTS:
        assert words(found.pre_tokenizer, text) == words(reference, text)
    assert (found.encode("a").ids[0] == 2043) == SPLITS[pre].begins


def test_a_word_that_is_a_token(demo: dict[str, Any], tmp_path: Path) -> None:
    """Llama 3 takes it as it is, Qwen 2 what merges make of it."""
    tokens = list(demo["tokenizer.ggml.tokens"])
    place = tokens.index("Ġthe")
    tokens[place] = "Ġqxzqxz"
    merges = [
        one
        for one in demo["tokenizer.ggml.merges"]
        if "Ġthe" not in (*one.split(), one.replace(" ", ""))
    ]
    own = demo | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    own = {**own, "tokenizer.ggml.add_bos_token": False}
    merged = made(own, tmp_path / "qwen2")
    assert place not in merged.encode(" qxzqxz").ids
    whole = made({**own, "tokenizer.ggml.pre": "llama-bpe"}, tmp_path / "llama")
    assert whole.encode(" qxzqxz").ids == [place]


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2"])
def test_composed_texts(pre: str, demo: dict[str, Any], tmp_path: Path) -> None:
    found = made({**demo, "tokenizer.ggml.pre": pre}, tmp_path)
    same = found.encode("cafe\u0301").ids == found.encode("caf\u00e9").ids
    assert same == (pre == "qwen2")


def test_what_is_put_around_texts(demo: dict[str, Any], tmp_path: Path) -> None:
    flags = ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token")
    demo["tokenizer.ggml.bos_token_id"] = 2044
    plain = made(demo, tmp_path).encode("hi").ids
    for bos, eos in ((True, False), (False, True), (True, True), (False, False)):
        found = made({**demo, flags[0]: bos, flags[1]: eos}, tmp_path)
        expected = [2044] * bos + plain + [2045] * eos
        assert found.encode("hi").ids == expected
        assert found.encode("hi", add_special_tokens=False).ids == plain
        pair = found.encode("hi", "hi").ids
        assert pair == expected + expected


# A vocabulary of SentencePiece.


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """The keys of a small vocabulary of pieces, with bytes and user-defined tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False)
    story = (DEMO.parents[1] / "LICENSE").read_text(encoding="utf-8")  # which nobody edits
    trained.train_from_iterator([story, *TEXTS[:4]], trainer)
    merges = json.loads(trained.to_str())["model"]["merges"]
    made_of_two = [one for one in map("".join, merges) if one.strip("\u2581\n")]
    letters = sorted({one for token in trained.get_vocab() for one in token})[:90]
    normal = list(dict.fromkeys([*made_of_two, "\u2581", "\n", *letters]))
    fixed = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    own = ["<|end|>", "<tool>", "<|endoftext|>"]
    scores = [0.0] * 259 + [-float(place) for place in range(len(normal))] + [0.0] * 3
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*fixed, *bytes_, *normal, *own],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(normal), 3, 4, 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def by_scores(values: Mapping[str, Any], text: str, ranks: Sequence[float]) -> list[int]:
    """SentencePiece's algorithm, word for word: the best pair of neighbours first."""
    normal = {
        token: place
        for place, (token, kind) in enumerate(
            zip(
                values["tokenizer.ggml.tokens"],
                values["tokenizer.ggml.token_type"],
                strict=True,
            )
        )
        if kind == 1
    }
    parts = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [
            (-ranks[normal[left + right]], at)
            for at, (left, right) in enumerate(pairwise(parts))
            if left + right in normal and left in normal and right in normal
        ]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        ids += [normal[part]] if part in normal else [3 + byte for byte in part.encode()]
    return ids


def test_pieces_by_scores(pieces: dict[str, Any], tmp_path: Path) -> None:
    found = made(pieces, tmp_path)
    scores = pieces["tokenizer.ggml.scores"]
    for text in TEXTS:
        expected = by_scores(pieces, " " + text, scores)
        encoded = found.encode(text).ids
        assert encoded == [1, *expected]
        assert found.decode(encoded) == text
    assert special_tokens(tmp_path, 1000).bos == 1
    types = made({**pieces, "tokenizer.ggml.unknown_token_id": None}, tmp_path)
    assert types.to_str() == found.to_str()  # the type of a token says it, too


def test_pieces_of_an_older_file(pieces: dict[str, Any], tmp_path: Path) -> None:
    """Which does not say what SentencePiece has always: ids that llama.cpp takes, too."""
    untold: dict[str, Any] = {f"tokenizer.ggml.{key}_token_id": None for key in ("bos", "eos")}
    found = made({**pieces, **untold}, tmp_path)
    assert found.encode("a").ids[0] == 1
    assert special_tokens(tmp_path, 1000).eos[0] == 2
    types = [2, 1, 1, *pieces["tokenizer.ggml.token_type"][3:]]
    found = made({**pieces, **untold, "tokenizer.ggml.token_type": types}, tmp_path)
    assert found.encode("a").ids[0] != 1
    assert 2 not in special_tokens(tmp_path, 1000).eos


def test_pieces_without_a_space_ahead(pieces: dict[str, Any], tmp_path: Path) -> None:
    prefix = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    found = made({**pieces, **prefix}, tmp_path)
    for text in TEXTS:
        encoded = found.encode(text).ids
        assert encoded == by_scores(pieces, text, pieces["tokenizer.ggml.scores"])
        assert found.decode(encoded) == text


def test_gemmas_pieces_are_merged_in_their_order(pieces: dict[str, Any], tmp_path: Path) -> None:
    """Its scores say another one; transformers has found that out."""
    changed = {**pieces, "tokenizer.ggml.scores": pieces["tokenizer.ggml.scores"][::-1]}
    ranks = [-place for place in range(len(changed["tokenizer.ggml.tokens"]))]
    for architecture in ("gemma2", "gemma3", "llama"):
        found = made(changed, tmp_path / architecture, architecture)
        expected = ranks if architecture != "llama" else changed["tokenizer.ggml.scores"]
        for text in TEXTS[:4]:
            assert found.encode(text).ids == [1, *by_scores(changed, " " + text, expected)]


def test_tokens_in_a_text_of_pieces(pieces: dict[str, Any], tmp_path: Path) -> None:
    end, tool, document = range(len(pieces["tokenizer.ggml.tokens"]) - 3, 10**6)[:3]
    text = "<tool> a<|end|>\n<|endoftext|>\n"
    for architecture in ("llama", "phi3"):
        found = made(pieces, tmp_path / architecture, architecture)
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids[0] == tool
        after = ids[ids.index(end) + 1]
        # Phi-3's added tokens take in the spaces behind them.
        assert (after == document) == (architecture == "phi3")
        assert ids[-1] == found.token_to_id("\n")
        assert "<tool>" in found.decode(ids)
        assert "<|end|>" not in found.decode(ids)


def written(folder: Path, values: Mapping[str, Any], architecture: str) -> Path:
    """The keys in a file of no tensors, model.gguf."""
    writer = GGUFWriter(folder / "model.gguf", architecture)
    for key, value in values.items():
        ggufs.add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def test_only_phi_3s_pieces_take_in_spaces(demo: dict[str, Any], tmp_path: Path) -> None:
    """Phi-4 is of the same architecture, and has byte pairs."""
    text = "<|im_end|>\n<|im_end|>"
    found = [made(demo, tmp_path / one, one).encode(text).ids for one in ("llama", "phi3")]
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_transformers_reads_the_same_of_a_file(pieces: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, pieces, "llama")
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    found = made(pieces, tmp_path / "files")
    for text in TEXTS:
        if not text.startswith(" "):  # where it adds no further one, unlike llama.cpp
            assert found.encode(text).ids == reference(text).input_ids


@pytest.mark.parametrize("space", [" ", "\u2581"])
def test_gemmas_runs_of_spaces_and_lines(
    space: str, pieces: dict[str, Any], tmp_path: Path
) -> None:
    """They are user-defined tokens ahead of the pieces, in either spelling."""
    runs = [space * 2, space * 3, space * 4, "\n\n", "\n\n\n"]
    own = {
        key: [*value[:259], *insert, *value[259:]]
        for key, insert in (
            ("tokenizer.ggml.tokens", runs),
            ("tokenizer.ggml.token_type", [4] * len(runs)),
            ("tokenizer.ggml.scores", [0.0] * len(runs)),
        )
        for value in (pieces[key],)
    }
    own |= {"tokenizer.ggml.add_space_prefix": False}
    reference = AutoTokenizer.from_pretrained(
        written(tmp_path, {**pieces, **own}, "gemma2"), gguf_file="model.gguf"
    )
    found = made({**pieces, **own}, tmp_path / "files", "gemma2")
    for text in (*TEXTS, "a  b   c    d e\n\nf\n\n\n\ng", "   "):
        ids = found.encode(text).ids
        assert found.decode(ids) == text
        if space == " ":  # the other spelling it does not read
            assert ids == reference(text).input_ids


def test_pairs_of_letters_with_spaces_of_pieces(tmp_path: Path) -> None:
    """As Gemma 4 has them: nothing is cut, merges alone make words, and bytes what is no letter."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "a", "b", "\n", "ab", "\u2581ab", "\n\n", "b\u2581"]
    merges = ["a b", "\u2581 ab", "\n \n", "b \u2581"]
    values = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[6] * 256, *[1] * 8],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.mask_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,  # which files from before a repair say
    }
    place = {token: at for at, token in enumerate(tokens)}
    text = "ab ab\n\nb \u00e9"
    told = ["ab", "\u2581ab", "\n\n", "b\u2581", "<0xC3>", "<0xA9>"]
    ids = [2, *(place[one] for one in told)]
    for pre in (None, "gemma4", "sarvam-moe"):
        kind = {} if pre is None else {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
        found = made({**values, **kind}, tmp_path / str(pre))
        assert found.encode(text).ids == (ids if pre != "sarvam-moe" else ids[1:])
        assert found.decode(ids) == text


# What is beside the tokens.


def test_ends_of_texts(demo: dict[str, Any], tmp_path: Path) -> None:
    def ends(tokens: Mapping[int, str], types: Mapping[int, int], **special: int) -> list[int]:
        listed, kinds = (list(demo[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
        for place, token in tokens.items():
            listed[place] = token
        for place, kind in types.items():
            kinds[place] = kind
        named = {f"tokenizer.ggml.{name}_token_id": place for name, place in special.items()}
        own = {"tokenizer.ggml.tokens": listed, "tokenizer.ggml.token_type": kinds}
        made({**demo, **own, **named}, tmp_path)
        found: list[int] = read_json(tmp_path / "generation_config.json")["eos_token_id"]
        return found

    assert ends({}, {}) == [2045, 2043]
    assert ends({2046: "<|call_me|>"}, {}, eos=2046, eot=2045, eom=2044) == [2046, 2045, 2044, 2043]
    assert ends({}, {2043: 4}) == [2045, 2043]  # also where a file calls it text
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode([2043]) == ""
    assert ends({2046: "<|end_of_role|>"}, {2046: 3}) == [2045, 2043]
    assert ends({}, {2043: 1}) == [2045]
    tag = {2043: "</s>"}
    assert ends(tag, {2043: 4}) == [2045]  # HTML's, as Gemma has it
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode([2043]) == "</s>"
    assert ends(tag, {2043: 3}) == [2045, 2043]
    assert ends(tag, {2043: 4}, eos=2043) == [2043, 2045]
    del demo["tokenizer.ggml.eos_token_id"]
    assert ends(tag, {2043: 4}) == [2043, 2045]
    demo["tokenizer.ggml.eos_token_id"] = 2045
    harmony = {2043: "<|return|>", 2044: "<|call|>", 2046: "<|end|>"}
    assert ends(harmony, {2046: 3}, eos=2043) == [2043, 2044, 2045]
    assert ends({2046: "<|end|>"}, {2046: 3}) == [2045, 2043, 2046]
    solar = {2043: "<|flush|>", 2044: "<|calls|>", 2046: "<|end|>"}
    assert ends(solar, {2046: 3}, eos=2045) == [2045, 2043, 2044]
    assert ends({}, {}, fim_rep=7, fim_sep=8, fim_pad=9, fim_mid=6) == [2045, 2043, 9, 7, 8]
    assert ends({2046: "<|file_sep|>"}, {2046: 4}) == [2045, 2043, 2046]


def test_tokens_to_fill_in_by(demo: dict[str, Any], tmp_path: Path) -> None:
    """Those whose ids a file has; of two keys the newer one."""

    def told(**ids: int) -> Any:
        own = {f"tokenizer.ggml.{key}_token_id": place for key, place in ids.items()}
        made({**demo, **own}, tmp_path)
        return read_json(tmp_path / "tokenizer_config.json").get("infill_tokens")

    tokens = demo["tokenizer.ggml.tokens"]
    assert told() is None
    assert told(fim_pre=2040, prefix=1, suffix=2041, middle=2042) == {
        "prefix": tokens[2040],
        "suffix": tokens[2041],
        "middle": tokens[2042],
    }
    assert told(fim_pad=5, fim_rep=6, fim_sep=7) == {
        "pad": tokens[5],
        "repo_name": tokens[6],
        "file_separator": tokens[7],
    }


def test_how_the_model_wants_to_be_sampled(demo: dict[str, Any], tmp_path: Path) -> None:
    made(demo, tmp_path)
    assert "do_sample" not in read_json(tmp_path / "generation_config.json")
    assert "suppress_tokens" not in read_json(tmp_path / "generation_config.json")
    made({**demo, "tokenizer.ggml.suppress_tokens": [7, 9]}, tmp_path)
    assert read_json(tmp_path / "generation_config.json")["suppress_tokens"] == [7, 9]
    wishes = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "penalty_repeat": 1.1}
    made({**demo, **{f"general.sampling.{key}": one for key, one in wishes.items()}}, tmp_path)
    found = read_json(tmp_path / "generation_config.json")
    assert {key: one for key, one in found.items() if not key.endswith("_id")} == {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }


def test_sampling_that_an_artifact_cannot_tell(
    demo: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    off = {"general.sampling.mirostat": 0, "general.sampling.xtc_probability": 0.0}
    made({**demo, **off}, tmp_path)
    assert not caplog.records
    made({**demo, **off, "general.sampling.mirostat": 2}, tmp_path)
    assert "wants to be sampled by general.sampling.mirostat = 2, which" in caplog.text
    for value in ("0.6", math.nan, True):
        with pytest.raises(CheckpointError, match=r"sampling\.temp is .*, and no number"):
            made({**demo, "general.sampling.temp": value}, tmp_path)


def test_a_text_of_pairs_without_places(demo: dict[str, Any], tmp_path: Path) -> None:
    key = "tokenizer.chat_template.rerank"
    with pytest.raises(CheckpointError, match=r"has no \{query\}, so all"):
        made({**demo, key: "judge {document}"}, tmp_path)
    made({**demo, key: "{query}{document}"}, tmp_path)


def test_chat_templates(demo: dict[str, Any], tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ eos_token }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.ggml.bos_token_id": 2044,
    }
    made({**demo, **templates}, tmp_path)
    template = ChatTemplate.read(tmp_path)
    assert template.render([{"role": "user", "content": "ä"}]) == "<|im_start|>ä"
    assert template.sources["tool_use"] == "{{ eos_token }}"
    assert template.special_tokens["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("name", ["../up", "a/b", "a\0b", "a b", "ä", "a\n", "x" * 101, ""])
def test_a_templates_name_is_that_of_a_file(
    name: str, demo: dict[str, Any], tmp_path: Path
) -> None:
    key = f"tokenizer.chat_template.{name}"
    if name == "":
        made({**demo, key: "text"}, tmp_path)  # as if it had no name
        return
    with pytest.raises(CheckpointError, match="no text of a template, or has no name"):
        made({**demo, key: "text"}, tmp_path)


def test_the_longest_name_of_a_template(demo: dict[str, Any], tmp_path: Path) -> None:
    name = "tool-use.2_" + "x" * 89
    own = {"tokenizer.chat_template": "", f"tokenizer.chat_template.{name}": "text"}
    made({**demo, **own}, tmp_path)
    assert ChatTemplate.read(tmp_path).sources[name] == "text"


def test_a_template_of_no_text(demo: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no text of a template"):
        made({**demo, "tokenizer.chat_template": ["text"]}, tmp_path)


def test_the_models_own_file_goes_first(demo: dict[str, Any], tmp_path: Path) -> None:
    whole = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
    found = made(
        {**demo, "tokenizer.ggml.pre": "odd", "tokenizer.huggingface.json": whole}, tmp_path
    )
    assert found.to_str() == Tokenizer.from_file(str(DEMO / "tokenizer.json")).to_str()


@pytest.mark.parametrize("model", ["none", "no_vocab", None])
def test_no_tokens(model: str | None, demo: dict[str, Any], tmp_path: Path) -> None:
    values = {key: one for key, one in demo.items() if model or key != "tokenizer.ggml.model"}
    write_files(
        values | ({"tokenizer.ggml.model": model} if model else {}), tmp_path, "x", tmp_path
    )
    assert not list(tmp_path.iterdir())


def test_tokens_of_no_text(demo: dict[str, Any], tmp_path: Path) -> None:
    """Any number of places may have none; llama.cpp calls them so, too."""
    tokens = [*demo["tokenizer.ggml.tokens"][:2046], "", ""]
    found = made({**demo, "tokenizer.ggml.tokens": tokens}, tmp_path)
    assert found.id_to_token(2047) == "[EMPTY_2047]"


def test_unused_tokens_are_none(demo: dict[str, Any], tmp_path: Path) -> None:
    types = list(demo["tokenizer.ggml.token_type"])
    types[2046] = types[2045] = 5
    found = made({**demo, "tokenizer.ggml.token_type": types}, tmp_path)
    assert found.token_to_id("<tool_call>") is None
    assert found.token_to_id("</tool_call>") == 2047
    assert found.token_to_id("<|im_end|>") == 2045  # which ends texts


def without(values: Sequence[Any], place: int) -> list[Any]:
    return [*values[:place], *values[place + 1 :]]


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "another kind": ({"model": "bert"}, "the tokenizer is 'bert'; read are 'gpt2', 'llama'"),
    "an unknown cut": ({"pre": "new"}, "says 'new' how texts are cut .* known are a.x-4.0, afmoe"),
    "no cut": ({"pre": None}, "does not say how texts are cut into words"),
    "a cut of no name": ({"pre": ["gpt-2"]}, r"pre is \[.gpt-2.\], and no name"),
    "the older default": ({"pre": "default"}, "says 'default' how texts are cut"),
    "an unknown key": ({"byte_encoder": "x"}, r"tokenizer\.ggml\.byte_encoder = x"),
    "spaces that go": ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces = True"),
    "a map of characters": ({"precompiled_charsmap": [1]}, r"precompiled_charsmap = \[1\]"),
    "a gap outside": ({"fim_mid_token_id": 2048}, "fim_mid_token_id is 2048, of 2048 tokens"),
    "tokens that are none": ({"suppress_tokens": ["x"]}, "suppress_tokens is no list of values"),
    "an end outside": ({"eos_token_id": 2048}, "eos_token_id is 2048, of 2048 tokens"),
    "an end of no type": ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    "no beginning": ({"add_bos_token": True}, "the token bos, and not which one"),
    "tokens of no type": ({"tokens": [1, 2]}, "tokens is no list of values of type str"),
    "too few types": ({"token_type": [1]}, "2048 tokens, 1 of their types"),
    "no tokens": ({"tokens": [], "token_type": []}, "0 tokens"),
    "a flag of no type": ({"add_eos_token": "false"}, "add_eos_token is 'false', expected true"),
    "a flag that is a number": ({"add_bos_token": 0}, "add_bos_token is '0', expected true or"),
    "no merges": ({"merges": []}, "has 0 merges"),
    "a merge of three": ({"merges": ["e r s"]}, r"\['e', 'r', 's'\] is none of two"),
    "a merge to nothing": ({"merges": ["e Ċ"]}, r"\['e', 'Ċ'\] is none of two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, demo: dict[str, Any], tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    own = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        made({**demo, **own}, tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_token_twice(demo: dict[str, Any], tmp_path: Path) -> None:
    tokens = [*demo["tokenizer.ggml.tokens"][:-1], "er"]
    with pytest.raises(
        CheckpointError, match=r"1 tokens more than once, such as 'er'.*--tokenizer"
    ):
        made({**demo, "tokenizer.ggml.tokens": tokens}, tmp_path)


def test_scores_that_order_nothing(pieces: dict[str, Any], tmp_path: Path) -> None:
    scores = [*pieces["tokenizer.ggml.scores"][1:], math.nan]
    with pytest.raises(CheckpointError, match="scores are not all finite"):
        made({**pieces, "tokenizer.ggml.scores": scores}, tmp_path)


def test_a_token_as_long_as_a_book(pieces: dict[str, Any], tmp_path: Path) -> None:
    """It is not cut at each letter, which would copy it as often: 10^12 letters."""
    own = {"tokens": "a" * 1_000_000, "token_type": 1, "scores": -9.0}
    longer = {f"tokenizer.ggml.{key}": one for key, one in own.items()}
    made({**pieces, **{key: [*pieces[key], one] for key, one in longer.items()}}, tmp_path)
    merges = read_json(tmp_path / "tokenizer.json")["model"]["merges"]
    assert max(map(len, map("".join, merges))) < 100


def test_pieces_without_scores(pieces: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="and 0 scores"):
        made({**pieces, "tokenizer.ggml.scores": None}, tmp_path)
