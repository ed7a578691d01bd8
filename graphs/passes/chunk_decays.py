"""What a chunk of tokens leaves of states and of each other, where decays are of heads or channels.

A head's decays are a matrix that products of keys are multiplied with. Those of channels are in
keys and queries (Kimi Delta Attention, arXiv:2510.26692): with sums G of g up to a token, a product
of the keys i < t is that of k[i] exp(-G[i]) and k[t] exp(G[t]), the first of which is no float
where decays are strong. So tokens are in pairs of blocks, as the inverse has them: i is in the
first one and t in the second, and both exponentials are of sums within a block, which are no more
than 0. All pairs of blocks of one size are one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.builder import GraphBuilder

_LEVEL: Final = 2  # axis of what is of each size of blocks
_LAST: Final = 2**31


@dataclass(frozen=True, slots=True)
class HeadDecays:
    """Of a decay a head: what a token's numbers are times that others read.

    Attributes:
        within: D, [batch, heads, C, C].
        until: exp of sums up to a token, [batch, heads, 1, C].
    """

    g: GraphBuilder
    within: str
    until: str

    def products(self, keys: str, columns: str) -> str:
        """Of keys [batch, heads, C, key_size] and columns [batch, heads, key_size, C] of others."""
        return self.g.node("Mul", [self.g.node("MatMul", [keys, columns]), self.within])

    def found(self, state: str, columns: str) -> str:
        """What columns find in a state [batch, heads, value_size, key_size] from before."""
        return self.g.node("Mul", [self.g.node("MatMul", [state, columns]), self.until])

    def left(self, state: str) -> str:
        """What is left of a state behind the chunk."""
        return self.g.node("Mul", [state, _last(self.g, self.until, -1)])

    def change(self, added: str, keys: str) -> str:
        """What is left there of what tokens add, [batch, heads, value_size, C]."""
        g = self.g
        rest = g.node("Transpose", [_last(g, self.within, -1)], perm=[0, 1, 3, 2])
        return g.node("MatMul", [g.node("Mul", [added, rest]), keys])


@dataclass(frozen=True, slots=True)
class ChannelPatterns:
    """Which tokens of a chunk are summed up, and which ones are pairs; float32, 1 where they are.

    Attributes:
        upto: [levels + 1, C, C], t and i up to it in its block, of 1, 2, 4 tokens and so on; the
            last one is all of the chunk.
        behind: likewise, i behind t.
        pairs: [levels, C, C], i in a block and t in the one behind it, as a pair of blocks.
        same: [C, C], t itself.
    """

    upto: str
    behind: str
    pairs: str
    same: str


@dataclass(frozen=True, slots=True)
class ChannelDecays:
    """Of a decay of each channel of a key; see `HeadDecays`.

    Attributes:
        upto: exp of sums up to a token in its block, [batch, heads, levels + 1, C, key_size].
        behind: likewise of those behind it.
    """

    g: GraphBuilder
    patterns: ChannelPatterns
    upto: str
    behind: str

    @classmethod
    def of(cls, g: GraphBuilder, patterns: ChannelPatterns, decay: str) -> ChannelDecays:
        """Sum up decays [batch, heads, C, key_size], which are 0 behind the end of a row."""
        apart = g.node("Unsqueeze", [decay, _ints(g, _LEVEL)])
        upto, behind = (
            g.node("Exp", [g.node("MatMul", [which, apart])])
            for which in (patterns.upto, patterns.behind)
        )
        return cls(g, patterns, upto, behind)

    def products(self, keys: str, columns: str) -> str:
        """Of keys and columns of others; of a token's own there is no decay."""
        g = self.g
        first = g.node("Mul", [self._apart(keys), self._of_blocks(self.behind)])
        upto = g.node("Transpose", [self._of_blocks(self.upto)], perm=[0, 1, 2, 4, 3])
        second = g.node("Mul", [self._apart(columns), upto])
        found = g.node("Mul", [g.node("MatMul", [first, second]), self.patterns.pairs])
        others = g.node("ReduceSum", [found, _ints(g, _LEVEL)], keepdims=0)
        own = g.node("Mul", [g.node("MatMul", [keys, columns]), self.patterns.same])
        return g.node("Add", [others, own])

    def found(self, state: str, columns: str) -> str:
        """What columns find in a state from before."""
        g = self.g
        upto = g.node("Transpose", [self._of_all(self.upto)], perm=[0, 1, 3, 2])
        return g.node("MatMul", [state, g.node("Mul", [columns, upto])])

    def left(self, state: str) -> str:
        """What is left of a state behind the chunk."""
        g = self.g
        return g.node("Mul", [state, _last(g, self._of_all(self.upto), -2)])

    def change(self, added: str, keys: str) -> str:
        """What is left there of what tokens add."""
        g = self.g
        return g.node("MatMul", [added, g.node("Mul", [keys, self._of_all(self.behind)])])

    def _apart(self, x: str) -> str:
        return self.g.node("Unsqueeze", [x, _ints(self.g, _LEVEL)])

    def _of_blocks(self, x: str) -> str:
        """All sizes of blocks but the chunk."""
        bounds = [_ints(self.g, 0), _ints(self.g, -1), _ints(self.g, _LEVEL)]
        return self.g.node("Slice", [x, *bounds])

    def _of_all(self, x: str) -> str:
        one = _last(self.g, x, _LEVEL)
        return self.g.node("Squeeze", [one, _ints(self.g, _LEVEL)])


def channel_sums(most: int) -> NDArray[np.float32]:
    """Both kinds of sums of `most` tokens, a power of two; [2, levels + 1, most, most]."""
    t = np.arange(most)[:, None]
    i = np.arange(most)
    sizes = [1 << power for power in range(most.bit_length())]
    upto = [(t // size == i // size) & (i <= t) for size in sizes]
    behind = [(t // size == i // size) & (i > t) for size in sizes]
    return np.array([upto, behind]).astype(np.float32)


def _last(g: GraphBuilder, x: str, axis: int) -> str:
    """What is last along an axis, which stays."""
    return g.node("Slice", [x, _ints(g, -1), _ints(g, _LAST), _ints(g, axis)])


def _ints(g: GraphBuilder, *values: int) -> str:
    return g.constant(np.array(values, np.int64), "ints")
