"""Flower's protocol for accountants, kept by a ledger: `privgrad.integrations.flower` exports it."""

import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

import numpy as np
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, PrivacySpent, SamplingMethod
from flwr.serverapp.exception import PrivacyBudgetExhausted

from privgrad.accounting.accountant import epsilon, steps_for_budget
from privgrad.accounting.mechanisms import Release, mechanisms_of
from privgrad.errors import (
    BudgetExceededError,
    expected,
    readable,
    require_choice,
    require_integer,
    require_nonnegative,
)
from privgrad.ledger.ledger import Ledger
from privgrad.plan import PrivacyPlan
from privgrad.types import User

# The strategy adds the noise, and Flower's wrappers do so by numpy.random.normal.
_GENERATOR = "the strategy's own generator (in Flower's wrappers numpy's, which is not cryptographic)"


class LedgerAccountant:
    """An accountant for Flower's strategies, by PLD, whose record is a ledger: an implementation of PrivacyAccountant.

        config = PrivacyConfig(1e-5, 20, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION, 10.0)
        accountant = LedgerAccountant(config, "ledger.jsonl", rounds=20)
        strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 2.4, 1.0, 20, accountant=accountant)

    A restarted server opens the same ledger, with its charges; `load_state_dict` is not needed. It is for
    strategies that add the noise themselves. `PrivateStrategy` has a ledger of its own.

    Args:
        config: of flwr.serverapp. Delta, the population, how its members are drawn, and the budget `max_epsilon`.
        ledger: path of the ledger's file, or a Ledger; None keeps it in memory.
        rounds: the planned number of releases, >= 1, which the statement names. None: as many as max_epsilon allows.
        user: what a member of the population is, as in PrivacyPlan: "site" for hospitals.
    Raises:
        PrivacyError: samples of a fixed size; a ledger of another configuration, or that a running server has locked;
            an event of another population, or of other noise or size than those before it.
        BudgetExceededError: (in compose) the releases would cost more than max_epsilon, or are more than rounds.
    Privacy:
        `compose` returns once the charge is on disk. When it raises, nothing may be released. It counts the
        given events: whether clipping, noise and sampling are as an event says is up to the strategy.
    """

    def __init__(
        self,
        config: PrivacyConfig,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        *,
        rounds: int | None = None,
        user: User = "person",
    ) -> None:
        method = config.sampling_method
        remedy = "train by PrivateStrategy, which draws Poisson cohorts, or take flwr's RdpAccountant"
        if method is SamplingMethod.WITHOUT_REPLACEMENT:
            raise expected("LedgerAccountant", "sampling_method", "to be poisson or no-amplification", method, remedy)
        require_integer("LedgerAccountant", "rounds", 1 if rounds is None else rounds, 1)
        self._config, self._rounds = config, rounds
        require_choice("LedgerAccountant", "user", user, get_args(User))
        self._user: User = user
        self._stream = secrets.token_hex(4)  # no two ledgers share a draw
        self.ledger = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
        if facts := self.ledger.plan_facts:
            try:
                self._bind(self._event(facts, config.population_size))
            except BaseException:
                if self.ledger is not ledger:  # nobody else could close it
                    self.ledger.close()
                raise

    @property
    def config(self) -> PrivacyConfig:
        """The configuration."""
        return self._config

    @property
    def num_releases(self) -> int:
        """The number of releases that the ledger holds, those of earlier processes included."""
        return self.ledger.releases

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Charge one or more releases, durably and before they are made; errors and privacy as of the class."""
        require_integer("LedgerAccountant.compose", "count", count, 1)
        self._bind(event)
        after, most = self.num_releases + count, self._most(event)
        condition = f"to be at most {most}, by rounds and max_epsilon = {self._config.max_epsilon}"
        remedy = "stop here, without this release"
        if after > most:
            raise expected("LedgerAccountant.compose", "releases", condition, after, remedy, BudgetExceededError)
        for _ in range(count):
            draw = f"{self._stream}:{self.num_releases}"
            self.ledger.charge(self._release(event), draw=draw, limit=after if most == math.inf else int(most))

    def get_epsilon(self, delta: float) -> float:
        """Return the epsilon of all releases at this delta, by PLD."""
        return self.ledger.epsilon(delta=delta)

    def get_delta(self, epsilon: float) -> float:
        """Return an upper bound on the delta of all releases at this epsilon, by PLD."""
        from privgrad.accounting.composition import profile_of

        require_nonnegative("LedgerAccountant.get_delta", "epsilon", epsilon)
        if not self.num_releases:
            return 0.0
        if (found := profile_of(mechanisms_of("get_delta", self.ledger.charged))) is None:
            return 1.0
        # Delta is a convex function of e^epsilon, so its chords lie above it.
        return float(np.interp(math.exp(min(epsilon, 700.0)), np.exp(found[0]), found[1]))

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """Return epsilon, delta and the number of all releases."""
        delta = self._config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(delta), delta, self.num_releases, "pld")

    def would_exceed(self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1) -> bool:
        """Return whether so many further releases would cost more than max_epsilon.

        Raises:
            PrivacyBudgetExhausted: they are more than `rounds`. Flower's wrappers would name max_epsilon in its place.
        """
        require_integer("LedgerAccountant.would_exceed", "count", count, 1)
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        after = [*self.ledger.charged, replace(self._release(event), count=count)]
        if self._rounds is not None and self.num_releases + count > self._rounds:
            raise PrivacyBudgetExhausted(f"All {self._rounds} planned rounds are released: stop here.")
        return limit is not None and epsilon(after, delta=self._config.target_delta) > limit

    def state_dict(self) -> dict[str, object]:
        """Return the configuration and the charges, which JSON can hold, as flwr's RdpAccountant does."""
        config = {name: getattr(value, "value", value) for name, value in vars(self._config).items()}
        facts, held = self.ledger.plan_facts, list[dict[str, object]]()
        if self.num_releases:
            held = [{"event": vars(self._event(facts)), "count": self.num_releases}]
        state = {"schema_version": 1, "backend": "privgrad", "config": config, "compositions": held}
        return {**state, "head": self.ledger.head}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Check that the ledger holds the charges of a state; an empty ledger takes them over.

        So a training that began with flwr's RdpAccountant keeps the charges of its state.

        Raises:
            PrivacyError: a state of another configuration, or of charges that this ledger does not know.
        """
        function, given = "LedgerAccountant.load_state_dict", cast("dict[str, Any]", state)
        with readable(function, "state", "to be an accountant's state_dict", "load one that state_dict returned"):
            config: dict[str, Any] = dict(given["config"])
            config["neighboring_relation"] = NeighboringRelation(config["neighboring_relation"])
            config["sampling_method"] = SamplingMethod(config["sampling_method"])
            same = PrivacyConfig(**config) == self._config
            held = [(GaussianPrivacyEvent(**one["event"]), int(one["count"])) for one in given["compositions"]]
        if not same:
            raise expected(function, "the state's config", f"to be {self._config}", config)
        count = sum(number for _, number in held)
        if self.num_releases == 0:
            for event, _ in held:  # all of one kind, before the first is charged
                self._bind(event)
            if held:
                self.compose(held[0][0], count)
        elif not self.ledger.went_through(str(given.get("head", ""))):
            got = f"{count} releases that {self.ledger.path or 'a ledger in memory'} does not hold"
            remedy = "give the ledger's path of that run and load no state, or load it into a new ledger"
            raise expected(function, "state", "to be of this ledger", got, remedy)

    def _most(self, event: GaussianPrivacyEvent) -> float:
        """Return the most releases of this kind that rounds and max_epsilon allow; infinite without either."""
        found = math.inf if self._rounds is None else self._rounds
        if (cap := self._config.max_epsilon) is None:
            return found
        delta, kind = self._config.target_delta, self._release(event)
        if epsilon([kind], delta=delta) > cap:
            return 0
        sigma, rate = kind.noise_multiplier, kind.sample_rate
        return min(found, steps_for_budget(target_epsilon=cap, delta=delta, sample_rate=rate, noise_multiplier=sigma))

    def _release(self, event: GaussianPrivacyEvent) -> Release:
        is_drawn = self._config.sampling_method is SamplingMethod.POISSON
        rate = event.sample_size / event.population_size if is_drawn else 1.0
        return Release(float(event.noise_multiplier), rate)

    def _event(self, facts: Mapping[str, Any], population: int | None = None) -> GaussianPrivacyEvent:
        """Return the event that a ledger's facts record."""
        sigma, size = facts["noise_multiplier"], facts["expected_batch_size"]
        return GaussianPrivacyEvent(sigma, size, population or facts["num_examples"])

    def _bind(self, event: GaussianPrivacyEvent) -> None:
        """Write the public numbers to a new ledger, or require that the ledger holds the same ones."""
        config, release = self._config, self._release(event)
        if event.population_size != config.population_size:
            raise expected(
                "LedgerAccountant", "population_size", f"to be {config.population_size}", event.population_size
            )
        # The plan checks the numbers together; the ledger then records the event's.
        plan = PrivacyPlan(
            sample_rate=release.sample_rate,
            steps=1,
            expected_batch_size=event.sample_size if release.sample_rate < 1 else config.population_size,
            noise_multiplier=release.noise_multiplier,
            max_grad_norm=1.0,
            num_examples=config.population_size,
            delta=config.target_delta,
            privacy_unit="user",
            user=self._user,
        )
        own = {"expected_batch_size": event.sample_size, "max_grad_norm": None, "noise_generator": _GENERATOR}
        most = {"max_epsilon": config.max_epsilon, "rounds": self._rounds}  # a change of either needs another ledger
        self.ledger.bind({**plan.public_facts, **own, "research_seed": False, **most})
