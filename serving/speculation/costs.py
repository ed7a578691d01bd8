"""What a step costs, learned from the steps that were made."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from operator import itemgetter

MOST_SAMPLES = 7  # of which the least counts: others had a share of the machine
MIN_SAMPLES = 2  # the first step of a kind may be slow: memory is touched, kernels are compiled
STALE_NOTES = 256  # a measurement is forgotten after so many others
REFRESH_NOTES = 16  # how often the curve is drawn anew
GUESSED_SLOPE = 0.02  # of a step's time, for each token more, where nothing longer was measured
EXACT_TOKENS = 16  # up to here each number of tokens is measured by itself


class StepCosts:
    """Seconds of a decode step by how many tokens it computes.

    Between measurements they are interpolated, beyond the largest they go on with the mean slope,
    or a flat one, so that longer steps are tried at all.
    They never fall with more tokens: where measurements say so, their mean counts.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._num_notes = 0
        self._drawn_at = 0
        self._curve: list[tuple[int, float]] = []  # (tokens, seconds), both ascending
        self._seconds: dict[int, float] = {}  # of the curve, as they were asked for

    def note(self, num_tokens: int, elapsed_s: float) -> None:
        """A step of so many tokens took so long."""
        self._num_notes += 1
        key = _bucket_of(num_tokens)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
        bucket.samples.append((num_tokens, elapsed_s))
        bucket.noted_at = self._num_notes
        new = len(bucket.samples) <= MIN_SAMPLES
        if new or self._num_notes - self._drawn_at >= REFRESH_NOTES:
            self._draw()

    def knows(self, num_tokens: int) -> bool:
        """Whether steps of about this size were measured, or both smaller and larger ones."""
        if not self._curve:
            return False
        smallest, largest = self._curve[0][0], self._curve[-1][0]
        return _bucket_of(smallest) <= _bucket_of(num_tokens) <= _bucket_of(largest)

    def seconds(self, num_tokens: int) -> float:
        """Return what a step of `num_tokens` takes; something has to be known."""
        found = self._seconds.get(num_tokens)
        if found is None:
            found = self._seconds[num_tokens] = self._read(num_tokens)
        return found

    def _read(self, num_tokens: int) -> float:
        curve = self._curve
        assert curve, "nothing was measured yet"
        first, last = curve[0], curve[-1]
        if num_tokens <= first[0]:
            return first[1]
        if num_tokens >= last[0]:
            slope = GUESSED_SLOPE * last[1]  # what is too good to be true will be found out
            if last[0] > first[0]:
                slope = min(slope, (last[1] - first[1]) / (last[0] - first[0]))
            return last[1] + slope * (num_tokens - last[0])
        for (left, low), (right, high) in pairwise(curve):
            if num_tokens <= right:
                return low + (high - low) * (num_tokens - left) / (right - left)
        raise AssertionError("the curve is not ascending")

    def _draw(self) -> None:
        """Draw the curve from what is measured, and forget what is stale."""
        self._drawn_at = self._num_notes
        self._seconds.clear()
        for key, bucket in list(self._buckets.items()):
            if self._num_notes - bucket.noted_at > STALE_NOTES:
                del self._buckets[key]
        known = sorted(key for key, one in self._buckets.items() if len(one.samples) >= MIN_SAMPLES)
        least = [min(self._buckets[key].samples, key=itemgetter(1)) for key in known]
        seconds = ascending([seconds for _, seconds in least])
        sizes = [num_tokens for num_tokens, _ in least]
        self._curve = list(zip(sizes, seconds, strict=True))


class _Bucket:
    """The latest steps of about one size."""

    __slots__ = ("noted_at", "samples")

    def __init__(self) -> None:
        self.samples: deque[tuple[int, float]] = deque(maxlen=MOST_SAMPLES)  # tokens, seconds
        self.noted_at = 0


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


def _bucket_of(num_tokens: int) -> int:
    """Return the first number of tokens of the same size; eight from a power of 2 to the next."""
    if num_tokens <= EXACT_TOKENS:
        return num_tokens
    unit = 1 << (num_tokens.bit_length() - 4)
    return num_tokens // unit * unit
