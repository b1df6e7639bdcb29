"""Tables: incomes of the American census, and synthetic classes of very unequal size."""

import csv
import math
from pathlib import Path

import torch
from torch import Tensor

from privgrad.data.dataset import DataSet, split
from privgrad.data.schema import Natural, PathLike, Positive
from privgrad.errors import readable, require_integer
from privgrad_lab.data.fetching import located, require_counts

# The values that the codebook of the census allows in a column. Values taken from the data would not be public.
_CATEGORIES = {
    "workclass": "? Federal-gov Local-gov Never-worked Private Self-emp-inc Self-emp-not-inc State-gov Without-pay",
    "education": "10th 11th 12th 1st-4th 5th-6th 7th-8th 9th Assoc-acdm Assoc-voc Bachelors Doctorate HS-grad Masters "
    "Preschool Prof-school Some-college",
    "marital-status": "Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent Never-married Separated "
    "Widowed",
    "occupation": "? Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing Handlers-cleaners "
    "Machine-op-inspct Other-service Priv-house-serv Prof-specialty Protective-serv Sales Tech-support "
    "Transport-moving",
    "relationship": "Husband Not-in-family Other-relative Own-child Unmarried Wife",
    "ethnicity": "Amer-Indian-Eskimo Asian-Pac-Islander Black Other White",
    "gender": "Female Male",
}
_LARGEST = {"age": 90, "education-num": 16, "capital-gain": 99_999, "capital-loss": 4_356, "hours-per-week": 99}
_LABELS = {"<=50K": 0, ">50K": 1}


def adult(path: PathLike | None = None, *, limit: Positive | None = None, validation: int = 0) -> DataSet:
    """Load Adult (1994): does a person earn more than 50,000 dollars a year (1) or not (0)?

    24,421 training and 8,140 test rows; every fourth row is a test row. Inputs, float (n, 65): seven columns as one-hot
    codes of the codebook's categories, then age, years of education, capital gain, capital loss and hours per week.
    These are divided by their largest values, the two capitals on a logarithmic scale. 76 % earn less.

    Args:
        path: folder with census.csv; None is ${XDG_CACHE_HOME:-~/.cache}/privgrad/adult.
        limit: number of training rows to keep, >= 1; None keeps all.
        validation: number of these rows, from the end, to hold out.
    Raises:
        PrivacyError: the file is absent or damaged, or a number is out of its range.
    Privacy:
        Categories and largest values come from the codebook, not from the rows.
    """
    require_counts("adult", limit=limit)
    inputs, labels = _read(located("adult", path, "adult") / "census.csv")
    is_test = torch.arange(len(labels)) % 4 == 3
    train, test = ((inputs[part], labels[part]) for part in (~is_test, is_test))
    train = (train[0][:limit], train[1][:limit])
    return split("Adult (census income, 1994)", train, test, validation, num_classes=2)


def heavy_tail(*, groups: Positive = 8, log_size: Natural = 10, seed: int = 0, validation: int = 0) -> DataSet:
    """Make synthetic classes of very unequal size, whose inputs say nothing about them: a model can only memorize.

    Computes: group i of G = `groups` has 2**i classes with 2**(log_size - i) examples each; n = G 2**log_size examples
        in d = n + 2**log_size dimensions, uniform in [0, 1]. 8 and 10 give n = 8192, d = 9216, 255 classes.

    Args:
        groups: G >= 1.
        log_size: at least groups - 1.
        seed: of the inputs.
        validation: 0: there is nothing to generalize to, and the training set is the test set.
    Raises:
        PrivacyError: a number is out of its range.
    Reference:
        Kunstner et al. 2024 (arXiv 2402.19449), as Tang, Zhiyanov, Lecuyer use it. The printed sizes count
        groups that their minimum class size of 5 leaves out.
    """
    require_integer("heavy_tail", "groups", groups, 1)
    require_integer("heavy_tail", "log_size", log_size, groups - 1)
    sizes = torch.tensor([2 ** (log_size - group) for group in range(groups) for _ in range(2**group)])
    labels = torch.arange(len(sizes)).repeat_interleave(sizes)
    width = len(labels) + 2**log_size
    inputs = torch.rand(len(labels), width, generator=torch.Generator().manual_seed(seed))
    name, whole = f"heavy-tail synthetic, {groups} groups", (inputs, labels)
    return split(name, whole, whole, validation, num_classes=len(sizes), frequency_edges=())


def _read(path: Path) -> tuple[Tensor, Tensor]:
    codes = [(name, value) for name, line in _CATEGORIES.items() for value in line.split()]
    rows: list[list[float]] = []
    labels: list[int] = []
    with readable("adult", f"{path}", "to be the table of the census", "fetch it again"):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, skipinitialspace=True, strict=True):
                coded = [float(row[name].strip() == value) for name, value in codes]
                for name, largest in _LARGEST.items():
                    value = float(row[name])
                    is_capital = name.startswith("capital")
                    coded.append(math.log1p(value) / math.log1p(largest) if is_capital else value / largest)
                rows.append(coded)
                labels.append(_LABELS[row["loan"].strip()])
        inputs = torch.tensor(rows).view(len(rows), len(codes) + len(_LARGEST))
        are_known = inputs[:, : len(codes)].sum(1) == len(_CATEGORIES)
        if len(rows) < 2 or not bool((are_known & (inputs >= 0).all(1) & (inputs <= 1).all(1)).all()):
            raise ValueError(f"{len(rows)} rows, an unknown category, or an input outside of [0, 1]")
        return inputs, torch.tensor(labels)
