"""Remember what loss_fn and the model can read and write besides the modules, and undo what their passes write to it.

`functional.preserved` undoes changes of the modules themselves. Here are variables of closures and globals, defaults,
arguments of partials, attributes of functions and classes, and objects of the user's own classes.
"""

import dis
import operator
import sys
import warnings
from collections import deque
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice, pairwise
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from privgrad.errors import PrivacyError, expected
from privgrad.gradient.functional import held_in, named_modules, refill, restore, spectral_norms, version_of

_DEPTH, _ITEMS, _NODES = 6, 200, 2000  # of nested objects; of one container; of all that is read at one time
_COPIED, _SMALL = 2**17, 4096  # the largest size of a tensor that is copied; bytes of an array that each step reads
_CHECKS, _EVERY = 8, 50  # checks after changes of a number between steps: at once, and one more in so many steps
_CODE = (FunctionType, MethodType, partial, type, ModuleType, nn.Module)
_CONTAINERS = (dict, list, tuple, set, deque)
_KEY = "[#"  # begins a key that the code does not name: it may be private, so that no message shows it
_LOGGED = frozenset({"append", "extend", "add", "update"})  # calls that read nothing of their object
_ABSENT = object()


class Variable(NamedTuple):
    """A place that holds a value: an entry of a dict, or an attribute, such as the contents of a closure's cell."""

    path: str
    holder: Any
    key: Any

    def get(self) -> Any:
        """Return the value; `_ABSENT` if there is none."""
        try:
            return self._entries[self.key] if self._entries is not None else getattr(self.holder, self.key)
        except (KeyError, AttributeError, ValueError):  # the last one: an empty cell
            return _ABSENT

    def set(self, value: Any) -> None:
        """Replace the value; `_ABSENT` removes it."""
        entries = self._entries
        if value is _ABSENT:
            delattr(self.holder, self.key) if entries is None else operator.delitem(entries, self.key)
        else:
            setattr(self.holder, self.key, value) if entries is None else operator.setitem(entries, self.key, value)

    @property
    def _entries(self) -> "dict[Any, Any] | None":
        return cast("dict[Any, Any]", self.holder) if isinstance(self.holder, dict) else None


