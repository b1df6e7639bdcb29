"""Faults of clipping, of per-example gradients and of what the model is checked for."""

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from test_rare_values import away_from_a_class
from test_rounding import in_fours
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import privgrad as pg
from mutants.mutant import Mutant, Patch, everywhere, plant_sum
from privgrad import private_gradient, rng
from privgrad import rng as global_streams
from privgrad.checks import model_and_loss as checks
from privgrad.checks import randomness, variables
from privgrad.checks import randomness as shared
from privgrad.clip import clipping, groups
from privgrad.engine import capture, factored, layouts, passes
from privgrad.engine import self_check as audit
from privgrad.engine import shared_values as function_calls
from privgrad.engine import units as layer_call
from privgrad.engine import units as vmapped_unit
from privgrad.engine.factored import Factored
from privgrad.engine.factors import embedding as tables
from privgrad.engine.factors import outer
from privgrad.engine.factors import parametrized as jacobian
from privgrad.engine.factors import weight_standardization as standardization
from privgrad.engine.factors.embedding import Rows
from privgrad.engine.factors.outer import Outer
from privgrad.engine.layers import embedding as embedding_rules
from privgrad.gradient import factor as factors
from privgrad.gradient import functional as batching
from privgrad.gradient import functional as module_state
from privgrad.gradient import novelty, probes, secret_draws
from privgrad.gradient import novelty as check_schedule
from privgrad.gradient import reference as vmap
from privgrad.gradient.factor import Dense, SideBySide
from privgrad.gradient.reference import Vmap
from privgrad.types import ClippedSum, count_examples, map_examples, part_of


def passes_by_the_drawn_size(patch: Patch) -> None:
    """The usual size is that of the batch, so one example can split a pass in two."""
    real = Factored.microbatch_size

    def planted(self: Factored, examples: Any, usual_size: int) -> int:
        del usual_size
        return real(self, examples, count_examples(examples))

    patch.setattr(Factored, "microbatch_size", planted)


def sizes_by_the_last_pass(patch: Patch) -> None:
    """Each audit measures the floats per value again."""
    real = Factored._audit

    def planted(self: Factored, examples: Any) -> None:
        real(self, examples)
        values = sum(leaf[0].numel() for leaf in tree_leaves(examples))
        self._density = self._passes.floats / values

    patch.setattr(Factored, "_audit", planted)


def measured_after_passes(patch: Patch) -> None:
    """Each pass counts as a step."""
    real = jacobian.JacobianNorms.of

    def planted(self: jacobian.JacobianNorms, key: object, found: jacobian.Jacobian) -> float:
        self.begin_step()
        return real(self, key, found)

    patch.setattr(jacobian.JacobianNorms, "of", planted)


def another_sum(planted: Callable[..., tuple[ClippedSum, Any]]) -> Callable[[Patch], None]:
    """Plants another clipped sum: (the real one, chunks, its options) -> what it returns."""
    return lambda patch: plant_sum(patch, planted)


def clipped_as_a_whole(real: Any, chunks: Any, *, max_grad_norm: float, **options: Any) -> tuple[ClippedSum, Any]:
    """The sum of the batch is clipped, not each example."""
    total, raw = real(chunks, max_grad_norm=1e30, **options)
    norm = float(torch.stack([value.norm() for value in total.values.values()]).norm())
    factor = min(1.0, max_grad_norm / max(norm, 1e-30))
    return ClippedSum({name: value * factor for name, value in total.values.items()}, max_grad_norm), raw


def scaled_once_clipped(real: Any, chunks: Any, **options: Any) -> tuple[ClippedSum, Any]:
    """Divided by the scales after the clipping: the bound holds in a space that nothing is released in."""
    inverse_scales = options.pop("inverse_scales", None) or {}
    total, raw = real(chunks, **options)
    values = {name: value * inverse_scales.get(name, 1.0) for name, value in total.values.items()}
    return replace(total, values=values), raw


def multiplied_back(real: Any, chunks: Any, **options: Any) -> tuple[ClippedSum, Any]:
    total, raw = real(chunks, **options)
    inverse_scales = options.get("inverse_scales") or {}
    return replace(total, values={n: v / inverse_scales.get(n, 1.0) for n, v in total.values.items()}), raw


def projected_twice(patch: Patch) -> None:
    """Norms that are too small: what weight standardization takes from a gradient is taken from its square twice."""
    real = jacobian.Projected.__init__

    def wrong(self: Any, grads: Any, rows: Any, sums: Any) -> None:
        fan_in = rows.rows_OF.shape[1]
        taken = sums.mean.square() * fan_in + sums.along.square() / fan_in
        real(self, grads, rows, sums._replace(square=(sums.square - taken).clamp(min=0)))

    patch.setattr(jacobian.Projected, "__init__", wrong)


def removed_by_the_jacobian_unseen(patch: Patch) -> None:
    """Norms from sums over rows, also where rounding hides what a Jacobian leaves of a gradient."""
    patch.setattr(outer, "canceled", lambda square, _: torch.zeros_like(square, dtype=torch.bool))


def any_closed_form(patch: Patch) -> None:
    """Every Jacobian is taken for one with three numbers per row."""
    patch.setattr(jacobian, "_beyond_rounding", lambda rest, *_: torch.zeros(len(rest), dtype=torch.bool))


def one_variance_for_all(patch: Patch) -> None:
    """Moved weights are divided by the batch's mean deviation, not by each example's own."""
    real = standardization.MovedStandardizedWeight.displacement

    def wrong(self: Any) -> Any:
        self._k_BO = self._k_BO * self._inverse_BO.mean(0) / self._inverse_BO
        return real(self)

    patch.setattr(standardization.MovedStandardizedWeight, "displacement", wrong)


def sensitivity_of_one_layer(real: Any, chunks: Any, *, clip: Any, **options: Any) -> tuple[ClippedSum, Any]:
    total, raw = real(chunks, clip=clip, **options)
    if isinstance(clip, pg.clip.PerLayer):
        whole = sum(share**2 for share in clip.shares.values()) ** 0.5
        total = replace(total, sensitivity=total.sensitivity * max(clip.shares.values()) / whole)
    return total, raw


