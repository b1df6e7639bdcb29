"""Defaults that need no tuning: the noise step and the clipping norm, from the model and a public batch."""

import copy
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from privgrad.checks.model_and_loss import require_supported
from privgrad.clip.clipping import Clipping, Flat
from privgrad.clip.rules import Automatic
from privgrad.errors import expected, require_integer, require_positive
from privgrad.gradient.functional import evaluating, gradients, named_modules, preserved, seeded, trainable
from privgrad.optim import SGD
from privgrad.plan import PrivacyPlan
from privgrad.private_gradient import require_model
from privgrad.training.schedule import Decay, Schedule
from privgrad.types import Batch, LossFunction, count_examples, map_examples

# Noise step times input norm. docs/choosing-evidence.md reports how these were chosen.
_LINEAR = 0.06
_NUMBER = 0.016  # of a linear head for a number between -1 and 1
_PEAK = 2.5  # peak of a rate that decays to zero, over a constant rate
_CONFIDENCE = 0.4  # of two classes, for each power of e by which C is below the largest norm of their gradients
_HIDDEN = 0.3  # noise step of a head with hidden units, over that of a linear one
_UNITS = 32
_ENOUGH_FOR_UNITS = 40_000  # examples times epsilon
_NETWORK = 0.16
# Times that of a network for classes over the root of the steps, from 1 to 2, if it normalizes what each convolution
# returns: noise in such weights cannot make outputs larger.
_NORMALIZED = 2 * math.sqrt(200)
# Times log(classes) over the root of the steps: of a network for classes, whose weights meet a row once.
_ROWS = 0.1 * math.sqrt(200) / math.log(10)
_NETWORK_NUMBER = 0.011
_PLACES = 0.25  # exponent of the number of places that share a weight
_CLIPPED = 0.3  # clipping norm over the median norm of public gradients at the start
_CLIPPED_OF_ROWS = ((0.02, 3.0), (0.04, 1.0))  # the same of such a network, up to a noise in the mean gradients
_EXAMPLES = 32  # whose gradient norms are measured
_FAR = 1e5  # from a label, where the slope of a cross-entropy is constant, and that of a square still grows
_MOMENTUM = 0.9
_NORMALIZATIONS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Suggestion:
    """Settings for a training without tuning, with the reasons. `str(suggestion)` explains them.

    Attributes:
        noise_step: u, for `optim.SGD(..., noise_step=u)` or any other optimizer that takes it.
        momentum: of SGD.
        plan: the given plan, with the suggested max_grad_norm.
        clip: the clipping rule for PrivateGradient.
        schedule: for `fit(..., scheduler=schedule)`.
        input_norms: the measured input norm by layer; see `suggest`.
        reasons: one sentence for each choice.
    """

    noise_step: float
    momentum: float
    plan: PrivacyPlan
    clip: Clipping
    schedule: Schedule
    input_norms: Mapping[str, float]
    reasons: tuple[str, ...]

    def optimizer(self, model: nn.Module) -> SGD:
        """Return SGD with the suggested noise step and momentum, over the model's parameters."""
        return SGD(model.named_parameters(), noise_step=self.noise_step, momentum=self.momentum)

    def __str__(self) -> str:
        """Return the settings, and a line for each reason."""
        rule = "clip.Automatic()" if isinstance(self.clip, Automatic) else f"C = {self.plan.max_grad_norm:g}"
        first = f"SGD, noise_step {self.noise_step:g}, momentum {self.momentum:g}, {self.schedule.decay} rate, {rule}"
        return "\n".join([first, *(f"- {reason}" for reason in self.reasons)])


