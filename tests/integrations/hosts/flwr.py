"""What becomes, under PrivateStrategy and client_app, of Strategy's methods, ClientApp's and FedAvg's arguments."""

import inspect

from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

_COHORT = "refused: give the plan num_users and expected_cohort_size"
_EVALUATE = "refused: evaluate on public data with start's evaluate_fn"

FATES: dict[str, str] = {
    "Strategy.aggregate_evaluate": _EVALUATE,
    "Strategy.aggregate_train": "refused: use each round's weights in start's evaluate_fn",
    "Strategy.configure_evaluate": _EVALUATE,
    "Strategy.configure_train": "taken: in a subclass that calls super().configure_train",
    "Strategy.start": "taken",
    "Strategy.summary": "taken",
    "Strategy.start.evaluate_config": "no effect by design: no client is asked to evaluate",
    "Strategy.start.evaluate_fn": "taken: for public data",
    "Strategy.start.grid": "taken",
    "Strategy.start.initial_arrays": "taken: loaded into the model",
    "Strategy.start.num_rounds": "taken: more than plan.steps are refused",
    "Strategy.start.timeout": "taken: later replies do not count",
    "Strategy.start.train_config": "taken",
    "ClientApp.client_fn": "no effect by design: its replies are errors, which the server counts",
    "ClientApp.evaluate": "no effect by design: the strategy sends no such messages",
    "ClientApp.lifespan": "taken",
    "ClientApp.mods": "taken: in your own app, whose train function calls client_app's",
    "ClientApp.query": "no effect by design: the strategy sends no such messages",
    "ClientApp.train": "taken: in your own app, which replies with w - w_last",
    "FedAvg.arrayrecord_key": "refused: leave it out: the record is 'arrays'",
    "FedAvg.configrecord_key": "refused: leave it out: the record is 'config'",
    "FedAvg.evaluate_metrics_aggr_fn": _EVALUATE,
    "FedAvg.fraction_evaluate": _EVALUATE,
    "FedAvg.fraction_train": _COHORT,
    "FedAvg.min_available_nodes": _COHORT,
    "FedAvg.min_evaluate_nodes": _EVALUATE,
    "FedAvg.min_train_nodes": _COHORT,
    "FedAvg.train_metrics_aggr_fn": "refused: name the numbers in raw_metrics",
    "FedAvg.weighted_by_key": "refused: leave it out: all users have the same weight",
}


def names() -> set[str]:
    """The installed Flower's: what a subclass may override, and the arguments that a user may look for."""
    found = {f"{host.__name__}.{name}" for host in (Strategy, ClientApp) for name in dir(host) if name[0] != "_"}
    found |= {f"Strategy.start.{name}" for name in inspect.signature(Strategy.start).parameters if name != "self"}
    return found | {
        f"{host.__name__}.{name}" for host in (ClientApp, FedAvg) for name in inspect.signature(host).parameters
    }