class Scope:
    """The variables that the code of a model and its loss_fn reads, found by a walk over that code.

    Args:
        model, loss_fn: as in PrivateGradient.
    Attributes:
        variables: those that nothing else watches.
        buffers, attributes: those of the model's modules, which the engines and `functional.preserved` watch.
        names, texts: the names and the texts in that code. Attributes of objects with other names do not count.
        watched: the buffers' paths by id; other objects may hold them too.
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.variables, self.buffers, self.attributes = list[Variable](), list[Variable](), list[Variable]()
        self.names, self.texts = set[str](), set[str]()
        self.watched = {id(x): f"model.{name}" for name, x in model.named_buffers()}
        known = -1
        while len(self.names) > known:  # a method that was found may name others
            known = len(self.names)
            for found in (self.variables, self.buffers, self.attributes):
                found.clear()
            modules = list(named_modules(model, "model"))
            self._seen = {id(module) for _, module in modules}
            self._visit("loss_fn", loss_fn, 0)
            for path, module in modules:
                self._of_module(path, module, 0, own=True)

    def _place(self, path: str, holder: Any, key: Any, depth: int, found: list[Variable] | None = None) -> None:
        """Visit the code that a place holds, or keep the place."""
        variable = Variable(path, holder, key)
        value = variable.get()
        if not isinstance(value, _CODE):
            (self.variables if found is None else found).append(variable)
        self._visit(path, value, depth + 1)

    def _visit(self, path: str, value: Any, depth: int) -> None:
        """Visit code, or the code within an object or a container."""
        if id(value) in self._seen or isinstance(value, ModuleType | Tensor | str) or depth > 2 * _DEPTH:
            return
        if isinstance(value, MethodType):
            self._visit(path, value.__func__, depth)
            if id(value.__self__) not in self._seen:
                self._place(path, {0: value.__self__}, 0, depth)
            return
        self._seen.add(id(value))
        if isinstance(value, partial):
            of_partial = cast("partial[Any]", value)
            for part in (of_partial.func, *of_partial.args):
                self._place(path, {0: part}, 0, depth)
            for name in of_partial.keywords:
                self._place(name, of_partial.keywords, name, depth)
        elif isinstance(value, FunctionType):
            self._of_function(path, value, depth)
        elif isinstance(value, type):
            self._of_class(value, depth)
        elif isinstance(value, nn.Module):
            for inner, module in named_modules(value, path):
                self._seen.add(id(module))
                self._of_module(inner, module, depth)
        elif isinstance(value, _CONTAINERS):
            inside = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
            for part in list(islice(inside, _ITEMS)):
                self._visit(path, part, depth + 1)
        elif _is_own(type(value).__module__):
            self._of_class(cast("type[Any]", type(value)), depth)
            for name in self.names & getattr(value, "__dict__", {}).keys():
                self._visit(f"{path}.{name}", vars(value)[name], depth + 1)

    def _of_function(self, path: str, value: FunctionType, depth: int) -> None:
        """Visit what a function of the user's reads; of a function of privgrad, its closure only."""
        own, code = _is_own(value.__module__), value.__code__
        if not own and not (value.__module__ or "").startswith("privgrad"):
            return
        names, texts, reads = _named_by(code)
        self.names |= names
        self.texts |= texts
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            if name in self.names:
                self._place(name, cell, "cell_contents", depth)
        for name in reads & value.__globals__.keys() if own else ():
            self._place(name, value.__globals__, name, depth)
        defaults = reversed(value.__defaults__ or ())
        for name, default in zip(reversed(code.co_varnames[: code.co_argcount]), defaults, strict=False):
            self._place(name, {0: default}, 0, depth)
        for holder, prefix in ((value.__kwdefaults__ or {}, ""), (vars(value), f"{path}.")):
            for name in holder:
                self._place(f"{prefix}{name}", holder, name, depth)

    def _of_class(self, owner: type, depth: int) -> None:
        """Visit the methods and attributes of a class that some code names."""
        for base in owner.__mro__:
            for name, part in list(vars(base).items()) if _is_own(base.__module__) else ():
                part = getattr(part, "__func__", getattr(part, "fget", part))
                path, special = f"{base.__name__}.{name}", name.startswith("__")
                if isinstance(part, FunctionType) and name != "__init__":
                    if special or name == "forward" or name in self.names:
                        self._visit(path, part, depth + 1)
                elif name in self.names and not special:
                    self._place(path, base, name, depth)

    def _of_module(self, path: str, module: nn.Module, depth: int, *, own: bool = False) -> None:
        """Visit a module's class, hooks, objects and attributes; `own`: it is one of the model's."""
        self._of_class(type(module), depth)
        watched = own or module.training or _is_own(type(module).__module__)
        for name, value in list(vars(module).items()):
            if name.endswith("_hooks"):
                self._visit(path, value, depth)
            elif name == "_buffers" and watched and isinstance(value, dict):  # TorchScript has another type
                for buffer in cast("dict[str, Any]", value):
                    self._place(f"{path}.{buffer}", value, buffer, depth, self.buffers if own else None)
            elif not name.startswith("_") and (watched or isinstance(value, _CODE)):
                found = self.attributes if own and not _is_readable(value) else None
                self._place(f"{path}.{name}", vars(module), name, depth, found)