def suggest(
    model: nn.Module, plan: PrivacyPlan, *, public_batch: Any, loss_fn: LossFunction | None = None
) -> Suggestion:
    """Suggest a noise step, a clipping norm and a schedule that need no tuning on private data.

    Computes: the root mean square norm a_l of each layer's inputs at one place (a position of a sequence, a patch of a
        convolution), over the public batch, at the present weights, and the number n_l of places of an example (or of a
        view, if loss_fn calls the model with several of each). A word of an embedding table has norm 1. Layers without
        a weight matrix, such as normalizations, are left out. A model with one trained layer gets u = 0.06 / a_l and a
        constant rate. Any other model gets u = min over layers of 0.16 / (a_l n_l**0.25) and a rate that decays
        linearly to zero. For classes, 0.32 sqrt(200 / steps), at least 0.16 and at most 0.32, takes the place of 0.16
        if the model normalizes what each of its convolutions returns, as after pg.fix. For k classes of rows, with one
        place in each layer, 0.1 log10(k) sqrt(200 / steps) does, where it is smaller. If the loss is that of one number
        for each example, such as a squared error, u is multiplied by the standard deviation of the public labels times
        0.46, or 0.12 for a network, at most by 1.
        C is 0.3 times the median gradient norm of 32 public examples, so that most gradients are clipped. For a network
        and classes of rows, it is 3 times this norm if sigma sqrt(weights / steps) / B is at most 0.02, or once up to
        0.04. u does not depend on C.

    Args:
        model: the model, with the weights that the training starts from. It is not changed. A layer of another kind
            than torch's counts as linear in the last dimension of its input, unless it has a method
            `input_squares(inputs)`: the squared norm of its inputs at each place, shape (places,).
        plan: the plan of the training, for examples. Its max_grad_norm is replaced, which changes no epsilon.
        public_batch: public examples, as loss_fn takes them, such as public_set[:256] of a TensorDataset. Without
            loss_fn, the model's input; a tuple holds its positional arguments, a dict its keyword arguments. A few
            hundred examples suffice. They must not be private: the suggestion would be a release that no epsilon
            covers.
        loss_fn: (model, examples) -> losses, shape (B,). None: the clipping rule is then clip.Automatic().
    Returns:
        Suggestion. Its numbers depend on the present weights, and a run that resumes needs the same ones. So call
        torch.manual_seed before you make the model, or type the numbers.
    Raises:
        PrivacyError: public_batch is a batch of a plan, or no batch; the plan is for users, or without noise;
            PrivateGradient does not support the model; or no trained layer with a weight matrix was called.
    Privacy:
        This costs no privacy: it uses the model and public data only. No private gradient norm is looked at.
    Reference:
        Ours. docs/choosing-evidence.md has the tasks that factors and exponent were chosen on.
    """
    require_model("suggest", model)
    require_supported(model)
    require_positive("suggest", "plan.noise_multiplier", plan.noise_multiplier, "without noise there is no noise step")
    if isinstance(public_batch, Batch):
        remedy = "give public examples: a suggestion from private ones would be a release without noise"
        raise expected("suggest", "public_batch", "to be public", "a batch of a privacy plan", remedy)
    if plan.privacy_unit == "user":
        remedy = "tune the server's noise step and the local rate: no rule is known for the updates of users"
        raise expected("suggest", "plan", "to be for examples", "privacy_unit 'user'", remedy)
    examples = count_examples(public_batch)
    require_integer("suggest", "the number of public examples", examples, 1)
    norms = _input_norms(model, public_batch, loss_fn, examples)
    matrices = sum(parameter.ndim > 1 for parameter in trainable(model).values())
    classes, spread = (0, None) if loss_fn is None else _labels(model, public_batch, loss_fn)
    is_linear = len(norms) == matrices == 1
    of_rows = classes > 0 and not is_linear and max(places for _, places in norms.values()) <= 1
    # The layer whose outputs the noise moves most decides.
    name = max(norms, key=lambda key: norms[key][0] * norms[key][1] ** _PLACES)
    norm, places = norms[name]
    whose = name or "of the model"
    if is_linear:
        step, schedule = _LINEAR / norm, Schedule("constant")
        why = f"One layer is trained. Noise moves outputs by {_LINEAR:g} a step: {_LINEAR:g} / {norm:.3g} ({whose})."
        of_schedule = "Constant rate: for one layer, decay changed our results by -2 to 0 points."
    else:
        normalizes = classes > 0 and not of_rows and _normalizes(model, public_batch, loss_fn)
        of_network = _NETWORK
        if of_rows:
            of_network = min(_NETWORK, _ROWS * math.log(classes) / math.sqrt(plan.steps))
        elif normalizes:
            of_network *= min(2.0, max(1.0, _NORMALIZED / math.sqrt(plan.steps)))
        of_network = float(f"{of_network:.2g}")
        step, schedule = of_network / (norm * places**_PLACES), Schedule("linear")
        of_places = f" x {places:g} places^{_PLACES:g}" if places > 1 else ""
        why = f"The layer {whose} has the largest inputs: {of_network:g} / ({norm:.3g}{of_places})."
        why += f" {of_network:g} is for {classes} classes of rows, in {plan.steps:,} steps." if of_rows else ""
        why += (
            f" {of_network:g} is for convolutions that are normalized, in {plan.steps:,} steps." if normalizes else ""
        )
        of_schedule = "Linear decay to zero: without it, the noise of a network's last steps is not averaged."
    if spread is not None:
        of_number = _NUMBER / _LINEAR if is_linear else _NETWORK_NUMBER / _NETWORK
        share = min(1.0, of_number * spread * math.sqrt(3))  # 1 / sqrt(3): of numbers drawn from -1 to 1
        step *= share
        why += f" The loss is that of a number, with a standard deviation of {spread:.2g}: times {share:.2g}."
    step = float(f"{step:.2g}")
    clip, chosen, of_clip = _clipping(model, plan, public_batch, loss_fn, examples, of_rows=of_rows)
    reasons = (f"Noise step {step:g}. {why}", of_schedule, of_clip)
    inputs = {name: norm for name, (norm, _) in norms.items()}
    return Suggestion(step, _MOMENTUM, chosen, clip, schedule, inputs, reasons)


