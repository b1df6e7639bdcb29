"""The methods of `python -m benchmarks.tables`: ours, other libraries with the settings of their examples, no privacy.

Each takes a table, epsilon and a research seed, and returns probabilities of test rows (n, classes) or numbers (n,).
Nothing was chosen for a table: the only numbers are defaults, and what the table declares.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import privgrad as pg
from benchmarks.accuracy.with_privgrad import NETWORK
from benchmarks.table_sets import Array, Table
from benchmarks.untuned import DELTA, by_opacus
from privgrad.estimators import (
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivateTabularClassifier,
    PrivateTabularRegressor,
)

HIDDEN = 64
PUBLIC = 256
Numbers = dict[str, Any]
Train = Callable[[Table, float, int], Array]


def budget(table: Table, epsilon: float, seed: int) -> Numbers:
    """The numbers that decide the privacy; how many rows a table has counts as public."""
    numbers = {"target_epsilon": epsilon, "delta": DELTA, "num_examples": len(table.labels["train"])}
    return numbers | {"seed": seed}


def privgrad_head(table: Table, epsilon: float, seed: int) -> Array:
    """`fit_head` on the codes of `data.table`, with all defaults."""
    target = table.target
    kind: Numbers = {"num_classes": target.outputs}
    if target.kind == "number":
        kind = {"bounds": (target.low, target.high), "counts": target.counts}
    codes, labels = table.codes["train"], torch.from_numpy(table.labels["train"])
    head = pg.fit_head(codes, labels, **kind, source="no data", progress=False, **budget(table, epsilon, seed))
    return decoded(table, head(table.codes["test"]))


def privgrad_tabular(
    table: Table, epsilon: float, seed: int, *, knots: int | None = None, hidden: int | None = None
) -> Array:
    """The models of a table of `privgrad.estimators` on values as they are, with all defaults but for trials."""
    own = {} if knots is None else {"knots": knots}
    declared = {one.name: one.declared | (own if one.range is not None else {}) for one in table.columns}
    numbers: Numbers = budget(table, epsilon, seed) | {"columns": declared, "unit": "row", "verbose": False}
    numbers["hidden"] = hidden
    labels, rows = (
        table.labels["train"],
        {
            part: {one.name: one.written(own) for one, own in zip(table.columns, table.values[part].T, strict=True)}
            for part in table.labels
        },
    )
    torch.manual_seed(seed)
    if table.target.kind == "class":
        model = PrivateTabularClassifier(classes=range(table.target.outputs), **numbers)
        return model.fit(rows["train"], labels).predict_proba(rows["test"])
    bounds = (table.target.low, table.target.high)
    numbers["counts"] = table.target.counts
    return PrivateTabularRegressor(label_bounds=bounds, **numbers).fit(rows["train"], labels).predict(rows["test"])


def privgrad_estimator(table: Table, epsilon: float, seed: int) -> Array:
    """The estimators on numbers and one-hot categories, in public bounds, with all defaults."""
    numbers: Numbers = budget(table, epsilon, seed) | {"feature_bounds": table.bounds}
    rows, labels, test = table.raw("train"), table.labels["train"], table.raw("test")
    if table.target.kind == "class":
        model = PrivateLogisticRegression(classes=range(table.target.outputs), **numbers)
        return model.fit(rows, labels).predict_proba(test)
    bounds = (table.target.low, table.target.high)
    return PrivateLinearRegression(label_bounds=bounds, **numbers).fit(rows, labels).predict(test)


def privgrad_network(table: Table, epsilon: float, seed: int) -> Array:
    """Two layers on the codes, by `suggest` with public rows that are drawn evenly from what is declared."""
    torch.manual_seed(seed)
    model, losses = network(table.codes["train"].shape[1], table), table.target.losses
    own = budget(table, epsilon, seed)
    numbers: Numbers = NETWORK | {"expected_batch_size": min(NETWORK["expected_batch_size"], own["num_examples"])}
    plan = pg.PrivacyPlan.for_budget(max_grad_norm=1.0, **numbers, **own)  # `suggest` replaces the norm
    found = pg.suggest(model, plan, public_batch=table.public_batch(PUBLIC, seed), loss_fn=losses)
    private_grad = pg.PrivateGradient(model, losses, found.plan, clip=found.clip)
    pg.fit(private_grad, found.optimizer(model), labeled(table, table.codes), scheduler=found.schedule, progress=False)
    return decoded(table, model(table.codes["test"]))


def opacus_linear(table: Table, epsilon: float, seed: int) -> Array:
    """A linear model with the settings of Opacus' examples/mnist.py."""
    torch.manual_seed(seed)
    model = nn.Linear(len(table.bounds[0]), table.target.outputs)
    return opacus(table, epsilon, model, torch.optim.SGD(model.parameters(), lr=0.1), batch_size=64, epochs=10)