class Snapshot:
    """The values of variables at one time, inside containers and objects too.

    Args:
        scope: what the code reads.
        variables: some of its variables.
        copied: whether to copy small tensors, so that writes which autograd does not count are found and undone.
    Attributes:
        values: numbers and texts by path; of a tensor its identity and count of writes, of a container its length.
        places: the variables by path, inside containers and objects too.
    """

    def __init__(self, scope: Scope, variables: Iterable[Variable], *, copied: bool) -> None:
        self._scope, self._copied = scope, copied
        self.values: dict[str, Any] = {}  # literals, because each pass makes them twice
        self.places: dict[str, Variable] = {}
        self._held: list[tuple[Variable, Any]] = []
        self._lists: list[tuple[str, Any, Any]] = []
        self._copies: dict[str, tuple[Any, Any]] = {}
        self._seen: set[int] = set()
        for variable in variables:
            self._entry(variable, -1)

    def _entry(self, variable: Variable, depth: int) -> None:
        """Read a variable."""
        value = variable.get()
        self.places[variable.path] = variable
        self._held.append((variable, value))
        self._read(variable.path, value, depth + 1)

    def _read(self, path: str, value: Any, depth: int) -> None:
        """Read a value, and what is inside."""
        if value is None or isinstance(value, bool | int | float | str):
            self.values[path] = value
        elif isinstance(value, Tensor):
            if isinstance(value, nn.Parameter) or self._scope.watched.get(id(value), path) != path:
                return  # `functional.parameters_kept` watches it
            self.values[path] = id(value), version_of(value)
            if self._copied and value.numel() <= _COPIED:
                self._copies[path] = value, value.detach().clone()
        elif isinstance(value, np.ndarray):
            array = cast("np.ndarray[Any, Any]", value)
            self.values[path] = id(array), array.tobytes() if array.nbytes <= _SMALL else b""
            if self._copied and array.size <= _COPIED:
                self._copies[path] = array, array.copy()
        elif id(value) in self._seen or depth > _DEPTH or len(self._seen) > _NODES or isinstance(value, _CODE):
            return
        elif isinstance(value, _CONTAINERS):
            container = cast("Collection[Any]", value)
            self._seen.add(id(container))
            self.values[path] = range(len(container))  # no number that counts
            if not isinstance(container, tuple | dict):
                self._lists.append((path, container, held_in(container)))
            for place, part in enumerate(list[Any](islice(cast("Iterable[Any]", container), _ITEMS))):
                if isinstance(container, dict):
                    named = isinstance(part, str) and part in self._scope.texts
                    key = f"[{part!r}]" if named else f"{_KEY}{place}"
                    self._entry(Variable(f"{path}{key}", container, part), depth)
                else:
                    self._read(f"{path}{_KEY}{place}", part, depth + 1)
        elif _is_readable(value):
            self._seen.add(id(value))
            own = getattr(value, "__dict__", {})
            for holder, names in ((own, own), (value, getattr(cast(Any, type(value)), "__slots__", ()))):
                for name in self._scope.names.intersection(names):
                    self._entry(Variable(f"{path}.{name}", holder, name), depth)

    def number(self, path: str) -> Any:
        """Return a value that a pass may count with; of a tensor, the copy."""
        return self._copies[path][1] if path in self._copies else self.values.get(path)

    def changed(self, after: "Snapshot") -> set[str]:
        """Return the paths whose values differ in another snapshot, up to a key that the code does not name.

        With copies in both, tensors are compared by value.
        """
        if self.values == after.values and not self._copies:
            return set()
        found = set[str]()
        for path in self.values.keys() | after.values.keys():
            one, other = self._copies.get(path), after._copies.get(path)
            if one is None or other is None:
                values = self.values.get(path, _ABSENT), after.values.get(path, _ABSENT)
                same = values[0] is values[1] or values[0] == values[1]
            else:
                same = _equal(one[1], other[1])
            if not same:
                found.add(shown(path))
        return found

    def undo(self, after: "Snapshot", but: Collection[str] = ()) -> None:
        """Restore all values that differ in a later snapshot, except those of paths in `but`."""
        for path in after.places.keys() - self.places.keys():
            if shown(path) not in but:
                after.places[path].set(_ABSENT)
        for variable, value in self._held:
            if shown(variable.path) not in but and variable.get() is not value:
                variable.set(value)
        for path, container, held in self._lists:
            now = held_in(container)
            if path not in but and not (len(now) == len(held) and all(map(operator.is_, now, held))):
                refill(container, held)
        for path, (value, copy) in self._copies.items():
            if shown(path) not in but:
                restore(value, copy)


