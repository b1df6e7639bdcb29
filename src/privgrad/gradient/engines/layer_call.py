"""One call of a layer by its rule: the output, and the factors that follow from the gradient at the output.

`capture` makes one per call, calls `forward`, and puts `factors` and `delta` into a tap. `passes` calls `factors` with
the gradient there, and `hvp` calls `delta`. The privacy guarantee rests on this file and on the rule that it calls: row
i of a factor must depend on example i only. `self_check` compares some rows.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from privgrad.gradient.autograd_graph import is_additive, sources
from privgrad.gradient.engines.function_calls import Additive
from privgrad.gradient.engines.refusals import CallSequenceChangedError, refused
from privgrad.gradient.engines.taps import HvpTerms
from privgrad.gradient.factors.base import Factor
from privgrad.gradient.factors.displacement import Displacements, PerSampleWeight
from privgrad.gradient.factors.jacobian import Jacobian, JacobianNorms, Pulled
from privgrad.gradient.factors.row_map import SharedSums
from privgrad.gradient.factors.weight_standardization import MovedStandardizedWeight, StandardizedWeight
from privgrad.gradient.layers.base import Rule, add_to, is_built_in


class LayerCall:
    """One call of a layer by its rule, with detached weights.

    A call refers neither to its output nor to the `Capture` that made it. A cycle of references would keep the pass in
    memory until garbage collection.

    Args:
        path: the layer's path, for messages.
        rule: the layer's rule.
        layer: the module, or the options of a functional call.
        weights: the layer's weights by name; a weight may be computed from parameters, and then has a graph.
        x: the input, with examples in dimension 0.
        norms: measured norms of Jacobians.
        curved: whether the call is part of a Hessian product.
    Attributes:
        x: the input that the gradients of the weights are computed from.
    """

    def __init__(
        self,
        path: str,
        rule: Rule,
        layer: Any,
        weights: Mapping[str, Tensor],
        x: Tensor,
        norms: JacobianNorms,
        *,
        curved: bool,
    ) -> None:
        self._path, self._layer, self._weights, self._norms, self._curved = path, layer, weights, norms, curved
        self._detached = {name: w.detach().requires_grad_(w.requires_grad) for name, w in weights.items()}
        self._parametrizations = _parametrizations(layer, weights)
        known = {name: StandardizedWeight.of(own) for name, own in self._parametrizations.items()}
        self._standardized = {name: weight for name, weight in known.items() if weight is not None}
        self._per_sample: dict[str, PerSampleWeight | MovedStandardizedWeight] = {}
        self._rule, self.x = rule.bilinear(layer, x) if curved else (rule, x)
        if curved and self.x.requires_grad:
            self.x = cast(Tensor, torch.ops.aten._unsafe_view(self.x, self.x.shape))  # a node for this layer only

    def forward(self, displacements: Displacements | None) -> Tensor:
        """Return the output, at each example's own parameters if these are displaced."""
        if displacements is not None:
            self._per_sample = self._per_sample_weights(displacements)
            moved = displacements.of(self._weights)
            moved |= {name: weight.displacement() for name, weight in self._per_sample.items()}
            if moved:
                return self._rule.moved(self._layer, self._detached, moved, self.x)
        return self._rule.forward(self._layer, self._detached, self.x)

    def factors(self, grad: Tensor, terms: HvpTerms | None = None) -> dict[Tensor, Factor]:
        """Return the factors of the trained parameters, also of those from which a weight is computed.

        Args:
            grad: gradient at the output.
            terms: the other terms of a Hessian product, if one is computed.
        """
        x, found = self.x.detach(), dict[Tensor, Factor]()
        for name, weight in self._weights.items():
            if weight.requires_grad:
                add_to(found, self._of_weight(name, weight, x, grad, terms))
        return found

    def delta(self, displacements: Displacements) -> Tensor | None:
        """Return the change of the output when each example's parameters move, to first order; None if none moves."""
        found = displacements.of(self._weights)
        for name, own in self._standardized.items():
            if own_displacements := displacements.of(own.own):
                if not own.knows(own_displacements):  # the layer has more calls than for earlier examples
                    raise CallSequenceChangedError(self._path)
                found[name] = own.tangent(own_displacements)
        return self._rule.delta(self._layer, found, self.x) if found else None

    def _of_weight(
        self, name: str, weight: Tensor, x: Tensor, grad: Tensor, terms: HvpTerms | None
    ) -> Mapping[Tensor, Factor]:
        """Return the factors of the parameters from which a weight is computed; of the weight itself if it is one."""
        factor, more = self._factor(name, x, grad), None
        if terms is not None and terms.source is not None and name == "weight":
            more = self._rule.factor(self._layer, name, self._detached, terms.source, terms.first)
        if name in self._per_sample:
            return self._per_sample[name].pull(factor)
        standardized = self._standardized.get(name)
        if standardized is not None and terms is not None:
            return standardized.curved(factor, more, terms.displacements.of(standardized.own))
        if standardized is not None and (self._curved or standardized.takes(factor)):
            return standardized.pull(factor)
        total = factor if more is None else factor + more
        if weight.grad_fn is None:
            return {weight: total}
        return _pulled(total, weight, self._norms, (self._path, name), standardized)

    def _factor(self, name: str, x: Tensor, grad: Tensor) -> Factor:
        """Return what the rule returns for a weight.

        Raises:
            UnsupportedModuleError: the rule is the user's, and it fails or returns something else than gradients of the
                weight's shape.
        """
        if is_built_in(self._rule):
            return self._rule.factor(self._layer, name, self._detached, x, grad)
        rule, shape = f"{type(self._rule).__name__}.factor for '{self._path}'", tuple(self._weights[name].shape)
        condition, remedy = f"to return the gradients of {name!r}, shape (B, *{shape})", "correct the rule"
        try:
            found = cast("object", self._rule.factor(self._layer, name, self._detached, x, grad))
        except Exception as error:
            raise refused(rule, condition, f"{type(error).__name__}: {error}".rstrip("."), remedy) from error
        if not isinstance(found, Factor):
            remedy = "return Dense, Outer or another factor of privgrad.gradient"
            raise refused(rule, "to return a Factor", type(found).__name__, remedy)
        if (found.examples, tuple(found.shape)) != (len(grad), shape):
            raise refused(rule, condition, f"shape {(found.examples, *found.shape)}", remedy)
        return found

    def _per_sample_weights(self, displacements: Displacements) -> dict[str, PerSampleWeight | MovedStandardizedWeight]:
        """Return, by name, the per-example weights that a parametrization computes from displaced parameters."""
        found: dict[str, PerSampleWeight | MovedStandardizedWeight] = {}
        for name, parametrization in self._parametrizations.items():
            moved = displacements.of({n: p for n, p in parametrization.named_parameters() if p.requires_grad})
            if moved:
                known = self._standardized[name].moved(moved) if name in self._standardized else None
                found[name] = known or PerSampleWeight(parametrization, moved, self._weights[name])
        return found


