"""The recipe of adult.toml in Python: public bins, and a private head, on the incomes of the census."""

import tomllib
from pathlib import Path

from sklearn.metrics import roc_auc_score

import privgrad as pg
from privgrad import data


def main(folder: str | None = None) -> pg.Head:
    # The columns with their public ranges and categories are those of adult.toml.
    table = tomllib.loads((Path(__file__).parent / "adult.toml").read_text())["data"]
    people = data.table(Path(table.pop("file")).expanduser(), **table)
    codes, labels = people.train.tensors  # rows of norm 1

    head = pg.fit_head(
        codes,
        labels,
        num_classes=2,
        source="public bins and categories",
        target_epsilon=1.0,
        delta=1e-6,
        num_examples=24_000,
        output_dir=folder,  # with a ledger and a checkpoint in it, if given
    )
    unseen, truth = people.test.tensors
    accuracy = (head.predict(unseen) == truth).double().mean()
    auc = roc_auc_score(truth, head.predict_proba(unseen)[:, 1])
    print(f"accuracy {accuracy:.4f}, AUC {auc:.3f} at epsilon {head.epsilon:.4f}")
    return head


if __name__ == "__main__":
    main("runs/adult-head")
