"""A statement on a training for people who decide about data: whose data, which protection, and what is not covered.

statement.txt.j2 is its text, for files, terminals, pages, reports and model cards.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from privgrad.accounting.accountant import rounded_up
from privgrad.ledger.budget import Budget
from privgrad.ledger.ledger import Ledger
from privgrad.statement.facts import Facts, budget_facts, has_random_runs, ledger_facts, released_beside, words_of

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True)
class About:
    """The subject of a statement, in the words of the person who makes it. Nothing checks them.

    Attributes:
        title: of the statement.
        model: the name of the model.
        purpose: what the model is for.
        data: the name of the data set.
    """

    title: str = ""
    model: str = ""
    purpose: str = ""
    data: str = ""

    def __post_init__(self) -> None:
        for name, text in asdict(self).items():
            object.__setattr__(self, name, " ".join(text.split()))  # a line of its own would look like ours


@dataclass(frozen=True)
class Section:
    """A part of a statement: a heading, and sentences."""

    heading: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Statement:
    """A result of `statement`. `str(statement)` is the text.

    Attributes:
        sections: the text by section.
        numbers: the numbers of the text by name: epsilon (PLD), epsilon_rdp, delta, attack_success, releases and so on.
        about: title, model, purpose and data set, as declared.
    """

    sections: tuple[Section, ...]
    numbers: dict[str, Any]
    about: About = field(default_factory=About)

    @property
    def head(self) -> dict[str, str]:
        """The lines above the sections, by name."""
        about = {"Model": self.about.model, "Purpose": self.about.purpose, "Data set": self.about.data}
        declared = {f"{name}, as declared": text for name, text in about.items() if text}
        return {**declared, "Date": str(self.numbers["date"])}

    @property
    def is_guarantee(self) -> bool:
        """Whether the statement begins with a protection, not with what it lacks."""
        return " are protected by " in self.sections[0].sentences[0]

    def __str__(self) -> str:
        """Return the statement as text."""
        title = f"PRIVACY STATEMENT: {self.about.title}" if self.about.title else "PRIVACY STATEMENT"
        head = "\n".join(f"{name}: {text}" for name, text in self.head.items())
        parts = (f"{part.heading}\n" + "\n".join(f"- {line}" for line in part.sentences) for part in self.sections)
        return "\n\n".join((title, head, *parts))

    def to_html(self) -> str:
        """Return the statement as a page of its own, which loads nothing from elsewhere."""
        return template("statement.html.j2").render(said=self)


def statement(
    ledgers: Sequence[Ledger | str | os.PathLike[str]],
    *,
    delta: float | None = None,
    about: About | None = None,
    appendix: Literal["nist"] | None = None,
) -> Statement:
    """Return a statement on all releases of one or several ledgers together.

    Args:
        ledgers: ledgers of trainings on the same data set, which protect the same unit, or the paths of their files.
        delta: in (0, 1). None: the delta that the ledgers record.
        about: title, model, purpose and data set, which the statement gives as declared.
        appendix: "nist" for a section that answers the questions of NIST SP 800-226 as far as ledgers know. The
            publication has no list of questions: they follow the parts of its pyramid, and their words are ours.
    Returns:
        Statement.
    Raises:
        PrivacyError: there is no ledger; the ledgers protect different units; no delta is known; or a budget holds the
            releases of a ledger. Its statement is `budget_statement`.
    Privacy:
        It holds public numbers only.
    """
    records = [one if isinstance(one, Ledger) else Ledger(one, read_only=True) for one in ledgers]
    return written(ledger_facts(records, delta), about, appendix)


def budget_statement(
    budget: Budget, *, about: About | None = None, appendix: Literal["nist"] | None = None
) -> Statement:
    """Return a statement on everything that is committed in a budget, whether it was released already or not.

    Privacy:
        As `statement`, whose `about` and `appendix` it takes.
    """
    return written(budget_facts(budget), about, appendix)


def written(facts: Facts, about: About | None = None, appendix: str | None = None) -> Statement:
    """Return the statement that says some facts."""
    found = dict[str, list[str]]()
    lines: list[str] = []
    texts = [template(f"{name}.txt.j2").render(facts=facts) for name in ("statement", appendix) if name is not None]
    for line in "\n".join(texts).splitlines():
        if line.startswith("# "):
            lines = found[line[2:]] = []
        elif line.startswith("- "):
            lines.append(line[2:].strip())
        elif line.strip():
            lines[-1] += f" {line.strip()}"
    sections = (Section(name, tuple(" ".join(one.split()) for one in said)) for name, said in found.items())
    return Statement(tuple(sections), facts.numbers, about or About())


def public_facts(ledger: Ledger) -> dict[str, Any]:
    """Return the numbers of a ledger's plan, without the name of a commitment, which may be a path of the machine."""
    return {name: fact for name, fact in ledger.plan_facts.items() if name != "commitment"}


@cache
def template(name: str) -> "jinja2.Template":
    """Return a template of this folder, with its filters."""
    import jinja2  # here, because `import privgrad` does not need it

    environment = jinja2.Environment(
        autoescape=name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,  # a fact that is missing must not become an empty word
        loader=jinja2.PackageLoader("privgrad", "statement"),
    )
    filters: dict[str, Callable[[Any], Any]] = {
        "beside": released_beside,
        "exp": math.exp,
        "has_random_runs": has_random_runs,
        "is_finite": math.isfinite,
        "number": "{:,}".format,
        "percent": lambda share: f"{rounded_up(100 * share, 3)}%",
        "percent_down": lambda share: f"{math.floor(1000 * share) / 10:g}%",
        "plain": _plain,
        "short": _short,
        "up": rounded_up,
        "words": words_of,
    }
    environment.filters.update(filters)
    return environment.get_template(name)


def _plain(bound: float, digits: int = 6) -> str:
    """Return an upper bound as people write it: 0.00001, and not 1e-05."""
    shown = rounded_up(bound, digits)
    return f"{Decimal(shown):,f}" if bound > 1e-10 else shown


def _short(value: object) -> str:
    """Return a number of a plan with four digits; a report has a text in the place of several."""
    return "not recorded" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)
