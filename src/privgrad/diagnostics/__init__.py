"""Statistics of the gradient before and after clipping and noise.

Most of them are NOT private: names that begin with `raw_` or `Raw` are computed before the noise. ReleasedStats uses
released values only. None of them is part of an update.

Users, experiments and the items of papers call this package. The privacy guarantee does not rest on it.
"""

from privgrad.diagnostics.alignment import raw_pairwise_cosines
from privgrad.diagnostics.bias import raw_clipping_bias
from privgrad.diagnostics.class_frequency import by_frequency
from privgrad.diagnostics.gradient_stats import RawGradientStats
from privgrad.diagnostics.moments import RawMoments, five_numbers
from privgrad.diagnostics.recorder import RawRecorder
from privgrad.diagnostics.released_stats import ReleasedStats

__all__ = [
    "RawGradientStats",
    "RawMoments",
    "RawRecorder",
    "ReleasedStats",
    "by_frequency",
    "five_numbers",
    "raw_clipping_bias",
    "raw_pairwise_cosines",
]
