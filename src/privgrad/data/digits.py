"""Scikit-learn's handwritten digits, which the quick start trains on."""

from typing import cast

import numpy as np
import torch
import torch.nn.functional as F

from privgrad.data.dataset import DataSet, split
from privgrad.data.schema import Positive
from privgrad.errors import require_integer
from privgrad.plugins import optional


def digits(*, size: Positive = 8, standardize: bool = True, validation: int = 0) -> DataSet:
    """Load scikit-learn's handwritten digits: 1,437 training (less `validation`) and 360 test images, 1x8x8.

    Args:
        size: >= 8: width and height to which the images are enlarged, by interpolation.
        standardize: subtract the mean 0.3 and divide by the deviation 0.37; otherwise pixels are in [0, 1].
        validation: number of training examples to hold out.
    Raises:
        PrivacyError: scikit-learn is not installed, or more examples are held out than there are.
    """
    module = optional("digits", "scikit-learn", "sklearn.datasets", "pip install 'privgrad[experiments]'")
    pixels, targets = cast("tuple[np.ndarray, np.ndarray]", module.load_digits(return_X_y=True))
    images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    if size != 8:
        require_integer("digits", "size", size, 8)
        images = F.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(targets).long()
    # The file is ordered by writer; a fixed permutation makes the parts similar.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    mean, std = (0.3, 0.37) if standardize else (0.0, 1.0)
    images, labels = (images[order] - mean) / std, labels[order]
    train, test = (images[:1437], labels[:1437]), (images[1437:], labels[1437:])
    return split("digits (scikit-learn)", train, test, validation, pixel_range=(-mean / std, (1 - mean) / std))
