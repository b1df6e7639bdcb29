"""A private head on stored states, from which PrivateTrainer starts a classifier within the same epsilon."""

from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from privgrad.accounting.accountant import Release, epsilon
from privgrad.accounting.calibration import noise_within
from privgrad.features.frozen import Frozen
from privgrad.gradient.functional import evaluating, named_modules
from privgrad.heads.fitting import LARGEST_BATCH, STEPS, fit_head
from privgrad.integrations.huggingface_models import IGNORED, LABELS, base_of, head_of
from privgrad.ledger.ledger import Ledger
from privgrad.ledger.lineage import note_training
from privgrad.plan import PrivacyPlan
from privgrad.training.defaults import head_max_grad_norm

SHARE = 0.5  # of epsilon, that the head would cost alone; docs/integrations.md shows what it reaches
_BLOCK = 32  # texts in one call of the encoder
_TOLERANCE = 1e-4  # of the change by companions through rounding, as in FrozenText


class Numbers(NamedTuple):
    """The public numbers of a training without a plan."""

    target_epsilon: float
    delta: float
    num_examples: int


class Layer(NamedTuple):
    """The last layer of a classifier, and the norm of its input for a public text."""

    linear: nn.Linear
    norm: float


def last_layer(model: nn.Module) -> Layer | None:
    """Return the layer that computes the classes of a sequence classifier, if one layer does and is trained."""
    base = base_of(model)
    count, names = getattr(getattr(base, "config", None), "num_labels", 0), head_of(model)
    found = [
        layer
        for name, layer in named_modules(model)
        if type(layer) is nn.Linear
        and layer.out_features == count
        and layer.weight.requires_grad
        and f"{name}.weight" in names
    ]
    if len(found) != 1 or count < 2 or base.main_input_name != "input_ids":
        return None
    public: Tensor = base.dummy_inputs["input_ids"][:1]
    states = _inputs_of(found[0], model, {"input_ids": public})
    return (
        Layer(found[0], states.square().sum().sqrt().item()) if states.ndim == 2 else None
    )  # decoders have states of all tokens


def planned(
    numbers: Numbers, layer: Layer | None, *, expected_batch_size: int, steps: int, max_grad_norm: float
) -> tuple[PrivacyPlan, PrivacyPlan | None]:
    """Return the plan of a training, and of the head before it if there is a layer; together they cost the target."""
    own: dict[str, Any] = {"delta": numbers.delta, "num_examples": numbers.num_examples}
    of_steps: dict[str, Any] = {
        "expected_batch_size": expected_batch_size,
        "steps": steps,
        "max_grad_norm": max_grad_norm,
    }
    target = numbers.target_epsilon
    if layer is None:
        return PrivacyPlan.for_budget(**own, **of_steps, target_epsilon=target), None
    size = min(numbers.num_examples, LARGEST_BATCH)
    head = PrivacyPlan.for_budget(
        **own, expected_batch_size=size, steps=STEPS, max_grad_norm=1.0, target_epsilon=SHARE * target
    )
    head = replace(head, max_grad_norm=head_max_grad_norm(head, layer.linear.weight.numel(), of_numbers=False))
    sample_rate = expected_batch_size / numbers.num_examples

    def cost(sigma: float, accountant: str) -> float:
        releases = [head.release_of(head.steps), Release(sigma, sample_rate, count=steps)]
        return epsilon(releases, delta=numbers.delta, accountant="pld" if accountant == "pld" else "rdp")

    sigma = noise_within(cost, target)
    assert sigma is not None, "enough noise costs less than the other share"
    return PrivacyPlan(**own, **of_steps, sample_rate=sample_rate, noise_multiplier=sigma), head


def _inputs_of(layer: nn.Linear, model: nn.Module, columns: Mapping[str, Tensor]) -> Tensor:
    """Return the inputs of a layer for the columns of a batch."""
    caught: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: caught.append(args[0].detach().float()))
    try:
        with torch.no_grad(), evaluating(model):
            model(**{name: value.to(layer.weight.device) for name, value in columns.items()})
    finally:
        handle.remove()
    return caught[0]


class _States(nn.Module):
    """The inputs of a classifier's last layer for rows of a data set, which are given by their numbers (n, 1)."""

    def __init__(self, model: nn.Module, layer: nn.Linear, dataset: Any, collate: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.layer, self.dataset, self.collate = model, layer, dataset, collate
        self.labels: dict[int, Any] = {}

    def forward(self, rows: Tensor) -> Tensor:
        indices = [int(row) for row in rows.flatten()]
        batch = dict(self.collate([self.dataset[index] for index in indices]))
        labels = next(batch.pop(name) for name in LABELS if name in batch)
        self.labels |= zip(indices, labels.tolist(), strict=True)
        return _inputs_of(self.layer, self.model, batch)


def start_from_head(
    model: nn.Module, layer: Layer, dataset: Any, collate: Callable[[Any], Any], plan: PrivacyPlan, folder: Path
) -> Ledger:
    """Train a head on the states of all examples, write it into the last layer, and return its ledger.

    An interrupted call continues the training of the head; a second call returns what it has made.
    """
    states = _States(model, layer.linear, dataset, collate)
    extractor = Frozen(states, name="states", source="weights of the encoder", block=_BLOCK)
    extractor.tolerance = max(extractor.tolerance, _TOLERANCE)
    features = extractor(torch.arange(len(cast(Sized, dataset)))[:, None])
    labels = torch.tensor([states.labels[index] for index in range(len(features))])
    if labels.ndim == 1:  # otherwise each row has several labels, 0 or 1
        features[labels == IGNORED] = 0.0  # such a row moves nothing
        labels = labels.clamp(min=0)
    head = fit_head(
        features,
        labels,
        num_classes=layer.linear.out_features,
        plan=plan,
        source=extractor.source,
        output_dir=folder,
        progress=False,
    )
    # The head divides states by their norm. One public number for all of them leaves its classes as they are.
    with torch.no_grad():
        layer.linear.weight.copy_(head.model.linear.weight / layer.norm)
        if cast("Tensor | None", layer.linear.bias) is not None:
            layer.linear.bias.zero_()
    assert head.result is not None
    return head.result.ledger


def note_head(model: nn.Module, layer: Layer, ledger: Ledger) -> None:
    """Note that the training of a head moved the last layer of a model."""
    moved = {id(parameter) for parameter in layer.linear.parameters()}
    note_training(model, ledger, {name for name, parameter in model.named_parameters() if id(parameter) in moved})
