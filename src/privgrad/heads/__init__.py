"""Private linear heads: one linear layer, trained on features that need no epsilon.

Users call `fit_head`, and `estimators` does. The privacy guarantee rests on PrivateGradient, and on the rule that a
row of the features depends on the same row of the data and on public numbers only.
"""

from privgrad.heads.fitting import fit_head
from privgrad.heads.head import Head

__all__ = ["Head", "fit_head"]