def sensitivity_c_for_groups(real: Any, chunks: Any, *, max_grad_norm: float, **options: Any) -> tuple[ClippedSum, Any]:
    total, raw = real(chunks, max_grad_norm=max_grad_norm, **options)
    return replace(total, sensitivity=max_grad_norm), raw


def without_the_last_part(real: Any, chunks: Any, **options: Any) -> tuple[ClippedSum, Any]:
    """Whole microbatches only, as a loader with drop_last has them."""
    parts = list(chunks)
    sizes = [next(iter(part.values())).examples for part in parts]
    return real([part for part, size in zip(parts, sizes, strict=True) if size == sizes[0]], **options)


def left_on_the_parameters(real: Any, chunks: Any, *, like: Mapping[str, Tensor], **options: Any) -> Any:
    total, raw = real(chunks, like=like, **options)
    for name, parameter in like.items():
        if isinstance(parameter, nn.Parameter):
            parameter.grad = total.values[name].to(parameter.dtype)
    return total, raw


def each_parameter_to_c(patch: Patch) -> None:
    def wrong(self: Any, norms: Mapping[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
        return {name: (max_grad_norm / norm_B).clamp(max=1.0) for name, norm_B in norms.items()}

    patch.setattr(clipping, "_SMALL", 0)  # no two parameters side by side
    patch.setattr(pg.clip.Flat, "factors", wrong)


def without_the_biases(patch: Patch) -> None:
    real = pg.clip.Flat.factors

    def wrong(self: Any, norms: Mapping[str, Tensor], max_grad_norm: float) -> dict[str, Tensor]:
        weights = {name: norm_B for name, norm_B in norms.items() if "bias" not in name}
        return dict.fromkeys(norms, next(iter(real(self, weights, max_grad_norm).values())))

    patch.setattr(clipping, "_SMALL", 0)
    patch.setattr(pg.clip.Flat, "factors", wrong)


def rules_believed(patch: Patch) -> None:
    real = clipping._joint_norm

    def wrong(factors: Mapping[str, Tensor], norms: Mapping[str, Tensor], *_: Any) -> Tensor:
        return real(factors[name] * norm_B for name, norm_B in norms.items())

    everywhere(patch, clipping._require_bound, wrong)


def kept_as_they_are(patch: Patch) -> None:
    """An example that is not finite gets the factor 0, and 0 times NaN is NaN."""
    for kind in (Dense, SideBySide, Outer, Rows):
        patch.setattr(kind, "mask", lambda self, _: self)


def canceling_believed(patch: Patch) -> None:
    real = clipping._terms

    def wrong(chunk: Any, norms: Any, *_: Any) -> tuple[Mapping[str, Tensor], Tensor]:
        return norms, torch.zeros(len(next(iter(norms.values()))), dtype=torch.bool)

    everywhere(patch, real, wrong)


def flags_believed_clear(patch: Patch) -> None:
    patch.setattr(clipping._Unread, "flags", lambda _: (False, False))


def spoiled_norms_believed(patch: Patch) -> None:
    """What `unread` keeps is never read."""
    real = clipping.unread

    @contextmanager
    def wrong() -> Generator[list[Tensor]]:
        with real():
            yield []

    patch.setattr(clipping, "unread", wrong)


def examples_bounded_and_not_the_batch(patch: Patch) -> None:
    """Each example's terms may come to 1e5 C, in whatever number of examples; sums are float32."""

    def wrong(self: Any, chunk: Any, factors: Mapping[str, Tensor], terms: Any) -> None:
        for name, factor_B in factors.items():
            added = chunk[name].weighted_sum(factor_B)
            self.values[name] = self.values[name] + added if name in self.values else added

    patch.setattr(clipping, "_TERMS", 1e5)
    patch.setattr(clipping, "_SMALL", 0)
    patch.setattr(clipping._Sums, "add", wrong)


def precision_by_the_batch(patch: Patch) -> None:
    """The batch's terms decide between float32 and float64, so one example decides it for all others."""

    def wrong(self: Any, chunk: Any, factors: Mapping[str, Tensor], terms: Mapping[str, Tensor] | None) -> None:
        for name, factor_B in factors.items():
            within = terms is None or float((factor_B * terms[name]).sum()) <= 1e4 * self.bound
            self.values[name] = (chunk[name].weighted_sum if within else chunk[name].exact_sum)(factor_B)

    patch.setattr(clipping, "_SMALL", 0)
    patch.setattr(clipping._Sums, "add", wrong)


def all_places_in_one_sum(patch: Patch) -> None:
    patch.setattr(Rows, "sum_in_parts", Rows.weighted_sum)


def all_rows_in_one_part(patch: Patch) -> None:
    patch.setattr(factors.Factor, "_terms", 10**9)


def narrow_products_in_one_part(patch: Patch) -> None:
    """A vector product of the whole batch, by a kernel that adds four rows at a time."""
    patch.setattr(factors, "sum_of_rows", in_fours)


def chunks_added_in_float32(patch: Patch) -> None:
    real = clipping._Sums.add

    def wrong(self: Any, *given: Any) -> None:
        real(self, *given)
        self.values = {name: value.float() for name, value in self.values.items()}

    patch.setattr(clipping._Sums, "add", wrong)


def positions_in_the_order_of_memory(patch: Patch) -> None:
    everywhere(patch, outer.sum_over, lambda x, dim: x.sum(dim))


def checked_at_powers_of_two_only(patch: Patch) -> None:
    everywhere(patch, checks.configuration, lambda model: 0)


def a_norm_that_is_kept(patch: Patch) -> None:
    patch.setattr(jacobian.Jacobian, "stretch", lambda *_: 0.0)
    patch.setattr(jacobian.Pulled, "_outgrows", lambda *_: torch.tensor(False))


def without_the_jacobian(patch: Patch) -> None:
    patch.setattr(jacobian.Jacobian, "norm", 1.0)
    patch.setattr(jacobian.Pulled, "_outgrows", lambda *_: torch.tensor(False))


def pulled_back_unseen(patch: Patch) -> None:
    real = jacobian.Pulled.sum_and_rounding
    patch.setattr(jacobian.Pulled, "sum_and_rounding", lambda *given: (real(*given)[0], 0.0))


def factors_that_float32_does_not_hold(patch: Patch) -> None:
    patch.setattr(clipping, "_LOST", 0.0)


def factors_checked_as_they_are_not_used(patch: Patch) -> None:
    def wrong(factors: Mapping[str, Tensor], norms: Mapping[str, Tensor], *_: Any) -> Tensor:
        return clipping._joint_norm(factors[name] * norm_B for name, norm_B in norms.items())

    patch.setattr(clipping, "_LOST", 0.0)
    everywhere(patch, clipping._require_bound, wrong)


def climbs_within_a_step(patch: Patch) -> None:
    patch.setattr(factored.Fallback, "begin_step", lambda self: None)


def the_head_of_the_batch(patch: Patch) -> None:
    everywhere(patch, audit.rows_to_check, lambda found, examples, *_: list(range(min(count_examples(examples), 3))))


def not_finite_believed(patch: Patch) -> None:
    blind: dict[str, Any] = {"isfinite": lambda _: True, "isnan": lambda _: False}
    patch.setattr(audit, "math", SimpleNamespace(**vars(math) | blind))


def checked_in_evaluation_mode(patch: Patch) -> None:
    @contextmanager
    def wrong(model: nn.Module, *_: Any) -> Generator[None]:
        with module_state.evaluating(model):
            yield

    everywhere(patch, randomness.without_randomness, wrong)


def left_as_written(patch: Patch) -> None:
    @contextmanager
    def wrong(model: nn.Module) -> Generator[None]:
        yield

    everywhere(patch, audit.restored, wrong)


def squares_in_float32(patch: Patch) -> None:
    """Of one place: |g|^2 = b^2 . W a^2 as it stands."""
    real = Outer.norms

    def wrong(self: Outer, inverse_scales: Tensor | None = None) -> Tensor:
        if inverse_scales is None:
            return real(self)
        a_BI, b_BO = self.a_BTI[:, 0], self.b_BTO[:, 0]
        return ((b_BO.square() @ inverse_scales.square()) * a_BI.square()).sum(1).sqrt().double()

    patch.setattr(Outer, "norms", wrong)


def autocast_left_on(patch: Patch) -> None:
    patch.setattr(clipping, "without_autocast", lambda _: nullcontext())


def sums_in_bfloat16(patch: Patch) -> None:
    def wrong(self: Dense, weights: Tensor) -> Tensor:
        return (weights.bfloat16() @ self.grads_BP.flatten(1).bfloat16()).view(self.shape).to(self.grads_BP.dtype)

    patch.setattr(Dense, "weighted_sum", wrong)


def without_cross_terms(patch: Patch) -> None:
    def wrong(self: Outer) -> Tensor:
        square_BT = self.a_BTI.square().sum(2) * self.b_BTO.square().sum(2)
        return square_BT.double().sum(1).sqrt()

    patch.setattr(Outer, "norms_by_inner_products", wrong)


def repeated_ids_apart(patch: Patch) -> None:
    def wrong(self: Rows, inverse_scales: Tensor | None = None) -> Tensor:
        r_BTD = self.r_BTD if inverse_scales is None else self.r_BTD * inverse_scales[self.ids_BT]
        return r_BTD.flatten(1).double().norm(dim=1)

    patch.setattr(Rows, "norms", wrong)


def padding_counted(patch: Patch) -> None:
    def wrong(self: Any, layer: Any, name: str, parameters: Any, x: Tensor, grad: Tensor) -> Rows:
        return Rows(x.reshape(len(x), -1), grad.reshape(len(grad), -1, layer.embedding_dim), layer.num_embeddings)

    patch.setattr(embedding_rules.Embedding, "factor", wrong)


def second_use_forgotten(patch: Patch) -> None:
    patch.setattr(Outer, "joined", staticmethod(lambda parts: parts[0]))  # pyright: ignore


def tied_cross_term_forgotten(patch: Patch) -> None:
    def wrong(self: Any, inverse_scales: Tensor | None) -> Tensor:
        return torch.zeros(self.examples, dtype=torch.float64)

    patch.setattr(tables.TiedTable, "_inner_products", wrong)


def stale_squares(patch: Patch) -> None:
    real, known = outer._unit_squares, dict[int, Any]()

    def wrong(scales: Tensor) -> tuple[float, Tensor]:
        if id(scales) not in known:
            largest, square = real(scales)
            known[id(scales)] = largest, square.clone()
        return known[id(scales)]

    everywhere(patch, real, wrong)


def by_rules_of_torch(*operations: Any) -> Callable[[Patch], None]:
    """Under vmap, operations by batching rules of torch's that are wrong."""

    def plant(patch: Patch) -> None:
        kept = {func: mended for func, mended in batching.MENDED.items() if func not in operations}
        patch.setattr(batching, "MENDED", kept)

    return plant


def states_kept(patch: Patch) -> None:
    patch.setattr(vmapped_unit, "preserved", lambda *_, **__: nullcontext())


def averaged_copies(patch: Patch) -> None:
    real = capture.Capture._tap

    def wrong(self: Any, path: str, tensor: Tensor, factors: Any, **options: Any) -> Tensor:
        def averaged(grads: Tensor) -> Any:
            return factors(grads.mean(0, keepdim=True).expand_as(grads))

        return real(self, path, tensor, averaged if "copied" in options else factors, **options)

    patch.setattr(capture.Capture, "_tap", wrong)


def shared_draws(patch: Patch) -> None:
    real: Any = batching.vmap
    patch.setattr(batching, "vmap", lambda of_one, **options: real(of_one, **(options | {"randomness": "same"})))


WRITE_ONLY = property(lambda _: list[int](), lambda *_: None)


def two_draws(patch: Patch) -> None:
    @contextmanager
    def nothing(*_: Any) -> Generator[None]:
        yield

    patch.setattr(passes, "streams_kept", nothing)


def neighbors_grouped(patch: Patch) -> None:
    def wrong(words: Any, groups: int) -> Tensor:
        return torch.arange(len(words)) * groups // max(len(words), 1)

    everywhere(patch, groups.group_of, wrong)


def short_state(key: bytes) -> Tensor:
    """A state from a seed, of which torch's generator keeps 32 bits."""
    return torch.Generator().manual_seed(int.from_bytes(key[:8])).get_state()


def only_torchs_state(key: bytes) -> None:
    torch.default_generator.set_state(rng.torch_state(key))


def unchecked(*functions: Any) -> Callable[[Patch], None]:
    """Without some checks."""

    def plant(patch: Patch) -> None:
        for function in functions:
            everywhere(patch, function, lambda *_, **__: None)

    return plant


def mixing_modules_let_through(patch: Patch) -> None:
    everywhere(patch, checks.find_problems, lambda model: [])


def mean_losses_let_through(patch: Patch) -> None:
    def wrong(losses: Any, size: int) -> Tensor:
        return losses.expand(size) if isinstance(losses, Tensor) and losses.dim() == 0 else losses

    everywhere(patch, module_state.require_losses, wrong)
    everywhere(patch, checks.require_apart, lambda *_, **__: None)


def not_advanced(patch: Patch) -> None:
    patch.setattr(private_gradient, "advanced", lambda *_, **__: nullcontext())


def vectors_that_follow_the_batch(patch: Patch) -> None:
    real = pg.PrivateGradient.__call__

    def planted(self: pg.PrivateGradient, batch: pg.Batch) -> pg.NoisyGradient:
        with Patch.context() as inner:
            if batch.size == 0:
                not_advanced(inner)
            return real(self, batch)

    patch.setattr(pg.PrivateGradient, "__call__", planted)


def nothing_undone(patch: Patch) -> None:
    @contextmanager
    def wrong(model: nn.Module) -> Generator[None]:
        yield

    everywhere(patch, module_state.preserved, wrong)


def contents_left(patch: Patch) -> None:
    patch.setattr(module_state, "restore", lambda *_: False)


def copies_gone_before_the_backward_pass(patch: Patch) -> None:
    real = module_state.losses_on_copies

    def wrong(
        model: nn.Module, loss_fn: Any, examples: Any, result: Any = Tensor.detach, *given: Any, **options: Any
    ) -> Any:
        return result(real(model, loss_fn, examples, lambda losses: losses, *given, **options))

    everywhere(patch, real, wrong)


def losses_as_they_are(patch: Patch) -> None:
    for compare in (checks.require_apart, checks.require_same_losses_in_half):
        everywhere(patch, compare, compare.__wrapped__)  # pyright: ignore[reportFunctionMemberAccess]


def without_the_rest_alone(real: Any) -> Any:
    """A comparison of losses that never leaves out the first examples."""
    return lambda model, loss_fn, examples, own, losses: not own.start and real(model, loss_fn, examples, own, losses)


NOT_ALONE = "to match the gradients of single examples, got a difference"
CLIPPING = [
    Mutant(
        "the sum clipped, not each example",
        another_sum(clipped_as_a_whole),
        "test_private_gradient.test_divides_by_the_public_batch_size_whatever_was_drawn",
    ),
    Mutant(
        "each parameter clipped to C",
        each_parameter_to_c,
        "test_clipping.test_neighboring_data_sets_stay_within_the_sensitivity_through_the_oracle",
        {"clip": pg.clip.Flat()},
        guard="factors to bound contributions by",
    ),
    Mutant(
        "biases left out of the norm",
        without_the_biases,
        "test_clipping.test_neighboring_data_sets_stay_within_the_sensitivity_through_the_oracle",
        {"clip": pg.clip.Flat()},
        guard="factors to bound contributions by",
    ),
    Mutant(
        "a clipping rule that is believed",
        rules_believed,
        "test_clipping.test_a_rule_that_breaks_the_bound_is_refused_and_not_believed",
    ),
    Mutant(
        "per-layer clipping with the noise of one layer",
        another_sum(sensitivity_of_one_layer),
        "test_clipping.test_per_layer_bounds_each_group_and_reaches_the_whole",
    ),
    Mutant(
        "groups averaged before clipping at sensitivity C",
        another_sum(sensitivity_c_for_groups),
        "test_groups.test_one_example_can_move_the_sum_by_2c_and_the_noise_knows",
    ),
    Mutant(
        "groups of neighbors in the batch",
        neighbors_grouped,
        "test_groups.test_a_group_is_drawn_for_each_example_by_itself",
    ),
    Mutant(
        "the last microbatch dropped",
        another_sum(without_the_last_part),
        "test_clipping.test_microbatches_change_nothing",
        {"clip": pg.clip.Flat(), "microbatch_size": 3},
    ),
    Mutant(
        "the raw sum left in .grad",
        another_sum(left_on_the_parameters),
        "test_private_gradient.test_nothing_is_left_in_grad",
        {"engine": "factored", "perturb": None},
    ),
    Mutant(
        "an example kept that is not finite",
        kept_as_they_are,
        "test_clipping.test_a_non_finite_example_contributes_zero_and_is_counted",
        {"name": "flat", "bad": float("nan"), "chunk": 100},
    ),
    Mutant(
        "terms that cancel within an example",
        canceling_believed,
        "test_attacks.test_terms_that_cancel_within_an_example_do_not_pass_the_bound",
        {"kind": "linear", "big": 1e8, "clip": pg.clip.Flat()},
    ),
    Mutant(
        "the flags of a chunk unread",
        flags_believed_clear,
        "test_one_look.test_an_example_that_is_spoiled_or_heavy_is_treated_as_by_the_checked_way",
        {"rule": "flat", "kind": "canceling"},
    ),
    Mutant(
        "norms that rounding spoiled taken for right",
        spoiled_norms_believed,
        "test_one_look.test_norms_are_computed_again_where_squares_are_lost",
    ),
    Mutant(
        "terms bounded for each example, not for the batch",
        examples_bounded_and_not_the_batch,
        "test_sensitivity.test_terms_of_a_batch_that_round_together_stay_within_the_bound",
        {"kind": "rnn", "count": 4096},
    ),
    Mutant(
        "a batch's terms decide its precision",
        precision_by_the_batch,
        "test_sensitivity.test_one_example_does_not_decide_the_precision_of_the_others",
    ),
    Mutant(
        "places of an example that are rounded alike, all in one sum",
        all_places_in_one_sum,
        "test_rounding.test_places_that_are_all_rounded_the_same_way_keep_the_bound",
        {"name": "Embedding"},
    ),
    Mutant(
        "all examples of a batch in one float32 sum",
        all_rows_in_one_part,
        "test_rounding.test_rows_that_round_to_a_tie_move_the_sum_by_c_whatever_the_kernel",
        lambda module: {"kind": module.InFours, "place": 0},
    ),
    Mutant(
        "all rows of a narrow product in one float32 sum",
        narrow_products_in_one_part,
        "test_rounding.test_rows_that_round_to_a_tie_move_the_sum_by_c_whatever_the_kernel",
        {"kind": Dense, "place": 0},
    ),
    Mutant(
        "positions of an example added up in the order in which the batch lies in memory",
        positions_in_the_order_of_memory,
        "test_rounding.test_positions_are_added_up_in_an_order_that_no_other_example_decides",
        {"name": "RNN"},
    ),
    Mutant(
        "a total over many chunks in float32",
        chunks_added_in_float32,
        "test_rounding.test_a_change_of_one_example_is_right_however_many_chunks_a_batch_has",
    ),
    Mutant(
        "passes split by the number of examples that were drawn",
        passes_by_the_drawn_size,
        "test_pass_sizes.test_users_are_split_by_the_expected_cohort",
    ),
    Mutant(
        "pass sizes by the floats of the last pass",
        sizes_by_the_last_pass,
        "test_pass_sizes.test_a_user_of_an_earlier_step_does_not_decide_how_later_users_are_split",
    ),
    Mutant(
        "the norm of a computed weight's Jacobian measured again after a number of passes",
        measured_after_passes,
        "test_pass_sizes.test_the_number_of_passes_does_not_decide_when_the_norm_of_a_jacobian_is_measured",
    ),
    Mutant(
        "the norm of a Jacobian kept while the weight's computation changes",
        a_norm_that_is_kept,
        "test_rounding.test_a_gate_that_opens_after_the_first_step_lets_no_example_add_more_than_c",
    ),
    Mutant(
        "what a Jacobian in closed form removes hidden by rounding",
        removed_by_the_jacobian_unseen,
        "test_row_map.test_norms_of_gradients_that_the_jacobian_nearly_removes_are_computed_from_themselves",
        {"size": 2},
    ),
    Mutant(
        "a closed form for every Jacobian",
        any_closed_form,
        "test_row_map.test_no_closed_form_is_found_for_another_jacobian",
        {"name": "a mask"},
    ),
    Mutant(
        "the Jacobian of a computed weight left out of the bound",
        without_the_jacobian,
        "test_sensitivity.test_terms_that_round_together_before_a_weight_is_pulled_back_keep_the_bound",
    ),
    Mutant(
        "what a Jacobian rounds on its way left out of the bound",
        pulled_back_unseen,
        "test_sensitivity.test_a_weight_that_is_a_difference_of_large_terms_keeps_the_bound",
    ),
    Mutant(
        "clip factors that underflow in float32",
        factors_checked_as_they_are_not_used,
        "test_sensitivity.test_clip_factors_that_float32_does_not_hold_keep_the_bound",
        {"size": 3.74e16, "bound": 1.0, "scale": 1e-12},
    ),
    Mutant(
        "clip factors that underflow in float32, checked as they are used",
        factors_that_float32_does_not_hold,
        "test_sensitivity.test_clip_factors_that_float32_does_not_hold_keep_the_bound",
        {"size": 3.74e16, "bound": 1.0, "scale": 1e-12},
        guard="factors to bound contributions by",
    ),
    Mutant(
        "squares that underflow in float32",
        squares_in_float32,
        "test_attacks.test_squares_that_underflow_do_not_hide_a_gradient",
        {"scale": 1e-12, "a": 1e8, "b": 1e-23, "clip": pg.clip.Flat()},
    ),
    Mutant("sums under an ambient autocast", autocast_left_on, "test_clipping.test_autocast_does_not_reach_the_sum"),
    Mutant(
        "sums in bfloat16",
        sums_in_bfloat16,
        "test_rules.test_rule_equals_a_loop_over_single_examples",
        {"name": "LayerNorm", "dtype": torch.float32, "tolerance": 1e-5, "size": 7},
    ),
    Mutant(
        "scales of AdaDPS after the clipping",
        another_sum(scaled_once_clipped),
        "test_precondition.test_agrees_with_a_loop_over_examples",
        {"rule": "rmsprop", "schedule": "step", "every": 1, "unit": "eps"},
    ),
    Mutant(
        "multiplied back by the scales, the noise's size unchanged",
        another_sum(multiplied_back),
        "test_precondition.test_agrees_with_a_loop_over_examples",
        {"rule": "rmsprop", "schedule": "step", "every": 1, "unit": "eps"},
    ),
]


def by_rule(fault: str, plant: Callable[[Patch], None], name: str, guard: str | None = None) -> Mutant:
    given = {"name": name, "dtype": torch.float64, "tolerance": 1e-10, "size": 7}
    return Mutant(fault, plant, "test_rules.test_rule_equals_a_loop_over_single_examples", given, guard)


GRADIENTS = [
    by_rule(
        "norms of a Linear on sequences without cross terms", without_cross_terms, "Linear, sequence, inner products"
    ),
    by_rule("an embedding's repeated ids counted apart", repeated_ids_apart, "Embedding"),
    by_rule("gradients of padding", padding_counted, "Embedding, padding", NOT_ALONE),
    by_rule("the second use of a module forgotten", second_use_forgotten, "Linear, twice", NOT_ALONE),
    Mutant(
        "a tied table's cross term forgotten",
        tied_cross_term_forgotten,
        "test_factored.test_engines_agree_on_whole_models",
        {"name": "tied"},
    ),
    Mutant(
        "squares kept of scales that were written over",
        stale_squares,
        "test_precondition.test_norms_follow_scales_that_are_written_over",
    ),
    Mutant(
        "norms of standardized weights' gradients too small",
        projected_twice,
        "test_rules.test_rule_equals_a_loop_over_single_examples",
        {"name": "Conv2d, few places, standardized, gain", "dtype": torch.float64, "tolerance": 1e-10, "size": 7},
    ),
    Mutant(
        "one variance of moved weights for all examples",
        one_variance_for_all,
        "test_perturb.test_rule_equals_a_loop_over_single_examples",
        {"name": "Conv2d, few places, standardized", "dtype": torch.float64, "tolerance": 1e-8, "exact": False},
        guard="to match the gradients of single examples",
    ),
    Mutant(
        "padding rows of a table by vmap",
        by_rules_of_torch(F.embedding),
        "test_batching.test_an_operation_under_vmap_is_that_of_each_example",
        {"name": "embedding {'padding_idx': 0}"},
    ),
    Mutant(
        "one example's value filled in for all by vmap",
        by_rules_of_torch(Tensor.index_fill),
        "test_batching.test_an_operation_under_vmap_is_that_of_each_example",
        {"name": "index_fill"},
    ),
    Mutant(
        "a backward pass that is not additive, given the sum of all gradients",
        lambda patch: patch.setattr(layer_call, "is_additive", lambda _: True),
        "test_parametrized.test_each_example_has_its_own_backward_pass_where_a_sum_of_gradients_has_another",
        {"how": "function", "by_hand": False},
    ),
    Mutant(
        "a hook on the sum of all gradients of a weight",
        lambda patch: patch.setattr(function_calls, "OF_ALL", frozenset()),
        "test_parametrized.test_each_example_has_its_own_backward_pass_where_a_sum_of_gradients_has_another",
        {"how": "hook", "by_hand": True},
    ),
    Mutant(
        "operations on the memory of several examples by vmap",
        lambda patch: patch.setattr(batching, "OF_ALL", frozenset()),
        "test_batching.test_an_operation_under_vmap_is_that_of_each_example",
        {"name": "as_strided of a product"},
    ),
    Mutant(
        "parts of a batch in the memory of the batch",
        lambda patch: everywhere(patch, part_of, lambda batch, rows: map_examples(lambda leaf: leaf[rows], batch)),
        "test_one_by_one.test_examples_do_not_meet_in_memory",
        {"engine": Vmap, "how": "input"},
    ),
    Mutant(
        "a half filled cache in the loop that follows vmap",
        unchecked(vmapped_unit.require_unchanged),
        "test_state.test_a_layer_that_fills_an_argument_is_taken_with_the_module_that_makes_it",
        {"looped": True},
    ),
    Mutant(
        "a layer's state passed from example to example",
        states_kept,
        "test_state.test_a_state_in_an_attribute_passes_between_no_examples",
        {"looped": True, "listed": True},
        guard=NOT_ALONE,
    ),
    Mutant(
        "dropout from a seed of 32 bits",
        lambda patch: patch.setattr(global_streams, "torch_state", short_state),
        "test_secret_draws.test_the_forward_pass_of_a_step_has_the_state_of_its_key",
    ),
    Mutant(
        "draws of numpy and Python from the program's own states",
        lambda patch: patch.setattr(secret_draws, "set_states", only_torchs_state),
        "test_secret_draws.test_a_step_neither_follows_nor_changes_the_random_numbers_of_numpy_and_python",
        {"normals": 0, "engine": "factored"},
    ),
    Mutant(
        "draws from a generator with a fixed seed",
        lambda patch: everywhere(patch, batching.refuse_own_generators, lambda *_: None),
        "test_secret_draws.test_numbers_that_anyone_can_compute_are_refused_for_each_row",
        {"name": "a new generator", "engine": "vmap"},
    ),
    Mutant(
        "masks of dropout from 31 bits",
        lambda patch: patch.setattr(secret_draws, "_WIDE", dict[Any, Any]()),
        "test_secret_draws.test_no_draw_of_a_released_gradient_comes_from_a_short_seed",
        {"name": "a function", "engine": "vmap"},
    ),
    Mutant(
        "numbers that all examples of a microbatch share",
        lambda patch: everywhere(patch, shared.share_draws, lambda *_: False),
        "test_shared_draws.test_shared_draws_are_refused_in_several_microbatches",
        {"kind": "a flip"},
    ),
    Mutant(
        "dropout under a seed of the forward pass",
        lambda patch: everywhere(patch, randomness.require_unseeded, lambda *_: None),
        "test_secret_draws.test_a_forward_pass_that_seeds_its_dropout_is_refused",
        lambda module: {"function": module._seeds, "engine": "factored"},
    ),
    Mutant(
        "numbers of a fixed seed drawn for each row",
        lambda patch: everywhere(patch, randomness.require_equal_alone, lambda *_: None),
        "test_secret_draws.test_vmap_refuses_numbers_from_a_fixed_seed_which_it_would_draw_for_each_row",
    ),
    Mutant(
        "raw gradients left on the parameters",
        lambda patch: everywhere(patch, module_state.parameters_kept, lambda _: nullcontext()),
        "test_secret_draws.test_gradients_that_a_loss_leaves_are_undone",
    ),
    Mutant(
        "a frozen parameter written to unnoticed",
        lambda patch: everywhere(patch, module_state.parameters_kept, lambda _: nullcontext()),
        "test_secret_draws.test_a_write_to_a_frozen_parameter_stays_at_no_step",
        {"way": "data", "engine": "factored"},
    ),
    Mutant("one dropout mask for all examples", shared_draws, "test_engines.test_dropout_draws_one_mask_per_example"),
    Mutant(
        "other masks in BAM's second pass",
        two_draws,
        "test_perturb.test_both_passes_draw_the_same_dropout",
        guard="the random draws before",
    ),
    Mutant(
        "BatchNorm in training mode",
        mixing_modules_let_through,
        "test_engines.test_modules_that_mix_are_refused_by_path",
        {"name": "batch norm"},
    ),
    Mutant(
        "a loss averaged over the batch",
        mean_losses_let_through,
        "test_engines.test_bad_losses_are_refused_before_anything_is_charged",
        {"name": "a scalar"},
    ),
    Mutant(
        "a loss that looks at other examples",
        unchecked(checks.require_apart, audit.require_single),
        "test_engines.test_bad_losses_are_refused_before_anything_is_charged",
        {"name": "divided by the batch size"},
    ),
    Mutant(
        "a parameter without gradient dropped",
        lambda patch: everywhere(patch, checks.check_loss, lambda *_: randomness.Randomness()),
        "test_engines.test_a_parameter_without_gradient_is_refused_by_name",
    ),
    Mutant(
        "a parameter's use in a hidden function dropped",
        unchecked(passes._require_seen, audit.require_single),
        "test_shared_values.test_a_use_that_torch_does_not_show_is_taken_whole",
    ),
    Mutant(
        "one gradient of a shared value for all examples",
        averaged_copies,
        "test_shared_values.test_all_kinds_of_points_equal_single_examples",
        {"name": "gated"},
        guard=NOT_ALONE,
    ),
    Mutant(
        "a statistic of the batch taken for a shared value",
        unchecked(audit.require_single, checks.require_apart, checks.require_same_losses_in_half),
        "test_shared_values.test_a_value_made_of_the_whole_batch_is_refused",
    ),
    Mutant(
        "a layer that mixes examples",
        unchecked(audit.require_single, checks.require_same_losses_in_half),
        "test_factored.test_subtracting_the_batch_mean_is_caught",
    ),
    Mutant(
        "a wrong rule", unchecked(audit.require_single), "test_factored.test_a_wrong_rule_is_caught_by_the_first_batch"
    ),
    Mutant(
        "no comparison with an example that is not finite",
        unchecked(audit.require_apart_from_infinite),
        "test_self_check.test_a_finite_row_that_depends_on_infinite_rows_is_refused",
    ),
    Mutant(
        "a batch as large as another dimension taken for any other",
        lambda patch: patch.setattr(check_schedule.CheckSchedule, "note_size", lambda *_: None),
        "test_self_check.test_a_batch_as_large_as_another_dimension_is_checked",
    ),
    Mutant(
        "mixing in training mode only",
        unchecked(audit.require_single, audit.require_apart_from_infinite),
        "test_attacks.test_what_mixes_in_training_mode_only_is_caught",
        lambda module: {"make": module.ShufflesInTraining},
    ),
    Mutant(
        "a module taken whole without a check of the losses",
        unchecked(checks.require_apart, checks.require_same_losses_in_half),
        "test_climb.test_a_dependence_inside_of_what_is_taken_whole_is_cut_and_found_by_the_check_of_the_losses",
    ),
    Mutant(
        "no comparison with single examples after a climb",
        unchecked(audit.require_single, checks.require_apart, checks.require_same_losses_in_half),
        "test_climb.test_a_dependence_outside_of_what_is_taken_whole_is_refused",
    ),
    Mutant(
        "a module taken whole for some examples of a step only",
        climbs_within_a_step,
        "test_later_uses.test_all_examples_of_a_step_are_computed_in_one_way",
    ),
    Mutant(
        "the self-check at the head of the batch",
        the_head_of_the_batch,
        "test_self_check.test_the_first_and_the_last_row_are_always_audited",
    ),
    Mutant(
        "the self-check in evaluation mode",
        checked_in_evaluation_mode,
        "test_self_check.test_the_self_check_runs_in_training_mode",
        guard="each loss to depend on its own example only",
    ),
    Mutant(
        "losses of the largest of the batch",
        unchecked(checks.require_same_losses_in_half),
        "test_self_check.test_losses_of_the_largest_of_a_batch_are_refused",
    ),
    Mutant(
        "rows that lack a number taken for usual ones",
        lambda patch: everywhere(patch, probes.rare_rows, lambda _: list[int]()),
        "test_rare_values.test_missing_numbers_that_the_batch_fills_in_are_refused",
        {"kind": "median"},
    ),
    Mutant(
        "an example that is not finite alone left uncompared",
        not_finite_believed,
        "test_rare_values.test_missing_numbers_that_the_batch_fills_in_are_refused",
        {"kind": "mean"},
    ),
    Mutant(
        "a criterion that the loop makes again unseen",
        lambda patch: patch.setattr(variables, "_tensors_of", lambda _: list[torch.Tensor]()),
        "test_fitted_state.test_a_criterion_that_the_loop_makes_of_a_batch_warns_once",
        {"kind": "module", "public": False},
    ),
    Mutant(
        "rare rows in all that is compared",
        lambda patch: patch.setattr(checks, "_differ", without_the_rest_alone(checks._differ)),  # pyright: ignore
        "test_rare_values.test_what_a_rare_row_of_the_first_batch_changes_in_others_is_refused",
        {"row": 5, "size": 64, "loss": away_from_a_class},
    ),
    Mutant(
        "mixing that is switched on between two checks",
        checked_at_powers_of_two_only,
        "test_self_check.test_a_model_that_computes_in_another_way_is_checked_again_at_once",
        {"switch": "flag"},
    ),
    Mutant(
        "what mixes examples only while it drops",
        unchecked(checks.require_apart, checks.require_same_losses_in_half),
        "test_self_check.test_what_mixes_examples_only_while_it_drops_is_refused",
    ),
    Mutant(
        "a coin compared on one side only",
        lambda patch: patch.setattr(randomness, "_NUMBERS", (0.7,)),
        "test_constant_draws.test_a_coin_does_not_hide_a_mixup",
        {"coin": "numpy, rarely", "engine": "factored"},
    ),
    Mutant(
        "an empty mask taken for a comparison",
        lambda patch: everywhere(patch, randomness.find_randomness, lambda *_: randomness.Randomness(True, (0.7,))),
        "test_constant_draws.test_a_mean_over_what_is_masked_is_compared_where_something_is_masked",
        {"rate": 0.15},
    ),
    Mutant(
        "another coin where a pass is computed again",
        lambda patch: everywhere(patch, randomness.streams, lambda: lambda: None),
        "test_constant_draws.test_a_coin_for_all_examples_is_accepted_and_exact",
        lambda module: {"coin": module.imported},
    ),
    Mutant(
        "state that is fitted on private examples let through",
        unchecked(checks.require_no_memory),
        "test_fitted_state.test_fitted_state_is_refused_by_name_before_a_release",
        {"kind": "closure", "engine": "factored"},
    ),
    Mutant(
        "state that a pass left behind kept for the next one",
        lambda patch: patch.setattr(variables.State, "kept", lambda self: nullcontext()),
        "test_fitted_state.test_a_counter_that_changes_by_another_amount_is_refused_before_its_release",
    ),
    Mutant(
        "a snapshot of state taken for current after a change",
        lambda patch: patch.setattr(variables.Snapshot, "is_current", lambda self: True),
        "test_fitted_state.test_mixing_that_a_number_of_the_loop_switches_on_is_refused_at_that_step",
        {"holder": "dict"},
    ),
    Mutant(
        "a penalty on the gradient left out",
        lambda patch: patch.setattr(capture.Capture, "_backward", lambda self, run, *rest, **more: run(*rest, **more)),
        "test_second_derivatives.test_a_penalty_that_comes_late_is_noticed_at_once",
    ),
    Mutant(
        "views of an example taken for neighbors",
        lambda patch: patch.setattr(layouts, "_views", lambda *_: [1]),
        "test_views.test_views_are_exact_and_fast",
        {"name": "two views"},
        guard="to match the gradients of single examples",
    ),
    Mutant(
        "hooks on trained parameters let through",
        mixing_modules_let_through,
        "test_what_trains.test_a_hook_on_a_trained_parameter_is_refused",
        lambda module: {"put": module.hook, "engine": "factored"},
    ),
    Mutant(
        "parts outside of the model left out in silence",
        unchecked(checks._warn_of_foreign),
        "test_what_trains.test_what_trains_outside_of_the_model_is_named_once",
        {"name": "a global parameter", "engine": "factored"},
    ),
    Mutant(
        "no check of what no earlier batch held",
        lambda patch: patch.setattr(novelty.Novelty, "rows", lambda *_: []),
        "test_novelty.test_a_rare_example_that_changes_others_is_refused_when_it_comes",
        {"name": "a long text"},
    ),
    Mutant(
        "the new row left out of the comparison",
        lambda patch: patch.setattr(check_schedule.CheckSchedule, "novel", WRITE_ONLY, raising=False),
        "test_novelty.test_the_checks_compare_the_new_row",
        {"name": "a long text"},
    ),
    Mutant(
        "losses that depend on earlier rows",
        unchecked(checks.require_apart),
        "test_self_check.test_losses_that_depend_on_earlier_rows_are_refused",
        {"share": 1e-3},
    ),
    Mutant(
        "weights left as a refused forward pass wrote them",
        left_as_written,
        "test_self_check.test_a_refusal_leaves_every_bit_of_the_weights",
    ),
    Mutant(
        "power iterations in the passes of the examples",
        not_advanced,
        "test_spectral_norm.test_vectors_advance_as_in_an_ordinary_step",
        {"norm": "parametrization", "options": "plain"},
        guard="not to be written",
    ),
    Mutant(
        "vectors of spectral norms that stand still for an empty batch",
        vectors_that_follow_the_batch,
        "test_spectral_norm.test_vectors_advance_without_any_example",
        {"norm": "parametrization"},
    ),
    Mutant(
        "a count of passes kept by the reference engine",
        unchecked(vmap._require_unwritten),
        "test_spectral_norm.test_other_buffers_are_refused_with_what_to_use",
        {"engine": "vmap", "counting": True},
    ),
    Mutant(
        "private tensors left on modules",
        nothing_undone,
        "test_attacks.test_nothing_private_stays_in_attributes_however_deep",
    ),
    Mutant(
        "private values left in tensors that containers hold",
        contents_left,
        "test_attacks.test_nothing_private_stays_in_what_containers_hold",
        {"way": "a tuple", "engine": "factored"},
    ),
    Mutant(
        "a backward pass of a check that writes to the model",
        copies_gone_before_the_backward_pass,
        "test_left_behind.test_an_attribute_set_by_a_part_that_is_computed_again_is_undone",
        {"engine": "factored"},
    ),
    Mutant(
        "a buffer written in the backward pass unnoticed",
        lambda patch: patch.setattr(capture.Capture, "__exit__", lambda self, *_: self._stack.close()),
        "test_left_behind.test_a_buffer_written_in_the_backward_pass_is_refused_and_keeps_its_value",
        {"way": "tensor hook", "engine": "factored"},
    ),
    Mutant(
        "a buffer written through another object unnoticed",
        lambda patch: everywhere(patch, module_state.parameters_kept, lambda _: nullcontext()),
        "test_left_behind.test_a_buffer_that_another_object_holds_is_refused",
        {"width": 4, "engine": "factored"},
    ),
    Mutant(
        "losses in half precision compared in it alone",
        losses_as_they_are,
        "test_half_losses.test_a_dependence_that_half_precision_hides_is_refused",
        lambda module: {"way": "bfloat16", "kind": module.Centered},
    ),
]
