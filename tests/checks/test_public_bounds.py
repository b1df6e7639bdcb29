"""Bounds that were copied from the data: of which it warns, and which pass."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from privgrad.checks.data import is_typed, warn_of_private_bound

VALUES = torch.linspace(-50.0, 40.0, 200, dtype=torch.float64)[:, None] + 0.123456


def warns(bound: float | list[float], rows: Tensor, **options: Any) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_private_bound("test", "bound", torch.tensor(bound, dtype=torch.float64), rows, **options)
    return bool(caught)


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
def test_the_exact_extremes_warn(dtype: torch.dtype):
    rows = VALUES.to(dtype)
    for is_low, extreme in ((True, float(rows.min())), (False, float(rows.max()))):
        assert warns(extreme, rows, is_low=is_low)
        assert not warns(extreme, rows, is_low=not is_low)
        assert not warns(float(f"{extreme:.2g}"), rows, is_low=is_low)
        assert not warns(extreme * 1.01, rows, is_low=is_low)
    assert not warns(float(rows.max()), rows[:0])


def test_the_warning_shows_no_value():
    with pytest.warns(UserWarning, match="test: bound: this is the largest value of the data") as caught:
        warn_of_private_bound("test", "bound", VALUES.max(), VALUES)
    assert "40" not in str(caught[0].message)


@pytest.mark.parametrize(("low", "high"), [(0, 65_535), (1901, 2023), (0, 1023), (0, 4095)])
def test_public_ranges_whose_ends_a_row_reaches_are_no_error(low: int, high: int):
    rows = torch.linspace(low, high, 500, dtype=torch.float64)[:, None]
    with pytest.warns(UserWarning, match="If it was known without the data, such as 65535, it is right"):
        warn_of_private_bound("test", "bound", torch.tensor(float(high)), rows)


def test_each_column_is_compared_with_its_own_bound():
    rows = torch.cat([VALUES, 100 * VALUES], dim=1)
    highs = rows.amax(0).tolist()
    assert warns(highs, rows)
    assert warns([100.0, highs[1]], rows)
    assert warns(highs[1], rows)  # one bound for all columns
    assert not warns([highs[1], highs[0]], rows)


@pytest.mark.parametrize(("rows", "reached", "warned"), [(200, 9, True), (200, 10, False), (1000, 10, False)])
def test_a_bound_to_which_many_rows_were_clipped_passes(rows: int, reached: int, warned: bool):
    values = torch.linspace(0, 1, rows, dtype=torch.float64)[:, None]
    bound = float((values[-reached] + values[-reached - 1]) / 2) + 1e-5
    assert warns(bound, values.clamp(max=bound)) == warned


def test_few_rows_count_by_their_share_but_never_alone():
    values = torch.arange(20.0)[:, None]
    assert warns(19.1234, torch.where(values == 19, 19.1234, values))
    assert not warns(18.1234, torch.where(values >= 18, 18.1234, values))


def test_pixels_with_a_public_scale_pass_although_some_columns_reach_it_once():
    pixels = (torch.randint(0, 256, (60, 30), generator=torch.Generator().manual_seed(0)) / 255 - 0.1307) / 0.3081
    pixels[:20] = pixels[:20].clamp(max=2.0)
    pixels[30:, 5:] = (1 - 0.1307) / 0.3081
    assert not warns((1 - 0.1307) / 0.3081, pixels)
    assert not warns([(1 - 0.1307) / 0.3081] * 30, pixels)
