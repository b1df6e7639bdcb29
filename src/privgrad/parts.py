"""Parts: the arguments of PrivateGradient that make a gradient from a batch, checked before anything is changed.

The guarantee needs two things of this file: `stateful`, which names the parts that may declare that they are not
public, and `statistic`. The rest refuses mistakes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from privgrad.clip.adaptive import AdaptiveClip
from privgrad.clip.clipping import Clipping, Flat, is_own_rule
from privgrad.clip.norm_statistics import NormBins, NormStatistic, chosen_slots
from privgrad.clip.rules import Automatic
from privgrad.errors import described, expected, require_choice, require_integer, require_positive
from privgrad.gradient.contribution import Contribution, Engine, SampleGradient
from privgrad.gradient.functional import trainable
from privgrad.gradient.reference import Vmap
from privgrad.gradient.transform import Preconditioner
from privgrad.plan import PrivacyPlan
from privgrad.types import NoisyGradient


class Filter(Protocol):
    """A linear filter of the released gradients, which is post-processing: see privgrad.filters."""

    is_public: bool

    def begun(self) -> "Filter": ...

    def require_shapes(self, shapes: Mapping[str, torch.Size]) -> None: ...

    def moved_on(self, gradient: NoisyGradient, *, in_place: bool) -> NoisyGradient: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


Stateful = Contribution | Preconditioner | AdaptiveClip | Filter


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The arguments of PrivateGradient that make a gradient from a batch, checked."""

    perturb: Contribution | None = None
    precondition: Preconditioner | None = None
    clip: Clipping | None = None
    engine: str = "factored"
    microbatch_size: int | None = None
    memory_mb: float | None = None
    compile: bool = False
    norm_bins: NormBins = None
    adaptive_clip: AdaptiveClip | None = None
    filter: Filter | None = None

    # `privgrad/__init__` hands over what stands below the guarantee, so that no file above imports anything of it.
    engines: ClassVar[dict[str, Callable[..., Engine]]] = {"vmap": Vmap}  # "factored" computes the same, faster
    checks: ClassVar[Any]  # the module `privgrad.checks`, whose functions find mistakes and prove nothing
    input_maps: ClassVar[Any]  # `privgrad.engine.factors.mapped`, which applies a transform's input maps
    compiled: ClassVar[Any]  # `privgrad.engine.compiled.Compiled`
    explanation: ClassVar[Any]  # `privgrad.engine.explanation`

    def __post_init__(self) -> None:
        if self.microbatch_size is not None:
            require_integer("PrivateGradient", "microbatch_size", self.microbatch_size, 1)
        if self.memory_mb is not None:
            require_positive("PrivateGradient", "memory_mb", self.memory_mb, "None lets the engine choose")
        require_choice("PrivateGradient", "engine", self.engine, ("factored", "vmap"))
        for part, name, kind, method, remedy in (
            (self.clip, "clip", "clipping rule", "factors", "clip.Flat(), clip.PerLayer({...}) or clip.Automatic()"),
            (self.perturb, "perturb", "Contribution", "losses", "perturb.BAM(radius) or perturb.SAT(radius)"),
            (self.precondition, "precondition", "Preconditioner", "transform", "precondition.fixed(scales)"),
            (self.filter, "filter", "LinearFilter", "moved_on", "filters.EMA(0.1), say"),
            (self.adaptive_clip, "adaptive_clip", "rule of privgrad.clip", "update", "clip.TargetFraction()"),
        ):
            if part is not None and (isinstance(part, type) or not callable(getattr(part, method, None))):
                raise expected("PrivateGradient", name, f"to be a {kind}", described(part), f"give {remedy}")
        if self.adaptive_clip is not None and isinstance(self.clip, Automatic):
            condition = "to depend on C for adaptive_clip (here, C scales signal and noise alike)"
            raise expected("PrivateGradient", "clip", condition, repr(self.clip), "give clip.Flat()")
        if self.perturb is not None:
            self.perturb.require_filter(self.filter)

    def begun(self, model: nn.Module, plan: PrivacyPlan) -> "Parts":
        """Return the parts of one PrivateGradient: defaults filled in, each with fresh state."""
        perturb = SampleGradient() if self.perturb is None else self.perturb.begun()
        if perturb.privacy_unit != plan.privacy_unit:
            condition = f"to be of unit {perturb.privacy_unit!r}, like the contribution"
            remedy = "plan by PrivacyPlan.for_users, or with privacy_unit='user'"
            if plan.privacy_unit == "user":
                remedy = (
                    "give perturb=privgrad.perturb.SampleGradient('user') or privgrad.federated.LocalUpdate(...), to a "
                    "bridge by private_options={'perturb': ...}"
                )
            raise expected("PrivateGradient", "plan", condition, repr(plan.privacy_unit), remedy)
        if plan.max_batch_size is not None and not perturb.keeps_order:
            raise expected("PrivateGradient", "sampling", f"to be 'poisson' for {perturb!r}", repr(plan.sampling))
        adaptive = self.adaptive_clip
        if adaptive is not None:
            adaptive = adaptive.begun(
                max_grad_norm=plan.max_grad_norm,
                noise_multiplier=plan.noise_std * plan.divisor / plan.max_grad_norm,
                divisor=plan.divisor,
                norm_bins=self.norm_bins,
                size=sum(parameter.numel() for parameter in trainable(model).values()),
            )
        return replace(
            self,
            perturb=perturb,
            precondition=None if self.precondition is None else self.precondition.begun(model),
            clip=Flat() if self.clip is None else self.clip,
            adaptive_clip=adaptive,
            filter=None if self.filter is None else self.filter.begun(),
        )

    def statistic(self, plan: PrivacyPlan) -> NormStatistic | None:
        """Return the statistic of the norms that is released with each gradient; None if there is none."""
        if self.adaptive_clip is not None:
            return self.adaptive_clip.statistic
        return None if self.norm_bins is None else chosen_slots(self.norm_bins, plan.max_grad_norm, plan.noise_std)

    def stateful(self) -> dict[str, Stateful]:
        """Return the parts that may have a state by name, as far as they were given."""
        parts = {
            "perturb": None if type(self.perturb) is SampleGradient else self.perturb,
            "precondition": self.precondition,
            "adaptive_clip": self.adaptive_clip,
            "filter": self.filter,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def not_compiled(self, plan: PrivacyPlan, processes: int) -> list[str]:
        """Return what has no compiled function, in words."""
        unsupported = {
            f"engine={self.engine!r}": self.engine != "factored",
            repr(self.perturb): type(self.perturb) is not SampleGradient,
            repr(self.clip): self.clip is not None and not is_own_rule(self.clip),
            "Poisson batches without a microbatch_size": not self.microbatch_size and plan.max_batch_size is None,
            "adaptive_clip": self.adaptive_clip is not None,  # C is a number in the function
            "groups of examples": plan.group_size > 1,
            "several processes": processes > 1,
        }
        return [part for part, is_unsupported in unsupported.items() if is_unsupported]

    def require_blocks(self) -> None:
        """Raise PrivacyError for a part that needs the whole model at once, which no process of a sharded one has."""
        needing = {
            f"engine={self.engine!r}": self.engine != "factored",
            repr(self.perturb): type(self.perturb) is not SampleGradient,
            repr(self.precondition): self.precondition is not None,
        }
        if got := " and ".join(part for part, needs in needing.items() if needs):
            remedy = "leave it out, or give all processes a whole model"
            raise expected("PrivateGradient", "a sharded model", "to be computed by blocks", got, remedy)
