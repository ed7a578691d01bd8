"""Groups of layers: how many tokens their blocks hold for them, and so how many blocks it takes.

A block id stands for memory of a fixed number of layers. Layers that see the same tokens are
divided into groups of so many; each group has a block of its own for every `block_size` tokens of
a sequence. The blocks of one such column have the same place in the tables of all groups. A group
with a window gives the blocks up that no later token sees, so it holds a few columns however long
the sequence is. A model without windows has one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

MOST_TOKENS: Final = 2**31 - 1  # lengths in the graph contract are int32


class CacheGroups:
    """The groups of a model, and the arithmetic of their columns.

    Attributes:
        windows: tokens that a query sees in each group, its own included; None: all.
        block_size: tokens of a block.
        windowed: the numbers of the groups that have a window.
    """

    __slots__ = ("_resident", "block_size", "windowed", "windows")

    def __init__(self, windows: Sequence[int | None], block_size: int) -> None:
        assert windows, "there is no group"
        assert all(window is None or window > 0 for window in windows), windows
        self.windows = tuple(windows)
        self.block_size = block_size
        self.windowed = tuple(i for i, window in enumerate(windows) if window is not None)
        # Columns that a sequence of any length needs to compute one more: what its next token
        # sees of those before, and the new one.
        self._resident = [
            None if window is None else 1 + -(-(window - 1) // block_size) for window in windows
        ]

    def __len__(self) -> int:
        """How many blocks a column takes."""
        return len(self.windows)

    def first_seen(self, group: int, num_tokens: int) -> int:
        """The first column that what follows `num_tokens` tokens sees, in a group."""
        window = self.windows[group]
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def needed(self, group: int, start: int, end: int) -> range:
        """The columns of a group that what follows column `end` needs, from `start` on.

        Args:
            group: its number.
            start: the columns that there are. If there are any, all that follow are needed: they
                are given up one after the other.
            end: the first column that is not asked for.
        """
        return range(start or self.first_seen(group, end * self.block_size), end)

    def reach(self, columns: range, has: Callable[[int, int], bool]) -> int:
        """The column up to which there is all that is needed to go on behind it.

        Args:
            columns: from where, and how far at most.
            has: whether there is a column, for a group.
        """
        start, end = columns.start, columns.stop
        for group, window in enumerate(self.windows):
            if window is None:
                end = next((one for one in range(start, end) if not has(one, group)), end)
        gaps = True
        while gaps and end > start:
            gaps = False
            for group in self.windowed:
                needed = reversed(self.needed(group, start, end))
                gap = next((one for one in needed if not has(one, group)), None)
                if gap is not None:  # whatever ends behind it needs it, too
                    end, gaps = gap, True
        return max(start, end)

    def resident(self, num_columns: int) -> int:
        """How many blocks a sequence must be able to hold at once to get `num_columns` long."""
        return sum(
            num_columns if most is None else min(num_columns, most) for most in self._resident
        )

    def pending(self, num_columns: int, columns: int, given_up: Sequence[int]) -> int:
        """How many blocks more a sequence has to hold at once, on its way to `num_columns`.

        Args:
            num_columns: how long it gets.
            columns: how long it is.
            given_up: how many columns of each group it has given up.
        """
        left = num_columns - columns
        if left <= 0:
            return 0
        if not self.windowed:
            return left * len(self.windows)
        total = 0
        for most, gone in zip(self._resident, given_up, strict=True):
            total += left if most is None else min(left, max(0, most - (columns - gone)))
        return total

    def longest(self, num_blocks: int) -> int:
        """The most columns that a sequence can have when it may hold `num_blocks` at once.

        Where every group has a window, tokens are counted in 32 bits, and nothing else ends it.
        """
        endless = len(self.windowed) == len(self.windows)
        low, high = 0, MOST_TOKENS // self.block_size if endless else num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            if self.resident(middle) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low
