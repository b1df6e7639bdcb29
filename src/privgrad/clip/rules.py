"""Clipping rules besides `clipping.Flat`. ClippingAccumulator checks that each contribution keeps the bound."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from privgrad.clip.clipping import Flat, joint_norm_of
from privgrad.errors import expected, require_in, require_positive


@dataclass(frozen=True)
class Automatic:
    """A rule that normalizes instead of clipping: g_i * C / (||g_i|| + gamma).

    Args:
        gamma: >= 1e-8, in gradient units. Gradients much shorter than gamma stay short.
    Privacy:
        Each example's contribution has norm below C.
    Reference:
        Bu et al. 2022 (arXiv 2206.07136), AUTO-S.
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        require_in("Automatic", "gamma", self.gamma, "[1e-8, inf)", "0.01 is the paper's")

    def factors(self, norms: Mapping[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
        return dict.fromkeys(norms, max_grad_norm / (joint_norm_of(norms) + self.gamma))


@dataclass(frozen=True)
class PerLayer:
    """A rule with a bound C_l for each group of parameters, where sqrt(sum of C_l**2) = C.

    Args:
        shares: a positive weight by prefix of the parameter's name. "" matches every name; the longest match counts.
            Only ratios matter: C_l = C * share_l / sqrt(sum of share**2). C itself is the plan's.
    Raises:
        PrivacyError: a share is not positive, or (on first use) a parameter has no prefix or a prefix no parameter.
    Privacy:
        In each example's contribution, group l has norm at most C_l, so the whole has norm at most C.
    Reference:
        McMahan et al. 2018 (arXiv 1710.06963), per-layer clipping.
    """

    shares: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if not self.shares:
            raise expected("PerLayer", "shares", "to name at least one group", "{}", "give {prefix: share}, or Flat()")
        for prefix, share in self.shares.items():
            require_positive("PerLayer", f"share of {prefix!r}", share)

    def factors(self, norms: Mapping[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
        groups = {name: self.group_of(name) for name in norms}
        if unused := ", ".join(map(repr, sorted(set(self.shares) - set(groups.values())))):
            raise expected("PerLayer", "every prefix", "to match a trainable parameter", unused)
        whole, found = sum(share**2 for share in self.shares.values()) ** 0.5, dict[str, Tensor]()
        for prefix, share in self.shares.items():
            own = {name: norms[name] for name in norms if groups[name] == prefix}
            found |= Flat().factors(own, max_grad_norm * share / whole)
        return {name: found[name] for name in norms}

    def group_of(self, name: str) -> str:
        """Return the longest prefix that matches a parameter's name."""
        matching = [prefix for prefix in self.shares if prefix == "" or name == prefix or name.startswith(prefix + ".")]
        if not matching:
            got = f"the parameter {name!r} without a share"
            raise expected("PerLayer", "shares", "to cover every parameter", got, "add a prefix, or ''")
        return max(matching, key=len)
