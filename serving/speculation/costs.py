"""What a step costs, learned from the steps that were made."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

MOST_SAMPLES = 7  # of which the middle one counts: others had a share of the machine
MIN_SAMPLES = 2  # of these the faster: in the first one memory is touched, kernels are compiled
ENOUGH_SAMPLES = 4  # of steps without guesses, before any are compared with them
FRESH_NOTES = 64  # and how many others may come before there is another one
STALE_NOTES = 256  # a measurement is forgotten after so many others
REFRESH_NOTES = 16  # how often the curves are drawn anew
GUESSED_SLOPE = 0.02  # of a step's time, for each token more, where nothing longer was measured
EXACT_TOKENS = 16  # up to here each number of tokens is measured by itself

Points = list[tuple[int, float]]  # tokens and seconds, both ascending


class StepCosts:
    """Seconds of a decode step by its rows and guesses.

    Steps with guesses are measured apart, by all their tokens: to guess and to check takes time
    besides that of the model, which a step of as many rows does not take. Between measurements
    they are interpolated, from the step without guesses on; beyond the largest they go on with the
    mean slope, or a flat one, so that longer steps are tried at all. They never fall with more
    tokens: where measurements say so, their mean counts.
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[bool, int], _Bucket] = {}  # with guesses or without, by size
        self._num_notes = 0
        self._drawn_at = 0
        self._plain: Points = []
        self._guessing: Points = []
        self._tables: dict[int, list[float]] = {}  # rows -> seconds by guesses, as asked for

    def note(self, rows: int, drafted: int, elapsed_s: float) -> None:
        """A step of so many rows and guesses took so long."""
        self._num_notes += 1
        num_tokens = rows + drafted
        key = drafted > 0, _bucket_of(num_tokens)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
        bucket.samples.append((num_tokens, elapsed_s))
        bucket.noted_at = self._num_notes
        bucket.typical = None
        new = len(bucket.samples) <= ENOUGH_SAMPLES
        if new or self._num_notes - self._drawn_at >= REFRESH_NOTES:
            self._draw()

    def knows(self, rows: int) -> bool:
        """Whether plain steps of about so many rows were measured, or of both fewer and more."""
        if not self._plain:
            return False
        smallest, largest = self._plain[0][0], self._plain[-1][0]
        return _bucket_of(smallest) <= _bucket_of(rows) <= _bucket_of(largest)

    def is_fresh(self, rows: int) -> bool:
        """Whether plain steps of so many rows were measured often enough, and of late."""
        bucket = self._buckets.get((False, _bucket_of(rows)))
        return (
            bucket is not None
            and len(bucket.samples) >= ENOUGH_SAMPLES
            and self._num_notes - bucket.noted_at < FRESH_NOTES
        )

    def has_measured(self, rows: int, drafted: int) -> bool:
        """Whether steps of about so many tokens, guesses among them, were measured often enough."""
        bucket = self._buckets.get((True, _bucket_of(rows + drafted)))
        return bucket is not None and len(bucket.samples) >= MIN_SAMPLES

    def seconds(self, rows: int, drafted: int = 0) -> float:
        """Return what a step takes; that of some step without guesses has to be known."""
        return self.table(rows, drafted)[drafted]

    def table(self, rows: int, most: int) -> Sequence[float]:
        """Return what steps take by their number of guesses, from none to `most` or more."""
        table = self._tables.get(rows)
        if table is None:
            table = self._tables[rows] = [_read(self._plain, rows)]
        if len(table) <= most:
            plain_s = table[0]
            above = [(tokens, max(plain_s, one)) for tokens, one in self._guessing if tokens > rows]
            points = [(rows, plain_s), *above] if above else self._plain
            for drafted in range(len(table), most + 1):
                table.append(max(plain_s, _read(points, rows + drafted)))
        return table

    def _draw(self) -> None:
        """Draw the curves from what is measured, and forget what is stale."""
        self._drawn_at = self._num_notes
        self._tables.clear()
        for key, bucket in list(self._buckets.items()):
            if self._num_notes - bucket.noted_at > STALE_NOTES:
                del self._buckets[key]
        self._plain, self._guessing = self._points(False), self._points(True)

    def _points(self, guessing: bool) -> Points:
        """Return what is known of steps with guesses, or of those without."""
        typical = [
            bucket.read()
            for (has_guesses, _), bucket in sorted(self._buckets.items(), key=itemgetter(0))
            if has_guesses is guessing and len(bucket.samples) >= MIN_SAMPLES
        ]
        seconds = ascending([seconds for _, seconds in typical])
        return list(zip([tokens for tokens, _ in typical], seconds, strict=True))


class _Bucket:
    """The latest steps of about one size."""

    __slots__ = ("noted_at", "samples", "typical")

    def __init__(self) -> None:
        self.samples: deque[tuple[int, float]] = deque(maxlen=MOST_SAMPLES)  # tokens, seconds
        self.noted_at = 0
        self.typical: tuple[int, float] | None = None

    def read(self) -> tuple[int, float]:
        """Return the one in the middle, by its time."""
        if self.typical is None:
            samples = sorted(self.samples, key=itemgetter(1))
            self.typical = samples[(len(samples) - 1) // 2]
        return self.typical


def ascending(values: list[float]) -> list[float]:
    """Return the ascending values nearest to `values`, by squares: neighbours that fall are pooled.

    The pool adjacent violators algorithm (Ayer et al., 1955).
    """
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean = (mean * count + before * number) / (count + number)
            count += number
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _read(points: Points, num_tokens: int) -> float:
    """Return the seconds of a curve at one place."""
    assert points, "nothing was measured yet"
    first, last = points[0], points[-1]
    if num_tokens <= first[0]:
        return first[1]
    if num_tokens >= last[0]:
        slope = GUESSED_SLOPE * last[1]  # what is too good to be true will be found out
        if last[0] > first[0]:
            slope = min(slope, (last[1] - first[1]) / (last[0] - first[0]))
        return last[1] + slope * (num_tokens - last[0])
    for (left, low), (right, high) in pairwise(points):
        if num_tokens <= right:
            return low + (high - low) * (num_tokens - left) / (right - left)
    raise AssertionError("the curve is not ascending")


def _bucket_of(num_tokens: int) -> int:
    """Return the first number of tokens of the same size; eight from a power of 2 to the next."""
    if num_tokens <= EXACT_TOKENS:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return num_tokens // unit * unit
