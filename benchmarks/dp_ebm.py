"""DP-EBM of interpret on Adult, beside the recipe `examples/recipes/adult.toml`: same rows, ranges, epsilon and delta.

`python -m venv ebm && ebm/bin/pip install interpret==0.7.8 && ebm/bin/python benchmarks/dp_ebm.py` appends a line to
results/recipes/adult-dp-ebm.jsonl for each seed and learning rate. It does not import privgrad, because interpret and
torch are large. The default learning rate is far too small here. The other one is the best of 0.03, 0.06, 0.1, 0.2, 0.4
and 0.8 on the test rows, which flatters DP-EBM. DP-EBM also gets education-num, which improves it.
"""

import itertools
import json
import time
import tomllib
from pathlib import Path

import pandas as pd
from interpret.privacy import DPExplainableBoostingClassifier
from sklearn.metrics import accuracy_score, roc_auc_score

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples/recipes/adult.toml"
OUT = ROOT / "results/recipes/adult-dp-ebm.jsonl"
SEEDS = range(5)
RATES = (0.01, 0.2)


def main() -> None:
    recipe = tomllib.loads(RECIPE.read_text())
    data, privacy = recipe["data"], recipe["privacy"]
    columns = data["columns"] | {"education-num": {"kind": "number", "edges": [1, 16]}}
    table = pd.read_csv(Path(data["file"]).expanduser(), skipinitialspace=True)
    is_test = table.iloc[:, 0] % data["test_every"] == data["test_every"] - 1
    inputs, labels = table[list(columns)], (table[data["label"]] == data["classes"][1]).astype(int)
    numbers = {name: one for name, one in columns.items() if one["kind"] == "number"}
    for rate, seed in itertools.product(RATES, SEEDS):
        start = time.perf_counter()
        model = DPExplainableBoostingClassifier(
            feature_names=list(columns),
            feature_types=["continuous" if name in numbers else "nominal" for name in columns],
            epsilon=privacy["target_epsilon"],
            delta=privacy["delta"],
            privacy_bounds={name: (one["edges"][0], one["edges"][-1]) for name, one in numbers.items()},
            learning_rate=rate,
            random_state=seed,
        )
        model.fit(inputs[~is_test], labels[~is_test])
        likely = model.predict_proba(inputs[is_test])[:, 1]
        record = {
            "method": "DP-EBM, interpret 0.7.8",
            "learning_rate": rate,
            "seed": seed,
            "epsilon": privacy["target_epsilon"],
            "delta": privacy["delta"],
            "train_rows": int((~is_test).sum()),
            "test_rows": int(is_test.sum()),
            "accuracy": accuracy_score(labels[is_test], likely > 0.5),
            "auc": roc_auc_score(labels[is_test], likely),
            "seconds": round(time.perf_counter() - start, 1),
        }
        with OUT.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record)  # noqa: T201


if __name__ == "__main__":
    main()
