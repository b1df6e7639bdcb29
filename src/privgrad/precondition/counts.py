"""Scales for AdaDPS from public knowledge about features, such as word frequencies or TF-IDF weights.

Each function takes counts or weights of V features, and returns `Scales` A for one two-dimensional parameter, with one
entry per feature. Gradients are divided by A before clipping, so features with a small A gain weight. The scales
cost no privacy only if they do not depend on the private data; see `Scales` on their provenance.
"""

from typing import Any

import torch
from torch import Tensor

from privgrad.errors import expected, require_in, require_positive
from privgrad.gradient.transform import Provenance, Scales


def frequencies(
    counts: Tensor,
    *,
    parameter: str,
    dim: int,
    source: str,
    provenance: Provenance,
    cap: float = 1e4,
    division: float = 100.0,
    power: float = 1.0,
) -> Scales:
    """Compute scales that grow with the frequency of a feature.

    By default they multiply the gradients of rare features by up to 100, and divide those of frequent features.

    Computes: f_j = (counts_j + 0.1) / sum counts + 1e-10; r_j = min(cap, max f / f_j)**power / division; A_j = 1 / r_j.

    Args:
        counts: number of occurrences of each feature, shape (V,), finite, >= 0, not all 0.
        parameter: name of the parameter that the scales are for.
        dim: dimension of the parameter that runs over features: 1 for the weight of a Linear, 0 for an embedding table.
        source: the data that was counted, in a few words; recorded.
        provenance: "public data", "common knowledge" or "private-derived"; see `Scales`. There is no default: the
            privacy guarantee rests on it.
        cap: largest ratio, >= 1.
        division: divisor of the ratio, > 0. With 1, the most frequent feature has the scale 1.
        power: exponent of the ratio, in [0, 1]; the paper's is 1. On our texts 0.1 was as good as no scales, and each
            larger power worse (docs/choosing-evidence.md).
    Returns:
        {parameter: A}, of shape (V, 1) or (1, V), positive.
    Raises:
        PrivacyError: counts or numbers are out of their range.
    Privacy:
        As public as the counts. Counts of the private data are "private-derived", and no epsilon covers the scales.
    Reference:
        Li et al. 2022 (AdaDPS, arXiv 2202.05963), token frequencies as their code computes them.
    """
    counted = _features("frequencies", "counts", counts)
    require_in("frequencies", "cap", cap, "[1, inf)")
    require_positive("frequencies", "division", division)
    require_in("frequencies", "power", power, "[0, 1]")
    share = (counted + 0.1) / counted.sum() + 1e-10
    ratio = (share.max() / share).clamp(max=cap) ** power / division
    return _scales("frequencies", 1 / ratio, parameter, dim, source, provenance)


def by_rank(
    counts: Tensor,
    *,
    parameter: str,
    dim: int,
    source: str,
    provenance: Provenance,
    frequent: int = 100,
    multiplier: float = 20.0,
) -> Scales:
    """Compute scales with two levels: 1 for the most frequent features, 1 / multiplier for the rest, 1/20 by default.

    The arguments are as in `frequencies`, except `frequent`, the number of features that count as frequent, from 1 to
    V, and `multiplier` > 0: the authors use 20, and 200 in federated training.

    Returns:
        As `frequencies`.
    Raises:
        PrivacyError: counts or numbers are out of their range.
    Privacy:
        As `frequencies`.
    Reference:
        Li et al. 2022 (AdaDPS), as in their code for StackOverflow.
    """
    counted = _features("by_rank", "counts", counts)
    require_in("by_rank", "frequent", frequent, f"[1, {len(counted)}]")
    require_positive("by_rank", "multiplier", multiplier)
    scale = torch.full_like(counted, 1 / multiplier)
    scale[counted.argsort(descending=True, stable=True)[:frequent]] = 1.0
    return _scales("by_rank", scale, parameter, dim, source, provenance)


def tfidf(
    weights: Any, *, parameter: str, dim: int, source: str, provenance: Provenance, special: tuple[int, ...] = ()
) -> Scales:
    """Compute scales from the TF-IDF weights of documents: small for features with a large total weight.

    Computes: r_j = 10 (sum over documents of weights_ij + 1e-10), 0.01 for special tokens; A_j = 1 / r_j, at most 1e9.

    The arguments are as in `frequencies`, except:

    - `weights`: TF-IDF weights by document and feature, shape (n, V), finite, >= 0, not all 0, dense or sparse: the
      result of `fit_transform` of scikit-learn's TfidfVectorizer or TfidfTransformer;
    - `special`: indices of features that are not words (padding, start, unknown), from 0 to V - 1.

    Returns:
        As `frequencies`.
    Raises:
        PrivacyError: weights or indices are out of their range.
    Privacy:
        As `frequencies`.
    Reference:
        Li et al. 2022 (AdaDPS), TF-IDF as their code computes it.
    """
    if weights.ndim != 2:
        raise expected("tfidf", "weights", "to be a matrix of documents and features", f"{weights.ndim} dimensions")
    matrix = weights.to_sparse_coo() if isinstance(weights, Tensor) else weights
    summed, absolute = _column_sums(matrix), _column_sums(abs(matrix))
    if not torch.equal(summed, absolute):  # NaN differs from itself
        got = f"negative or NaN weights in column {int((summed != absolute).nonzero()[0, 0])}"
        raise expected("tfidf", "weights", "to be finite and >= 0", got)
    for index in special:
        require_in("tfidf", "special", index, f"[0, {len(summed) - 1}]")
    ratio = 10 * (_features("tfidf", "weights", summed) + 1e-10)
    ratio[list(special)] = 0.01
    return _scales("tfidf", 1 / ratio, parameter, dim, source, provenance)


def _column_sums(matrix: Any) -> Tensor:
    """Return the sum of each column of a dense or sparse matrix, of torch or scipy, shape (V,)."""
    found = matrix.sum(0)
    return torch.as_tensor(found.to_dense() if isinstance(found, Tensor) else found).flatten()


def _features(function: str, name: str, values: Any) -> Tensor:
    """Return one number per feature in float64; raise PrivacyError unless they are finite, >= 0 and not all 0."""
    found = torch.as_tensor(values).double()
    if found.ndim != 1 or not bool((torch.isfinite(found) & (found >= 0)).all()) or float(found.sum()) <= 0:
        ends = f", from {float(found.min()):g} to {float(found.max()):g}" if found.numel() else ""
        condition = "to be one number per feature, finite, >= 0 and not all 0"
        raise expected(function, name, condition, f"shape {tuple(found.shape)}{ends}")
    return found


def _scales(function: str, scale: Tensor, parameter: str, dim: int, source: str, provenance: Provenance) -> Scales:
    if dim not in (0, 1):
        raise expected(function, "dim", "to be 1 for the weight of a Linear, 0 for an embedding", dim)
    return Scales({parameter: scale.unsqueeze(1 - dim)}, provenance=provenance, source=source)
