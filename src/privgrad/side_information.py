"""Scales for AdaDPS from what is known beside the private examples: how frequent words are, how much they tell.

All take counts or weights of V features and give `Scales` A for one two-dimensional parameter, one entry a feature.
Gradients are divided by A, so what has the smallest A gains on the rest. With `frequencies` and `by_rank` these are the
rare features: multiplied by up to 100 while frequent ones are divided, or by 20 while those stay. With `tfidf` they are
the features that weigh most.
"""

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from privgrad.errors import expected, require_integer, require_positive
from privgrad.types import Provenance, Scales


def frequencies(
    counts: Tensor,
    *,
    parameter: str,
    dim: int,
    source: str,
    provenance: Provenance = "public data",
    cap: float = 1e4,
    division: float = 100.0,
) -> Scales:
    """Scales that grow with how frequent a feature is.

    Computes: f_j = (counts_j + 0.1) / sum counts + 1e-10; r_j = min(cap, max f / f_j) / division; A_j = 1 / r_j.

    Args:
        counts: how often each feature occurs, shape (V,), finite, >= 0, not all 0.
        parameter: name of the parameter that the scales are for.
        dim: its dimension that runs over features: 1 for the weight of a Linear, 0 for an embedding table.
        source: what was counted, in a few words; recorded.
        provenance: see `Scales`.
        cap: largest ratio, >= 1. division: > 0.
    Returns:
        {parameter: A}, of shape (V, 1) or (1, V), positive.
    Raises:
        PrivacyError: counts or numbers out of range.
    Privacy:
        As public as the counts: of the private data they are "private-derived", and no epsilon covers them.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), token frequencies as their code computes them.
    """
    counted = _features("frequencies", "counts", counts, "count over public text")
    if cap < 1:
        raise expected("frequencies", "cap", "to be at least 1", cap, "1e4 is the paper's")
    require_positive("frequencies", "division", division, "100 is the paper's")
    share = (counted + 0.1) / counted.sum() + 1e-10
    ratio = (share.max() / share).clamp(max=cap) / division
    return _scales("frequencies", 1 / ratio, parameter, dim, source, provenance)


def by_rank(
    counts: Tensor,
    *,
    parameter: str,
    dim: int,
    source: str,
    provenance: Provenance = "public data",
    frequent: int = 100,
    multiplier: float = 20.0,
) -> Scales:
    """Two levels: A = 1 for the most frequent features, A = 1 / multiplier for the rest.

    Args:
        counts, parameter, dim, source, provenance, Returns, Raises, Privacy: as `frequencies`.
        frequent: how many features are frequent, from 1 to V.
        multiplier: > 0; the authors take 20, and 200 in federated training.
    Reference:
        Li et al. 2022 (AdaDPS), what their code does for StackOverflow.
    """
    counted = _features("by_rank", "counts", counts, "count over public text")
    require_integer("by_rank", "frequent", frequent, 1)
    if frequent > len(counted):
        raise expected("by_rank", "frequent", f"to be at most {len(counted)}, the features", frequent, "lower it")
    require_positive("by_rank", "multiplier", multiplier, "20 is the paper's")
    scale = torch.full_like(counted, 1 / multiplier)
    scale[counted.argsort(descending=True, stable=True)[:frequent]] = 1.0
    return _scales("by_rank", scale, parameter, dim, source, provenance)


def tfidf(
    weights: Any,
    *,
    parameter: str,
    dim: int,
    source: str,
    provenance: Provenance = "public data",
    special: tuple[int, ...] = (),
) -> Scales:
    """Scales from the TF-IDF weights of documents: what weighs much in total is divided down little.

    Computes: r_j = 10 (sum over documents of weights_ij + 1e-10), 0.01 for special tokens; A_j = 1 / r_j, at most 1e9.

    Args:
        weights: of documents and features, shape (n, V), finite, >= 0, not all 0, dense or sparse: what `fit_transform`
            of scikit-learn's TfidfVectorizer or TfidfTransformer gives.
        parameter, dim, source, provenance, Returns, Raises, Privacy: as `frequencies`.
        special: features that are no words (padding, start, unknown), from 0 to V - 1.
    Reference:
        Li et al. 2022 (AdaDPS), TF-IDF as their code computes it.
    """
    shape, remedy = getattr(weights, "shape", ()), "give what fit_transform of scikit-learn's TfidfVectorizer returns"
    if len(shape) != 2:
        got = f"{type(weights).__name__} of shape {tuple(shape)}"
        raise expected("tfidf", "weights", "to be a matrix of documents and features", got, remedy)
    matrix = weights.to_sparse_coo() if isinstance(weights, Tensor) else weights
    summed, absolute = _column_sums(matrix), _column_sums(abs(matrix))
    if not torch.equal(summed, absolute):
        raise expected("tfidf", "weights", "to be finite and >= 0", "others", remedy)
    wrong = [index for index in special if not (isinstance(index, Integral) and 0 <= index < len(summed))]
    if wrong:
        raise expected("tfidf", "special", f"to be from 0 to {len(summed) - 1}", wrong, "give indices of features")
    ratio = 10 * (_features("tfidf", "weights", summed, remedy) + 1e-10)
    ratio[list(special)] = 0.01
    return _scales("tfidf", 1 / ratio, parameter, dim, source, provenance)


def _column_sums(matrix: Any) -> Tensor:
    found = matrix.sum(0)
    return torch.as_tensor(found.to_dense() if isinstance(found, Tensor) else found).flatten()


def _features(function: str, name: str, values: Any, remedy: str) -> Tensor:
    found = torch.as_tensor(values).double()
    if found.ndim != 1 or not bool((torch.isfinite(found) & (found >= 0)).all()) or float(found.sum()) <= 0:
        ends = f", from {float(found.min()):g} to {float(found.max()):g}" if found.numel() else ""
        condition = "one a feature, finite, >= 0 and not all 0"
        raise expected(function, name, condition, f"shape {tuple(found.shape)}{ends}", remedy)
    return found


def _scales(function: str, scale: Tensor, parameter: str, dim: int, source: str, provenance: Provenance) -> Scales:
    if dim not in (0, 1):
        remedy = "1 for the weight of a Linear, 0 for an embedding table"
        raise expected(function, "dim", "to be 0 or 1", dim, remedy)
    shaped = scale.unsqueeze(1 - dim)
    return Scales({parameter: shaped}, provenance=provenance, source=source)