def _labels(model: nn.Module, public_batch: Any, loss_fn: LossFunction) -> tuple[int, float | None]:
    """Return the number of classes, and the standard deviation of labels that are one number each, unless it is 0.

    The number is 0 if labels are no classes, and 2 for one output.

    Far from the labels, the slope of such a loss in the output still grows, and that of a cross-entropy does not.
    """
    placed: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not placed and isinstance(output, Tensor) and output.is_floating_point():
            placed.append(torch.zeros_like(output, requires_grad=True))
        return placed[0] if placed else output

    def slopes(at: float) -> Tensor:
        with torch.no_grad():
            placed[0].fill_(at)
        total = loss_fn(model, public_batch).sum()
        found = torch.autograd.grad(total, placed[0], allow_unused=True)[0] if total.requires_grad else None
        return placed[0].detach() * math.nan if found is None else found.flatten()

    handle = model.register_forward_hook(hook)
    try:
        with evaluating(model), preserved(model), seeded(0):
            loss_fn(model, public_batch)
            if not placed:
                return 0, None
            outputs = placed[0].numel() / count_examples(public_batch)
            near, far = (float((slopes(by) - slopes(-by)).mean()) / (2 * by) for by in (0.1, _FAR))
            if not far > near / 2 or not near > 0:
                # NaN: the loss does not depend on this output.
                return max(2, round(outputs)) if math.isfinite(near) else 0, None
            at_0 = slopes(0.0)
            are_one = outputs == 1 and bool(at_0.max() > at_0.min())
            return 0, float(at_0.std(correction=0)) / near if are_one else None
    finally:
        handle.remove()


def table_hidden(num_examples: int, epsilon: float, *, of_numbers: bool) -> tuple[int, str]:
    """Return the number of hidden units of a head on a table, and why."""
    if not of_numbers:
        return 0, "which is rarely behind for classes"
    is_enough = num_examples * epsilon >= _ENOUGH_FOR_UNITS
    how = "at least" if is_enough else "fewer than"
    return _UNITS if is_enough else 0, f"for a number, from {how} {_ENOUGH_FOR_UNITS:,} / epsilon examples"


def head_noise_step(decay: Decay, *, of_numbers: bool, hidden: int = 0) -> float:
    """Return the noise step of a head on rows of norm 1, at the peak of a rate with this decay."""
    step = (_NUMBER if of_numbers else _LINEAR) * (_HIDDEN if hidden else 1)
    return step if decay == "constant" else float(f"{_PEAK * step:.2g}")