class State:
    """The state besides the modules that passes of one training may change.

    Args:
        loss_fn: the user's own.
    Attributes:
        scope: the variables of the model and loss_fn; None before the first check.
        counters: by path, how much each step adds to a number. Passes see its value at the begin of the step.
        overwritten: paths that each pass sets again, and that no pass reads before.
        undone: paths that passes change without an effect on losses. They keep their values.
        unknown: other paths that passes have changed, since `scope` was found.
    """

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn, self.scope = loss_fn, cast("Scope | None", None)
        self.counters, self.overwritten = dict[str, Any](), set[str]()
        self.undone, self.unknown = set[str](), set[str]()
        self._steps, self._credit, self._warned = 0, float(_CHECKS), set[str]()
        self._last: Snapshot | None = None
        self._place = 0

    def learn(self, scope: Scope, counters: dict[str, Any], overwritten: set[str], undone: set[str]) -> None:
        """Take over what a check has found. If all batches before were empty, counters count their steps too."""
        roots = {path.split("[")[0] for path in counters} | counters.keys()
        scope.variables += [x for x in (*scope.attributes, *scope.buffers) if x.path in roots]
        late = {path: by * self._steps for path, by in counters.items()} if self.scope is None else {}
        self.scope, self.counters, self._last = scope, counters, None
        self.overwritten, self.undone, self.unknown = overwritten, undone, set[str]()
        self._advance(late)

    @contextmanager
    def kept(self) -> Generator[None]:
        """Undo what a pass changes, except what every pass overwrites.

        Raises:
            PrivacyError: the pass has changed a counter by another amount than those of the check.
        """
        if self.scope is None or not self.scope.variables:
            yield
            return
        before, done = Snapshot(self.scope, self.scope.variables, copied=bool(self.undone)), False
        counted = [(path, before.places[path], before.places[path].get()) for path in self.counters]
        for _, place, value in counted:
            if isinstance(value, Tensor):
                place.set(value.clone())  # the engines refuse writes to buffers
        wrong = list[str]()
        try:
            yield
            done = True
        finally:
            after = Snapshot(self.scope, self.scope.variables, copied=bool(self.undone))
            wrong += [path for path, place, value in counted if amount(value, place.get()) != self.counters[path]]
            changed = before.changed(after) - self.counters.keys() - self.overwritten
            if changed or counted:
                before.undo(after, self.overwritten)
            self.unknown |= changed - self.undone
        if done and wrong:
            raise set_from_examples(wrong)

    def begin_step(self, model: nn.Module) -> bool:
        """Return whether a number or text changed since the last step, so that a check is due.

        Warn once of each tensor that was written or replaced since; but not if the model was moved. At most
        _CHECKS + steps / _EVERY checks are due, because a loop may set a number at every step.
        """
        if self.scope is None or self._last is None or self._place != _place_of(model):
            return False
        now = self._seen(self.scope)
        changed = self._last.changed(now) - self.overwritten - self.counters.keys()
        tensors = changed & {shown(path) for path, value in now.values.items() if isinstance(value, tuple)}
        due = bool(changed - tensors) and self._credit >= 1
        self._credit -= due
        if tensors - self._warned:
            vectors = {id(vector) for _, _, both in spectral_norms(model) for vector in both}  # they follow the weights
            values = {path: now.places[path].get() for path in tensors if path in now.places}
            public = {path for path, x in values.items() if id(x) in vectors or getattr(x, "ndim", 1) == 0}
            if names := sorted(tensors - self._warned - public)[:5]:
                warnings.warn(
                    f"{', '.join(names)} changed between two steps. If it was computed from a private batch outside of "
                    "private_grad, it is private, and enters all later gradients without clipping and noise",
                    stacklevel=2,
                )
            self._warned |= tensors
        return due

    def end_step(self, model: nn.Module) -> None:
        """Advance the counters, and remember the state."""
        self._steps += 1
        self._credit += 1 / _EVERY
        self._advance(self.counters)
        self._last, self._place = None if self.scope is None else self._seen(self.scope), _place_of(model)

    def _seen(self, scope: Scope) -> Snapshot:
        """Return what the loop may change between two steps."""
        return Snapshot(scope, (*scope.variables, *scope.buffers), copied=False)

    def _advance(self, amounts: Mapping[str, Any]) -> None:
        """Add amounts to numbers, by path."""
        if self.scope is not None and any(amounts.values()):
            places = Snapshot(self.scope, self.scope.variables, copied=False).places
            for path, by in amounts.items():
                value = places[path].get()
                if isinstance(value, Tensor):
                    with torch.no_grad():
                        value.add_(by)
                else:
                    places[path].set(value + by)


