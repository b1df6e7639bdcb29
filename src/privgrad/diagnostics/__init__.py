"""Statistics of the gradient before and after clipping and noise. None of them is part of an update.

Most are NOT private: names that begin with `raw_` or `Raw` are computed before the noise. ReleasedStats uses released
values only.
"""

from privgrad.diagnostics.alignment import raw_pairwise_cosines
from privgrad.diagnostics.bias import raw_clipping_bias
from privgrad.diagnostics.class_frequency import by_frequency
from privgrad.diagnostics.gradient_stats import RawGradientStats, ReleasedStats
from privgrad.diagnostics.moments import RawMoments, five_numbers
from privgrad.diagnostics.recorder import RawRecorder

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
