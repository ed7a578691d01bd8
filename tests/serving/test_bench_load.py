"""What is asked, and when."""

import math
from pathlib import Path

import numpy as np
import pytest

from onnxport.errors import RequestError
from onnxport.serving.bench.load import Ask, Lengths, RandomPrompts, arrivals, read_dataset, words

FOUR = Lengths(4, 4)


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("3:9", 3, 9), (" 5:5 ", 5, 5)])
def test_lengths(text: str, low: int, high: int) -> None:
    assert Lengths.parse(text) == Lengths(low, high)


@pytest.mark.parametrize("text", ["", "0", "9:3", "-1", "3:", "1.5", "a"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is no length"):
        Lengths.parse(text)


def test_lengths_cover_their_range_evenly() -> None:
    drawn = Lengths(3, 6).draw(np.random.default_rng(0), 4000)
    counts = np.bincount(drawn, minlength=8)
    assert counts[:3].sum() == counts[7:].sum() == 0
    assert counts[3:7].min() > 900


def test_random_prompts_share_a_prefix_and_nothing_else() -> None:
    prompts = RandomPrompts(Lengths(5, 9), Lengths(1, 3), prefix_len=6, highest_id=90)
    asks = prompts.draw(20, seed=4)
    assert prompts.draw(20, seed=4) == asks
    assert prompts.draw(20, seed=5) != asks
    assert prompts.draw(20, seed=-5) == prompts.draw(20, seed=2**64 - 5) != asks
    ids = [ask.prompt for ask in asks]
    assert len({one[:6] for one in ids}) == 1
    assert len({one[6:] for one in ids}) == 20
    assert {len(one) for one in ids} == set(range(11, 16))
    assert {ask.max_tokens for ask in asks} == {1, 2, 3}
    flat = [token for one in ids for token in one if isinstance(token, int)]
    assert (min(flat), max(flat)) == (3, 90)


def test_a_vocabulary_of_two() -> None:
    [ask] = RandomPrompts(Lengths(50, 50), FOUR, highest_id=1).draw(1, 0)
    assert set(ask.prompt) == {1}


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(arrivals(20_001, 50.0, seed=1))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # as of exponential gaps
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03
    assert (gaps > 3 / 50).mean() == pytest.approx(math.exp(-3), rel=0.15)
    assert arrivals(20_001, 50.0, seed=1) == times.tolist()
    assert arrivals(20_001, 50.0, seed=2) != times.tolist()
    assert arrivals(20_001, 100.0, seed=1) == pytest.approx(times / 2)


def test_arrivals_at_once_and_alone() -> None:
    assert arrivals(3, math.inf, 0) == [0.0] * 3
    assert arrivals(1, 2.0, 0) == [0.0]
    assert arrivals(0, 2.0, 0) == []


def test_a_dataset(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "é", "max_tokens": 9}\n\n{"prompt": [1, 2]}\n', "utf-8")
    first, second = Ask("é", 9), Ask((1, 2), 4)
    assert read_dataset(path, FOUR, None, 0) == [first, second]
    assert read_dataset(path, FOUR, 1, 0) == [first]
    assert read_dataset(path, FOUR, 3, 0) == [first, second, first]
    lengths = {ask.max_tokens for ask in read_dataset(path, Lengths(1, 3), 40, 0)[1::2]}
    assert lengths == {1, 2, 3}


def test_a_dataset_whose_prompts_hold_what_ends_a_line_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    prompt = "a\u2028b\x85c"
    path.write_bytes(f'{{"prompt": "{prompt}"}}\r\n{{"prompt": "d"}}\r\n'.encode())
    assert read_dataset(path, FOUR, None, 0) == [Ask(prompt, 4), Ask("d", 4)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 of .* is not JSON"),
        ("[1]", "it must be an object with prompt"),
        ('{"max_tokens": 3}', "it must be an object with prompt"),
        ('{"prompt": "a", "output_len": 3}', "and nothing else"),
        ('{"prompt": ""}', "must be text or a list of token ids"),
        ('{"prompt": []}', "must be text or a list of token ids"),
        ('{"prompt": [1, "a"]}', "must be text or a list of token ids"),
        ('{"prompt": [true]}', "must be text or a list of token ids"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens in line 2"),
        ('{"prompt": "a", "max_tokens": 1.5}', "max_tokens in line 2"),
        ('\n{"prompt": "a", "max_tokens": 1.5}', "max_tokens in line 3"),
        (r'{"prompt": "\ud800"}', "prompt in line 2 of .* holds half of a character"),
        ("[" * 100_000, "line 2 of .* is not JSON"),
    ],
)
def test_a_dataset_with_a_wrong_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(RequestError, match=says):
        read_dataset(path, FOUR, None, 0)


def test_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(RequestError, match="is empty"):
        read_dataset(tmp_path / "empty", FOUR, None, 0)
    with pytest.raises(RequestError, match="cannot be read as a dataset"):
        read_dataset(tmp_path / "missing", FOUR, None, 0)


def test_words() -> None:
    assert words([0, 1, 27]) == "a b b"
