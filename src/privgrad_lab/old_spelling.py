"""The spelling of experiments before tables were calls: it is refused with the new one, and can be rewritten.

Until then, `name` and `rule` stood for `use`. The optimizer's options, its rate and the values to try were keys of the
method. This file can go when nobody has such files any more.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from privgrad.errors import expected

Raw = dict[str, Any]
_CALLS = ("perturb", "precondition", "adaptive_clip", "filter")
_OF_OPTIMIZER = ("lr", "noise_step", "options", "tune")  # keys of a method that are options of its optimizer now
_WIDTH = ("language-model", "resnet9", "word-lstm")  # their `hidden` is called width
_ACTIVATED = ("cnn-small", "cnn5", "mlp")  # only these models used `activation`


def refuse(raw: Mapping[str, Any], path: object) -> None:
    """Raise PrivacyError, with the new spelling, for the first table in the old one."""
    for place, table, new in _tables(raw):
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


def _tables(raw: Mapping[str, Any]) -> Iterator[tuple[str, Raw, Raw]]:
    """Yield each table that may have the old spelling: its place, as it is, and in the new spelling."""
    new = _modern(raw)
    for name in _parts(raw):
        yield name, raw[name], new[name]
    methods: Any = raw.get("methods")
    for index, method in enumerate(methods if isinstance(methods, list) else []):
        if isinstance(method, dict):
            yield f"methods.{method.get('name', '')}", method, new["methods"][index]


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


def to_toml(value: Any) -> str:
    """Return a value as TOML on one line; a call without arguments is a name."""
    if isinstance(value, bool):
        return f"{value}".lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, dict):
        if list(value) == ["use"]:
            return to_toml(value["use"])
        items = (
            f"{key if re.fullmatch('[A-Za-z0-9_-]+', key) else json.dumps(key)} = {to_toml(one)}"
            for key, one in value.items()
        )
        return f"{{ {', '.join(items)} }}" if value else "{}"
    return f"{value}".replace("e-0", "e-")


class _Statement(NamedTuple):
    """A key with its value, or the header of a table, with the lines of comment and space before it."""

    before: list[str]
    lines: list[str]
    key: str  # "" for a header

    @property
    def comments(self) -> list[str]:
        """The comments at the ends of the lines."""
        found: list[str] = []
        whole = tomllib.loads("\n".join(self.lines))
        for index, line in enumerate(self.lines):
            for place in (match.start() for match in re.finditer("#", line)):
                without = [*self.lines[:index], line[:place], *self.lines[index + 1 :]]
                with suppress(tomllib.TOMLDecodeError):
                    if tomllib.loads("\n".join(without)) == whole:
                        found.append(line[place:])
                        break
        return found


def rewritten(text: str) -> str:
    """Return the text of a TOML file in the new spelling, with its comments; tables in the new spelling stay."""
    statements, rest = _statements(text)
    groups: list[list[_Statement]] = [[]]  # what comes before the first header, then one for each table
    for statement in statements:
        if not statement.key and not _continues(statement, groups[-1]):
            groups.append([])
        groups[-1].append(statement)
    return "\n".join([line for group in groups for line in _group(group)] + rest).rstrip("\n") + "\n"


def _statements(text: str) -> tuple[list[_Statement], list[str]]:
    found: list[_Statement] = []
    before: list[str] = []
    lines: list[str] = []
    for line in text.splitlines():
        if not lines and (not line.strip() or line.lstrip().startswith("#")):
            before.append(line)
            continue
        lines.append(line)
        try:
            parsed = tomllib.loads("\n".join(lines))
        except tomllib.TOMLDecodeError:  # the next line belongs to the value too
            continue
        is_header = line.lstrip().startswith("[") and len(lines) == 1
        found.append(_Statement(before, lines, "" if is_header else next(iter(parsed))))
        before, lines = [], []
    return found, before + lines


def _header(statement: _Statement) -> tuple[str, ...]:
    """Return the path of the table that a header opens; an array of tables ends in "[]"."""
    path, table = list[str](), tomllib.loads("\n".join(statement.lines))
    while table:
        key = next(iter(table))
        path.append(key)
        table = table[key]
        if isinstance(table, list):
            path.append("[]")
            break
    return tuple(path)


def _continues(statement: _Statement, group: list[_Statement]) -> bool:
    """Return whether a header is of a table inside the method, or the features, of the group."""
    opened = _header(group[0]) if group and not group[0].key else ()
    path = _header(statement)
    return opened[:1] in (("methods",), ("features",)) and path[:1] == opened[:1] and path != ("methods", "[]")


def _group(group: list[_Statement]) -> list[str]:
    verbatim = [line for statement in group for line in (*statement.before, *statement.lines)]
    text = "\n".join(line for statement in group for line in statement.lines)
    raw = tomllib.loads(text)
    path = _header(group[0]) if group and not group[0].key else ()
    if path[:1] == ("data",) and path[1:] in ((), ("elsewhere",)):
        raw = {"data": raw["data"].get("elsewhere", {}) if path[1:] else raw["data"]}
    old = next(((table, new) for _, table, new in _tables(raw) if table != new), None)
    if old is None:
        return verbatim
    if not path:  # tables in one line at the top of the file
        return _lines(group, raw, _modern(raw))
    return [*group[0].before, *group[0].lines, *_lines(group[1:], *old)]


def _lines(statements: list[_Statement], old: Raw, new: Raw) -> list[str]:
    """Return the lines of a table: keys with the same value as they were, the other ones together, a line each."""
    changed = [key for key, value in new.items() if key not in old or old[key] != value]
    kept: list[str] = []
    inner: list[str] = []  # tables with a header of their own come last
    above: list[str] = []
    at_end: list[str] = []
    place, table = None, ""
    for statement in statements:
        if not statement.key:
            table = next(name for name in _header(statement)[1:] if name != "[]")
        if (table or statement.key) in new.keys() - set(changed):
            (inner if table else kept).extend((*statement.before, *statement.lines))
        else:
            place = len(kept) if place is None else place
            above += [line for line in statement.before if line.strip()]
            at_end += statement.comments
    made = [f"{key} = {to_toml(new[key])}" for key in changed]
    if len(made) == len(at_end) == 1:
        made[0] += f" {at_end.pop()}"
    kept[place:place] = above + at_end + made
    return kept + inner
