"""Sparse rows as ordinary tensors, so that batches are drawn as usual and no dense matrix is stored.

Users call `packed` before training. The privacy guarantee does not rest on this file.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import expected

_MOST_COLUMNS = 2**24  # up to here float32 holds every integer
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def packed(matrix: Any) -> Tensor:
    """Return a sparse matrix as one row of (column, value) pairs per example, the input of `models.SparseLinear`.

    Args:
        matrix: shape (n, V), real, finite in float32: a scipy sparse matrix or array (for instance from a vectorizer
            of scikit-learn), or a torch sparse tensor of any layout.
    Returns:
        float32, shape (n, 2, L), where L is the largest number of entries in a row: columns in [:, 0], values in
        [:, 1]. Rows with fewer entries are padded with value 0 in column 0.
    Raises:
        PrivacyError: matrix is not sparse, not of two dimensions, has more than 2**24 columns, or has other values.
    Privacy:
        L depends on the private rows: NOT private, and never released.
    """
    if isinstance(matrix, Tensor):
        if matrix.layout not in _LAYOUTS or matrix.dense_dim():
            raise _not_sparse("a dense tensor" if matrix.layout == torch.strided else "a partly dense tensor")
        coalesced = matrix.detach().to_sparse_coo().coalesce()
        shape, values = tuple(matrix.shape), coalesced.values().numpy()
        rows, columns = coalesced.indices().numpy() if len(shape) == 2 else (values, values)
    else:
        if not hasattr(matrix, "tocoo"):
            raise _not_sparse(type(matrix).__name__)
        found = matrix.tocsr().tocoo()  # sorted by rows, for every format
        shape, values, rows, columns = found.shape, found.data, found.row, found.col
    if len(shape) != 2 or shape[1] > _MOST_COLUMNS:
        condition, remedy = f"to have shape (n, V), V at most {_MOST_COLUMNS}", "give one row per example"
        raise expected("packed", "matrix", condition, tuple(shape), remedy)
    finite = np.abs(values) <= np.finfo(np.float32).max  # False for NaN too
    if np.iscomplexobj(values) or not finite.all():
        got = values.dtype if np.iscomplexobj(values) else values[~finite][0]
        condition = "to have real values that are finite in float32"
        raise expected("packed", "matrix", condition, got, "scale or drop such values")
    counts = np.bincount(rows, minlength=shape[0])
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    out = torch.zeros(shape[0], 2, max(int(counts.max(initial=0)), 1))
    array = out.numpy()
    array[rows, 0, place], array[rows, 1, place] = columns, values
    return out


def _not_sparse(got: str) -> Exception:
    """Return the error for a matrix that is not sparse."""
    remedy = "give scipy.sparse.csr_array(matrix), or use nn.Linear for dense input"
    return expected("packed", "matrix", "to be a scipy sparse matrix or a torch sparse tensor", got, remedy)