def set_from_examples(paths: Collection[str]) -> PrivacyError:
    """Return the error for state that a pass fits to its examples."""
    names = " and ".join(sorted(paths)[:3])
    remedy = "fit it on public data before training, and only read it in loss_fn and the model"
    return expected("loss_fn", names, "not to be set from private examples", "a pass that sets it", remedy)


def amount(before: Any, after: Any) -> Any:
    """Return by how much a number has changed; None for what is no number. A tensor needs shape ()."""
    if isinstance(before, Tensor) and isinstance(after, Tensor) and before.dim() == after.dim() == 0:
        before, after = before.item(), after.item()
    numbers = isinstance(before, int | float) and isinstance(after, int | float) and not isinstance(before, bool)
    return after - before if numbers else None


def _place_of(model: nn.Module) -> int:
    """Return where the first parameter lies in memory; `model.to` changes it."""
    return next(x.data_ptr() for x in model.parameters())


def shown(path: str) -> str:
    """Return a path up to the first key that the code does not name."""
    return path.split(_KEY, 1)[0]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two tensors or two arrays are equal."""
    if type(one) is not type(other) or not isinstance(one, Tensor):
        return type(one) is type(other) and one.shape == other.shape and one.tobytes() == other.tobytes()
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and bool(((one == other) | ((one != one) & (other != other))).all())


def _is_readable(value: Any) -> bool:
    """Return whether an object is of a class of the user's, whose attributes are read."""
    return isinstance(value, SimpleNamespace) or (not isinstance(value, _CODE) and _is_own(type(value).__module__))


@lru_cache(maxsize=4096)
def _is_own(module: str | None) -> bool:
    """Return whether code of this module is the user's: no installed package, and not Python's own."""
    root = (module or "builtins").partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file or root in ("privgrad", "torch")
    return not installed and (root not in sys.stdlib_module_names or root == "__main__")


@lru_cache(maxsize=4096)
def _named_by(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the names, the texts and the global variables that a function's code reads, and functions that it makes.

    A list that the code only appends to is a log, which it does not read.
    """
    names, reads = set[str](), set[str]()
    for of, then in pairwise((*dis.get_instructions(code), None)):
        is_logged = then is not None and then.opname in ("LOAD_ATTR", "LOAD_METHOD") and then.argval in _LOGGED
        if of is not None and of.opname.startswith("LOAD_") and isinstance(of.argval, str) and not is_logged:
            names.add(of.argval)
            reads |= {of.argval} if of.opname == "LOAD_GLOBAL" else set()
    texts = {x for x in code.co_consts if isinstance(x, str)}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _named_by(inner)
            names, texts, reads = names | more[0], texts | more[1], reads | more[2]
    return frozenset(names), frozenset(texts), frozenset(reads)
