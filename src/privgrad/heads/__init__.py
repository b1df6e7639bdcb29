"""Private linear heads: one linear layer, trained on features that need no epsilon."""

from privgrad.heads.fitting import fit_head
from privgrad.heads.head import Head

__all__ = ["Head", "fit_head"]
