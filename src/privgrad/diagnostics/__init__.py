"""What happens to the gradient on its way: moments with and without noise, clipping, classes. Mostly NOT private."""

from privgrad.diagnostics.alignment import raw_pairwise_cosines
from privgrad.diagnostics.bias import raw_clipping_bias
from privgrad.diagnostics.diary import RawDiary
from privgrad.diagnostics.groups import by_frequency
from privgrad.diagnostics.moments import RawTwins, five_numbers
from privgrad.diagnostics.watch import RawWatch

__all__ = [
    "RawDiary",
    "RawTwins",
    "RawWatch",
    "by_frequency",
    "five_numbers",
    "raw_clipping_bias",
    "raw_pairwise_cosines",
]
