"""DP-EBM of interpret on a table: `.peers/dp-ebm/bin/python -m benchmarks.accuracy.with_dp_ebm FOLDER VARIANT SEED`.

"example" is the class with its defaults, with the public categories and ranges that all libraries get, and the column
education-num. "features" gives it the public bins of our recipe in place of numbers.
benchmarks/dp_ebm.py also measures a learning rate that was chosen on test rows, which does not belong here.
"""

import warnings
from typing import Any

import numpy as np
from interpret.privacy import DPExplainableBoostingClassifier

from benchmarks.accuracy.task import Result, Task, main

PACKAGES = ("interpret-core", "scikit-learn")


def trained(task: Task, variant: str, seed: int) -> Result:
    """Train once, and return the outputs on the test part with the facts of the training."""
    columns: list[dict[str, Any]] = task.facts["columns"]
    names = [column["name"] for column in columns]
    is_number = [column["kind"] == "number" and variant == "example" for column in columns]
    train, test = (task.part("values", p) if variant == "example" else task.bins(p) for p in ("train", "test"))
    bounds = {
        column["name"]: (column["edges"][0], column["edges"][-1])
        for column, number in zip(columns, is_number, strict=True)
        if number
    }
    model: Any = DPExplainableBoostingClassifier(
        feature_names=names,
        feature_types=["continuous" if number else "nominal" for number in is_number],
        epsilon=task.epsilon,
        delta=task.delta,
        privacy_bounds=bounds,
        n_jobs=1,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?i).*privacy.*")  # of the research seed
        model.fit(_cells(train, is_number), task.labels("train"))
    return {
        "outputs": np.asarray(model.predict_proba(_cells(test, is_number))),
        "epsilon": float(model.epsilon),
        "delta": float(model.delta),
        "accountant": f"{model.composition}, of interpret",
        "settings": {"learning_rate": model.learning_rate, "max_rounds": model.max_rounds, "max_bins": model.max_bins},
    }


def _cells(values: Any, is_number: list[bool]) -> Any:
    """Numbers as they are, and categories as texts."""
    cells = np.empty(values.shape, dtype=object)
    for index, number in enumerate(is_number):
        cells[:, index] = values[:, index] if number else [f"c{int(code)}" for code in values[:, index]]
    return cells


if __name__ == "__main__":
    main(trained, PACKAGES)
