"""Bounds that were copied from the data: which are refused, and which pass."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import privgrad as pg
from privgrad.checks.data import is_typed, require_public_bound

VALUES = torch.linspace(-50.0, 40.0, 200, dtype=torch.float64)[:, None] + 0.123456


def refuses(bound: float | list[float], rows: Tensor, **options: Any) -> bool:
    try:
        require_public_bound("test", "bound", torch.tensor(bound, dtype=torch.float64), rows, **options)
    except pg.PrivacyError:
        return True
    return False


@pytest.mark.parametrize(
    ("bound", "typed"),
    [(0, True), (255, True), (1.5e5, True), (0.001, True), (-273, True), (40.1, True), (2024, False), (1.234, False)],
)
def test_bounds_of_three_digits_are_typed(bound: float, typed: bool):
    assert is_typed(bound) == is_typed(float(torch.tensor(bound))) == typed


def test_square_roots_of_whole_numbers_are_typed():
    assert all(is_typed(math.sqrt(count)) for count in range(1, 1000))
    assert not is_typed(math.sqrt(1234.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exact_extremes_are_refused(dtype: torch.dtype):
    rows = VALUES.to(dtype)
    for is_low, extreme in ((True, float(rows.min())), (False, float(rows.max()))):
        assert refuses(extreme, rows, is_low=is_low)
        assert not refuses(extreme, rows, is_low=not is_low)
        assert not refuses(float(f"{extreme:.2g}"), rows, is_low=is_low)
        assert not refuses(extreme * 1.01, rows, is_low=is_low)
    assert not refuses(float(rows.max()), rows[:0])


def test_the_error_shows_no_value():
    with pytest.raises(pg.PrivacyError, match="bound to be public, got the largest value of the data") as caught:
        require_public_bound("test", "bound", VALUES.max(), VALUES)
    assert "40" not in str(caught.value)


def test_each_column_is_compared_with_its_own_bound():
    rows = torch.cat([VALUES, 100 * VALUES], dim=1)
    highs = rows.amax(0).tolist()
    assert refuses(highs, rows)
    assert refuses([100.0, highs[1]], rows)
    assert refuses(highs[1], rows)  # one bound for all columns
    assert not refuses([highs[1], highs[0]], rows)


@pytest.mark.parametrize(("rows", "reached", "refused"), [(200, 9, True), (200, 10, False), (1000, 10, False)])
def test_a_bound_to_which_many_rows_were_clipped_passes(rows: int, reached: int, refused: bool):
    values = torch.linspace(0, 1, rows, dtype=torch.float64)[:, None]
    bound = float((values[-reached] + values[-reached - 1]) / 2) + 1e-5
    assert refuses(bound, values.clamp(max=bound)) == refused


def test_few_rows_count_by_their_share_but_never_alone():
    values = torch.arange(20.0)[:, None]
    assert refuses(19.1234, torch.where(values == 19, 19.1234, values))
    assert not refuses(18.1234, torch.where(values >= 18, 18.1234, values))


def test_pixels_with_a_public_scale_pass_although_some_columns_reach_it_once():
    pixels = (torch.randint(0, 256, (60, 30), generator=torch.Generator().manual_seed(0)) / 255 - 0.1307) / 0.3081
    pixels[:20] = pixels[:20].clamp(max=2.0)
    pixels[30:, 5:] = (1 - 0.1307) / 0.3081
    assert not refuses((1 - 0.1307) / 0.3081, pixels)
    assert not refuses([(1 - 0.1307) / 0.3081] * 30, pixels)