def head_max_grad_norm(plan: PrivacyPlan, weights: int, *, of_numbers: bool, hidden: int = 0) -> float:
    """Return C of a head on rows of norm 1 with so many weights, from the noise that its mean gradients have.

    A small C is robust against noise, and a large one gives better probabilities: docs/choosing-evidence.md.
    """
    if hidden:  # gradients are longer, because outputs have more weights of about the same slope
        return 0.3 if of_numbers else 3.0
    noise = _noise_of_means(plan, weights)
    if of_numbers:
        return 0.3 if noise < 0.005 else 0.1
    large, small = (1.0, 0.3) if weights <= 5_000 else (0.3, 0.1)  # the latter: features, not columns of a table
    return large if noise < 0.02 else small


def head_confidence(max_grad_norm: float) -> float:
    """Return the factor of the outputs of a linear head for two classes on codes of a table, in (0, 1].

    Gradients on rows of norm 1 are sqrt(2) times the error. Clipping makes large errors count less, so that a head is
    too sure of the frequent class. docs/choosing-evidence.md has the measurements.
    """
    return 1 / (1 + _CONFIDENCE * max(0.0, math.log(math.sqrt(2) / max_grad_norm)))


def _noise_of_means(plan: PrivacyPlan, weights: int) -> float:
    """Return the norm of the noise in the mean of all mean gradients of so many weights, over C."""
    return plan.noise_multiplier * math.sqrt(weights / plan.steps) / plan.expected_batch_size


def _clipping(
    model: nn.Module,
    plan: PrivacyPlan,
    public_batch: Any,
    loss_fn: LossFunction | None,
    examples: int,
    *,
    of_rows: bool,
) -> tuple[Clipping, PrivacyPlan, str]:
    if loss_fn is None:
        return Automatic(), plan, "clip.Automatic(): without loss_fn, no public gradient norm is known."
    norms: list[float] = []
    for index in range(min(examples, _EXAMPLES)):
        row = map_examples(lambda values, index=index: values[index : index + 1], public_batch)
        squares = sum(float(grad.double().square().sum()) for grad in gradients(model, loss_fn, row).values())
        norms.append(math.sqrt(squares))
    finite = [norm for norm in norms if math.isfinite(norm) and norm > 0]
    if not finite:
        return Automatic(), plan, "clip.Automatic(): no public example has a finite gradient that is not zero."
    middle = statistics.median(finite)
    noise = _noise_of_means(plan, sum(parameter.numel() for parameter in trainable(model).values()))
    shares = (share for most, share in _CLIPPED_OF_ROWS if of_rows and noise <= most)
    share = next(shares, _CLIPPED)
    largest = max(float(f"{share * middle:.1g}"), 1e-10)
    chosen = replace(plan if plan.simulates is None else plan.simulates, max_grad_norm=largest)
    if plan.simulates is not None:
        factor = plan.expected_batch_size / plan.simulates.expected_batch_size
        chosen = chosen.scaled(factor, num_examples=plan.num_examples)
    reason = f"C = {largest:g}, {share:g} times the median public gradient norm ({middle:.3g})"
    reason += ": most are clipped." if share == _CLIPPED else f", for good probabilities at little noise ({noise:.2g})."
    return Flat(), chosen, f"{reason} The noise step does not depend on C."


