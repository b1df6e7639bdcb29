"""The spelling of experiments before tables were calls: it is refused with the new one, and can be rewritten.

Until then, `name` and `rule` stood for `use`. The optimizer's options, its rate and the values to try were keys of the
method. This file can go when nobody has such files any more.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from privgrad.errors import expected

Raw = dict[str, Any]
_CALLS = ("perturb", "precondition", "adaptive_clip", "filter")
_OF_OPTIMIZER = ("lr", "noise_step", "options", "tune")  # keys of a method that are options of its optimizer now
_WIDTH = ("language-model", "resnet9", "word-lstm")  # their `hidden` is called width
_ACTIVATED = ("cnn-small", "cnn5", "mlp")  # only these models used `activation`


def refuse(raw: Mapping[str, Any], path: object) -> None:
    """Raise PrivacyError, with the new spelling, for the first table in the old one."""
    tables = [(name, raw[name], new) for name, new in _parts(raw).items()]
    listed: Any = raw.get("methods")
    methods = [method for method in listed if isinstance(method, dict)] if isinstance(listed, list) else []
    tables += [(f"methods.{method.get('name', '')}", method, _method(method)) for method in methods]
    for place, table, new in tables:
        if new != table:
            lines = [f"{key} = {to_toml(value)}" for key, value in new.items() if table.get(key) != value]
            old = next(key for key in table if key not in new or table[key] != new[key])
            remedy = f"print the new file by `privgrad doctor {path} --rewrite`"
            got = f"{old} = {to_toml(table[old])}"
            raise expected("load_spec", place, f"to have {', '.join(lines) or 'no such key'}", got, remedy)


def canonical(raw: Mapping[str, Any]) -> Raw:
    """Return the tables of a spec.json of any version in one form, without values that were defaults of old tables."""
    made = _modern(raw)
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


def _modern(raw: Mapping[str, Any]) -> Raw:
    made = dict(raw) | _parts(raw)
    if isinstance(raw.get("methods"), list):
        made["methods"] = [_method(method) if isinstance(method, dict) else method for method in raw["methods"]]
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
    values = {f"optimizer.{name}": value for name, value in loose.items()}
    tuned = {name if "." in name else f"optimizer.{name}": tried for name, tried in _dict(old.get("tune")).items()}
    if len(parts := dict.fromkeys(place.rpartition(".")[0] for place in tuned)) > 1:
        new |= {part: new.pop(part, {}) for part in parts}  # values are tried in the order of the tables
    for place, value in (values | tuned).items():
        part, _, option = place.rpartition(".")
        table = new.get(part, {})
        new[part] = ({"use": table} if isinstance(table, str) else _dict(table)) | {option: value}
    return new | _parts(old)


def to_toml(value: Any) -> str:
    """Return a value as TOML on one line; a call without arguments is a name."""
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, dict):
        if list(value) == ["use"]:
            return to_toml(value["use"])
        keys = (key if re.fullmatch("[A-Za-z0-9_-]+", key) else json.dumps(key) for key in value)
        items = (f"{key} = {to_toml(one)}" for key, one in zip(keys, value.values(), strict=True))
        return f"{{ {', '.join(items)} }}" if value else "{}"
    return f"{value}".replace("e-0", "e-")


# The path of a header of a table; and a comment, after strings.
_HEADER = re.compile(r"\s*\[{1,2}([\w.\"' -]+)\]{1,2}\s*(#.*)?")
_COMMENT = re.compile(r"""^(?:[^"'#\n]|"(?:\\.|[^"\\\n])*"|'[^'\n]*')*(#.*)$""", re.MULTILINE)


def rewritten(text: str) -> str:
    """Return the text of a TOML file in the new spelling. Tables in it stay; other ones begin with their comments."""
    groups: list[list[str]] = [[]]  # what comes before the first header, then the lines of each table
    for line in text.splitlines():
        header = _HEADER.fullmatch(line)
        if header and not header[1].startswith(("methods.", "features.")):  # they belong to the table above
            groups.append([])
            while groups[-2] and re.fullmatch(r"\s*(#.*)?", groups[-2][-1]):
                groups[-1].insert(0, groups[-2].pop())
        groups[-1].append(line)
    return "\n".join(line for group in groups for line in _group(group)).rstrip("\n") + "\n"


def _group(lines: list[str]) -> list[str]:
    raw = tomllib.loads("\n".join(lines))
    new: Any = _modern(raw)
    if new == raw:
        return lines
    first = next((index for index, line in enumerate(lines, start=1) if _HEADER.fullmatch(line)), 0)
    if first and (header := _HEADER.fullmatch(lines[first - 1])):
        for part in header[1].split("."):
            new = new[part.strip(" \"'")]
    keys = [f"{key} = {to_toml(value)}" for key, value in (new[0] if isinstance(new, list) else new).items()]
    return [*lines[:first], *_COMMENT.findall("\n".join(lines[first:])), *keys]