def opacus_mlp(table: Table, epsilon: float, seed: int) -> Array:
    """Two layers, Adam at 1e-3, C = 1, and 20 epochs of batches of 256."""
    torch.manual_seed(seed)
    model = network(len(table.bounds[0]), table)
    return opacus(table, epsilon, model, torch.optim.Adam(model.parameters()), batch_size=256, epochs=20)


def opacus(table: Table, epsilon: float, model: nn.Module, optimizer: Any, *, batch_size: int, epochs: int) -> Array:
    """Train a model of columns in [-1, 1], as our estimators see them, by the cross-entropy or the squared error."""
    rows = {part: torch.from_numpy(2 * table.scaled(part) - 1).float() for part in table.labels}
    factor = 1 if table.target.kind == "class" else 2  # the losses of a head have half of the squared error

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return factor * table.target.losses(model, batch)

    options: Any = {"batch_size": batch_size, "epochs": epochs}
    private = by_opacus(model, optimizer, labeled(table, rows), losses, epsilon, **options)
    return decoded(table, private(rows["test"]))


def dp_ebm(table: Table, epsilon: float, seed: int) -> Array:
    """DP-EBM of interpret with its defaults, on numbers with public ranges and on categories as texts."""
    from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor

    numbers = [column for column in table.columns if column.range is not None]
    options: Numbers = {
        "feature_names": [column.name for column in table.columns],
        "feature_types": ["nominal" if column.range is None else "continuous" for column in table.columns],
        "privacy_bounds": {column.name: column.range for column in numbers},
        "epsilon": epsilon,
        "delta": DELTA,
        "n_jobs": 1,
        "random_state": seed,
    }
    rows = {part: cells(table, table.values[part]) for part in table.labels}
    if table.target.kind == "class":
        model: Any = DPExplainableBoostingClassifier(**options)
        return model.fit(rows["train"], table.labels["train"]).predict_proba(rows["test"])
    options |= {"privacy_target_min": table.target.low, "privacy_target_max": table.target.high}
    return DPExplainableBoostingRegressor(**options).fit(rows["train"], table.labels["train"]).predict(rows["test"])


def cells(table: Table, values: Array) -> Array:
    """Numbers, with the middle for a missing one, and categories as texts."""
    made = np.empty(values.shape, dtype=object)
    for index, column in enumerate(table.columns):
        own = values[:, index]
        if column.range is not None:
            made[:, index] = np.where(np.isnan(own), sum(column.range) / 2, own)
        else:
            made[:, index] = [f"c{place:.0f}" for place in own]
    return made


