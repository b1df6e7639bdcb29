"""The spelling of spec.json before tables were calls: records in it are read as those of today.

Until then, `name` and `rule` stood for `use`. The optimizer's options, its rate and the values to try were keys of the
method.
"""

from collections.abc import Mapping
from typing import Any

Raw = dict[str, Any]
_CALLS = ("perturb", "precondition", "adaptive_clip", "filter")
_OF_OPTIMIZER = ("lr", "noise_step", "options", "tune")  # keys of a method that are options of its optimizer now
_WIDTH = ("language-model", "resnet9", "word-lstm")  # their `hidden` is called width
_ACTIVATED = ("cnn-small", "cnn5", "mlp")  # only these models used `activation`


def canonical(raw: Mapping[str, Any]) -> Raw:
    """Return the tables of a spec.json of any version in one form, without values that were defaults of old tables."""
    made = dict(raw) | _parts(raw)
    if isinstance(raw.get("methods"), list):
        made["methods"] = [_method(method) if isinstance(method, dict) else method for method in raw["methods"]]
    for table in (made, *made.get("methods", [])):
        for name, defaults in (("model", {"depth": 1, "activation": "tanh"}), ("local", {"epochs": 1})):
            if isinstance(table.get(name), dict):
                table[name] = {key: value for key, value in table[name].items() if defaults.get(key) != value}
        for name in ("optimizer", *_CALLS):
            if isinstance(table.get(name), str):
                table[name] = {"use": table[name]}
        if isinstance(table.get("features"), dict):
            blocks = [{"use": one} if isinstance(one, str) else one for one in table["features"]["blocks"]]
            table["features"] = table["features"] | {"blocks": blocks}
    return made


def _parts(raw: Mapping[str, Any]) -> Raw:
    made = {"data": _data, "model": _model, "features": _features}
    return {name: new(raw[name]) for name, new in made.items() if isinstance(raw.get(name), dict)}


def _dict(value: Any) -> Raw:
    return value if isinstance(value, dict) else {}


def _renamed(old: Raw, key: str = "name") -> Raw:
    return {("use" if name == key and "use" not in old else name): value for name, value in old.items()}


def _data(old: Raw) -> Raw:
    new = _renamed(old)
    return new | {"elsewhere": _data(new["elsewhere"])} if isinstance(new.get("elsewhere"), dict) else new


def _model(old: Raw) -> Raw:
    new = _renamed(old)
    use = new.get("use")
    if new == old or not isinstance(use, str) or ":" in use:
        return new
    hidden, depth, activation = new.pop("hidden", 64), new.pop("depth", None), new.pop("activation", None)
    given = {"hidden": hidden if use == "mlp" else None, "width": hidden if use in _WIDTH and hidden != 64 else None}
    given |= {"depth": depth if use == "mlp" else None, "activation": activation if use in _ACTIVATED else None}
    return new | {name: value for name, value in given.items() if value is not None}


def _features(old: Raw) -> Raw:
    blocks = old.get("blocks")
    if not isinstance(blocks, list):
        return old
    return old | {"blocks": [_renamed(one) if isinstance(one, dict) else one for one in blocks]}


def _method(old: Raw) -> Raw:
    new = {key: value for key, value in old.items() if key not in _OF_OPTIMIZER}
    for part in _CALLS:
        if "rule" in _dict(old.get(part)):
            table = _renamed(old[part], "rule")
            new[part] = {"use": table.pop("use")} | _dict(table.pop("options", None)) | table
    loose = {key: old[key] for key in ("lr", "noise_step") if key in old} | _dict(old.get("options"))
    values = {("optimizer", name): value for name, value in loose.items()}
    tuned: dict[tuple[str, str], Any] = {}
    for name, tried in _dict(old.get("tune")).items():
        part, _, option = name.rpartition(".")
        tuned[part or "optimizer", option] = tried
    values |= tuned
    if len(parts := dict.fromkeys(part for part, _ in tuned)) > 1:
        new |= {part: new.pop(part, {}) for part in parts}  # values are tried in the order of the tables
    for (part, option), value in values.items():
        table = new.get(part, {})
        new[part] = ({"use": table} if isinstance(table, str) else _dict(table)) | {option: value}
    return new | _parts(old)