def _input_norms(
    model: nn.Module, public_batch: Any, loss_fn: LossFunction | None, examples: int
) -> dict[str, tuple[float, float]]:
    """Return, by the name of each trained layer, the norm of its inputs at one place and the number of places."""
    own = {id(parameter) for parameter in trainable(model).values() if parameter.ndim > 1}
    layers: dict[str, nn.Module] = {}  # not normalizations: noise in them moves each output by one number only
    for name, module in named_modules(model):
        has_parts = any(True for _ in module.children()) and not isinstance(module, nn.MultiheadAttention)
        held = {id(parameter) for parameter in vars(module)["_parameters"].values()}
        if own & held and not has_parts and not isinstance(module, _NORMALIZATIONS):
            layers[name] = module
    sums: dict[str, tuple[float, int]] = {}  # of the squared norms, and the number of places
    rows: list[int] = []  # of each call of the model; more than `examples` if it sees several views of each

    def count(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows.append(next((len(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), examples))

    def observe(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = next((value.detach() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if inputs is not None:
            # In half precision, a square may be infinite.
            is_half = inputs.is_floating_point() and inputs.itemsize < 4
            squares = _squares(module, inputs.float() if is_half else inputs)
            total, places = sums.get(name, (0.0, 0))
            sums[name] = total + float(squares.double().sum()), places + squares.numel()

    hooks = [(module, partial(observe, name)) for name, module in layers.items()]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in (*hooks, (model, count))]
    _called(model, public_batch, loss_fn, handles)
    seen = max(sum(rows), examples)
    found = {name: (math.sqrt(total / places), places / seen) for name, (total, places) in sums.items()}
    usable = {name: pair for name, pair in found.items() if math.isfinite(pair[0]) and pair[0] > 0}
    if not usable:
        remedy = "give a model whose trained layers have a weight matrix, or choose noise_step yourself, from 0.01"
        got = f"{len(layers)} such layers, {len(found)} of them called with inputs that are not zero"
        raise expected("suggest", "model", "to call a trained layer", got, remedy)
    return usable


def _normalizes(model: nn.Module, public_batch: Any, loss_fn: LossFunction | None) -> bool:
    """Return whether the model has trained convolutions, and the scale of their outputs hardly changes the losses."""
    found = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS) and any(trainable(module))]
    if not found or not any(isinstance(module, _NORMALIZATIONS) for module in model.modules()):
        return False  # without the latter, a saturated activation would count as one

    def is_same(factor: float, rtol: float) -> bool:
        def scale(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            return factor * output

        hooks = [module.register_forward_hook(scale) for module in found]
        scaled = _called(model, public_batch, loss_fn, hooks)
        return all(torch.allclose(one, other, rtol=rtol) for one, other in zip(before, scaled, strict=True))

    before = _called(model, public_batch, loss_fn, [])
    return is_same(100, 0.05) and not is_same(0, 0.05 / 100)  # the latter: with a last layer of zeros, nothing shows


def _called(model: nn.Module, public_batch: Any, loss_fn: LossFunction | None, handles: list[Any]) -> list[Tensor]:
    """Return the losses, or the outputs without loss_fn, remove the hooks, and put the buffers back."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), evaluating(model), preserved(model), seeded(0):
            if loss_fn is not None:
                made: Any = loss_fn(model, public_batch)
            elif isinstance(public_batch, Mapping):
                made = model(**cast("Mapping[str, Any]", public_batch))
            else:
                made = model(*(public_batch if isinstance(public_batch, tuple | list) else (public_batch,)))
            return [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    finally:
        for handle in handles:
            handle.remove()
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _squares(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the squared norm of a layer's input at each place, as one vector over examples and places."""
    if hasattr(module, "input_squares"):
        return cast(Any, module).input_squares(inputs)
    if isinstance(module, nn.EmbeddingBag) and inputs.ndim == 2 and module.mode in ("mean", "sum"):
        bags = [row if module.padding_idx is None else row[row != module.padding_idx] for row in inputs]
        squares = torch.stack([torch.bincount(bag).double().square().sum() for bag in bags])  # of the word counts
        sizes = torch.tensor([max(1, len(bag)) for bag in bags])
        return squares / sizes.square() if module.mode == "mean" else squares
    if not inputs.is_floating_point():  # word ids: each is a vector with a single one
        return torch.ones(inputs.numel())
    if isinstance(module, _CONVOLUTIONS):  # with all weights 1, it sums over what each place reads
        ones = copy.deepcopy(module).to(inputs.dtype)
        for name, parameter in ones.named_parameters():
            nn.init.constant_(parameter, float(name == "weight"))
        return ones.forward(inputs.square()).mean(-1 - len(module.kernel_size)).flatten()
    # An unknown layer counts as linear in the last dimension.
    return inputs.square() if inputs.ndim < 2 else inputs.square().sum(-1).flatten()
