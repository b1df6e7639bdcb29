"""Sparse rows as ordinary tensors, so that batches of them are drawn like any other and nothing is written out."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from privgrad.errors import expected

_MOST_COLUMNS = 2**24  # up to here float32 holds every integer
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def packed(matrix: Any) -> Tensor:
    """A sparse matrix as one row of (column, value) pairs an example: what `models.SparseLinear` takes.

    Args:
        matrix: shape (n, V), real, finite in float32: a scipy sparse matrix or array (such as scikit-learn's
            vectorizers give), or a torch sparse tensor of any layout.
    Returns:
        float32, shape (n, 2, L), with L the most entries that a row has: columns in [:, 0], values in [:, 1]; where a
        row has fewer, value 0 in column 0.
    Raises:
        PrivacyError: not sparse, not of two dimensions, of more than 2**24 columns, or with other values.
    Privacy:
        L is the private rows' own: NOT private, and never released.
    """
    if isinstance(matrix, Tensor):
        if matrix.layout not in _LAYOUTS or matrix.dense_dim():
            raise _not_sparse("a dense tensor" if matrix.layout == torch.strided else "a tensor partly dense")
        coalesced = matrix.detach().to_sparse_coo().coalesce()
        shape, values = tuple(matrix.shape), coalesced.values().numpy()
        rows, columns = coalesced.indices().numpy() if len(shape) == 2 else (values, values)
    else:
        if not hasattr(matrix, "tocoo"):
            raise _not_sparse(type(matrix).__name__)
        found = matrix.tocsr().tocoo()  # by rows, whatever its format
        shape, values, rows, columns = found.shape, found.data, found.row, found.col
    if len(shape) != 2 or shape[1] > _MOST_COLUMNS:
        remedy = "give one row an example"
        raise expected("packed", "matrix", f"of shape (n, V), V at most {_MOST_COLUMNS}", tuple(shape), remedy)
    if np.iscomplexobj(values) or not (np.abs(values) <= np.finfo(np.float32).max).all():  # also if not a number
        raise expected("packed", "matrix", "of real values that are finite in float32", "others", "scale or drop them")
    counts = np.bincount(rows, minlength=shape[0])
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    out = torch.zeros(shape[0], 2, max(int(counts.max(initial=0)), 1))
    array = out.numpy()
    array[rows, 0, place], array[rows, 1, place] = columns, values
    return out


def _not_sparse(got: str) -> Exception:
    remedy = "give scipy.sparse.csr_array(matrix), or an ordinary Linear the dense one"
    return expected("packed", "matrix", "to be a scipy sparse matrix or a torch sparse tensor", got, remedy)