def weights_of(path: str, module: nn.Module, rule: Rule) -> dict[str, Tensor]:
    """Return the weights that a layer's rule knows, by name; a parametrization may compute one.

    `capture` calls it.

    Raises:
        UnitRefusedError: a parametrization has hooks on gradients, or operations on memory.
    """
    with Additive(path) if parametrize.is_parametrized(module) else nullcontext():
        read = {name: cast("Tensor | None", getattr(module, name, None)) for name in rule.parameters}
    return {name: weight for name, weight in read.items() if weight is not None}


def _parametrizations(layer: Any, weights: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """Return the layer's parametrizations that compute one of these weights, by the name of the weight."""
    if not (isinstance(layer, nn.Module) and parametrize.is_parametrized(layer)):
        return {}
    return {name: own for name, own in cast(nn.ModuleDict, layer.parametrizations).items() if name in weights}


def _pulled(
    factor: Factor, weight: Tensor, norms: JacobianNorms, key: tuple[str, str], known: StandardizedWeight | None
) -> dict[Tensor, Factor]:
    """Return the factors of the parameters from which a weight is computed, given the factor of the weight."""
    leaves = {id(source): source for source in sources([weight])}.values()
    apart = not is_additive(weight) or any(x.itemsize < 4 or x._backward_hooks for x in (weight, *leaves))

    def jacobian_of(leaf: Tensor) -> Jacobian:
        place = (*key, id(leaf))
        rows = partial(norms.rows, place) if known is None else known.rows_of
        return Jacobian(weight, leaf, partial(norms.of, place), None if apart else rows)

    sums = SharedSums(factor)
    return {leaf: Pulled(factor, jacobian_of(leaf), apart=apart, sums=sums) for leaf in leaves}