def diffprivlib(table: Table, epsilon: float, seed: int) -> Array:
    """The linear models of diffprivlib on numbers in [0, 1] and one-hot categories; delta is 0."""
    from diffprivlib.models import LinearRegression, LogisticRegression

    rows, labels, test = table.scaled("train"), table.labels["train"], table.scaled("test")
    if table.target.kind == "class":
        squares = len(table.columns) + sum(column.missing for column in table.columns)
        model: Any = LogisticRegression(epsilon=epsilon, data_norm=squares**0.5, random_state=seed)
        model.fit(rows, labels)
        made = np.zeros((len(test), table.target.outputs))
        made[:, model.classes_] = model.predict_proba(test)
        return made
    bounds = (table.target.low, table.target.high)
    model = LinearRegression(epsilon=epsilon, bounds_X=(0.0, 1.0), bounds_y=bounds, random_state=seed)
    return model.fit(rows, labels).predict(test)


def linear(table: Table, epsilon: float, seed: int) -> Array:
    """A linear model without privacy on the codes of `data.table`, as one-hot codes."""
    from sklearn.linear_model import LogisticRegression, Ridge

    rows = {part: (codes > 0).numpy().astype(float) for part, codes in table.codes.items()}
    if table.target.kind == "class":
        return LogisticRegression(max_iter=1000).fit(rows["train"], table.labels["train"]).predict_proba(rows["test"])
    return Ridge().fit(rows["train"], table.labels["train"]).predict(rows["test"])


def boosting(table: Table, epsilon: float, seed: int) -> Array:
    """Gradient boosting without privacy, on values as they are."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    options: Numbers = {"categorical_features": [column.range is None for column in table.columns]}
    options["random_state"] = seed
    rows, labels, test = table.values["train"], table.labels["train"], table.values["test"]
    if table.target.kind == "class":
        return HistGradientBoostingClassifier(**options).fit(rows, labels).predict_proba(test)
    options["loss"] = "poisson" if table.target.counts else "squared_error"
    return HistGradientBoostingRegressor(**options).fit(rows, labels).predict(test)


def network(width: int, table: Table) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, table.target.outputs))


def labeled(table: Table, rows: Any) -> TensorDataset:
    """The training part with labels as the losses of a head take them: numbers are moved to [-1, 1]."""
    return TensorDataset(rows["train"], table.target.prepared(torch.from_numpy(table.labels["train"])))


def decoded(table: Table, outputs: Tensor) -> Array:
    """Probabilities (n, classes), or numbers (n,) within their bounds."""
    made = outputs.detach().double()
    return (made.softmax(1) if table.target.kind == "class" else table.target.decoded(made)).numpy()


@dataclass(frozen=True)
class Method:
    """A method, and where it applies."""

    train: Train
    private: bool = True
    most_classes: int | None = None

    def applies(self, classes: int) -> bool:
        """Whether it takes so many classes, 1 for a number."""
        return self.most_classes is None or classes <= self.most_classes


METHODS = {
    "privgrad-tabular": Method(privgrad_tabular),
    "privgrad-head": Method(privgrad_head),
    "privgrad-estimator": Method(privgrad_estimator),
    "privgrad-network": Method(privgrad_network),
    "opacus-linear": Method(opacus_linear),
    "opacus-mlp": Method(opacus_mlp),
    "dp-ebm": Method(dp_ebm, most_classes=2),
    "diffprivlib": Method(diffprivlib),
    "linear": Method(linear, private=False),
    "boosting": Method(boosting, private=False),
}

# By which the rules of the models of a table were chosen: the number of knots, and of hidden units.
TRIALS = {
    f"tabular-{knots}-{hidden}": Method(partial(privgrad_tabular, knots=knots, hidden=hidden))
    for knots, hidden in ((5, 0), (8, 0), (16, 0), (16, 32))
}


def predicted(name: str, table: Table, epsilon: float, seed: int) -> Array:
    """Train, and return the predictions for test rows; all numbers are cut to the public bounds.

    Raises:
        RuntimeError: a package is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of research seeds, of rows outside of ranges, and of solvers that stop early
        try:
            made = np.asarray((METHODS | TRIALS)[name].train(table, epsilon, seed))
        except ImportError as error:
            raise RuntimeError(f"{error}") from error
    return made if table.target.kind == "class" else made.clip(table.target.low, table.target.high)
