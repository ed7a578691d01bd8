"""Products with a matrix that comes some rows at a time, in NumPy."""

from __future__ import annotations

from typing import Final

import numpy as np

from onnxport.exporter.reference_parts import Array

_SMALL_PRODUCT: Final = 1 << 18  # multiplications; OpenBLAS threads what is larger


class Product:
    """`x @ matrix.T`, `group` rows of the matrix at a time.

    Many small products instead of a large one: a BLAS does each on the calling thread, without
    packing, which is three times as fast here; and its own threads, which would spin while ours
    work, stay asleep.
    """

    def __init__(self, x: Array, rows: int) -> None:
        self._x = np.ascontiguousarray(x.T)  # [K, m]
        self._y = np.empty((rows, len(x)), np.float32)
        self.group = max(1, _SMALL_PRODUCT // max(x.size, 1))  # rows of one small product

    def add(self, matrix: Array, where: slice) -> None:
        """Multiply rows [n, K] of the matrix, which lie at `where` in the whole."""
        columns, tokens = self._x.shape
        y = self._y[where]
        whole = len(matrix) // self.group * self.group
        groups = matrix[:whole].reshape(-1, self.group, columns)
        np.matmul(groups, self._x, out=y[:whole].reshape(-1, self.group, tokens))
        np.matmul(matrix[whole:], self._x, out=y[whole:])

    def result(self, bias: Array | None = None) -> Array:
        """All of it, float32 [m, rows], and a bias [rows] added."""
        y = np.ascontiguousarray(self._y.T)
        return y if bias is None else y + bias


class SumOfProducts:
    """`x[:, i] @ matrices[i].T + parts[:, i] * biases[i]`, added up over matrices.

    These, and biases, lie one below the other.
    """

    def __init__(self, x: Array, parts: Array, rows: int) -> None:
        matrices = x.shape[1]  # of x [m, matrices, K]
        self._parts = parts
        self._rows = rows // matrices
        self._products = [Product(x[:, i], self._rows) for i in range(matrices)]
        self.group = self._products[0].group

    def add(self, matrix: Array, where: slice) -> None:
        """See `Product`; the rows are of one matrix."""
        at, first = divmod(where.start, self._rows)
        self._products[at].add(matrix, slice(first, first + len(matrix)))

    def result(self, biases: Array | None = None) -> Array:
        """The sum, float32 [m, rows of a matrix]."""
        y = self._products[0].result()
        for product in self._products[1:]:
            y += product.result()
        if biases is not None:
            y += np.einsum("mi,ir->mr", self._parts, biases.reshape(-1, self._rows))
        return y
