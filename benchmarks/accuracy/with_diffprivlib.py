"""diffprivlib on a table: `.peers/diffprivlib/bin/python -m benchmarks.accuracy.with_diffprivlib FOLDER VARIANT SEED`.

All three have delta 0, which is a stronger promise than that of the other libraries.
- "example": LogisticRegression with its defaults on one-hot categories and scaled numbers. The bound of the rows' norm
  is public: the root of the number of columns.
- "naive-bayes": GaussianNB with its defaults, as in the README, on the same rows, which lie between 0 and 1.
- "features": LogisticRegression with its defaults on the features of our recipe, whose rows have norm 1.
"""

import math
import warnings
from typing import Any

import numpy as np
from diffprivlib.models import GaussianNB, LogisticRegression

from benchmarks.accuracy.task import Result, Task, main

PACKAGES = ("diffprivlib", "scikit-learn")


def trained(task: Task, variant: str, seed: int) -> Result:
    """Train once, and return the outputs on the test part with the facts of the training."""
    warnings.simplefilter("ignore")  # of the solver, which stops after its 100 rounds
    rows = {part: (task.features if variant == "features" else task.codes)(part) for part in ("train", "test")}
    if variant == "naive-bayes":
        settings: dict[str, Any] = {"bounds": (0.0, 1.0)}
        model: Any = GaussianNB(epsilon=task.epsilon, random_state=seed, **settings)
    else:
        norm = 1.0 + 1e-6 if variant == "features" else math.sqrt(len(task.facts["columns"]))
        settings = {"data_norm": norm}
        model = LogisticRegression(epsilon=task.epsilon, random_state=seed, **settings)
    model.fit(rows["train"].astype(np.float64), task.labels("train"))
    return {
        "outputs": np.asarray(model.predict_proba(rows["test"].astype(np.float64))),
        "epsilon": float(model.epsilon),
        "delta": 0.0,
        "accountant": "pure epsilon, of diffprivlib",
        "settings": {"model": type(model).__name__} | settings,
    }


if __name__ == "__main__":
    main(trained, PACKAGES)
