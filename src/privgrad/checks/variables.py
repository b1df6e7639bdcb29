"""Remember what loss_fn and the model can read and write besides the modules, and undo what passes write to it.

These are variables of closures and globals, defaults, arguments of partials, attributes of functions and classes, and
objects of the user's own classes.
"""

import builtins
import copyreg
import dis
import operator
import sys
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import chain, islice, pairwise
from numbers import Number
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from privgrad.errors import PrivacyError, expected
from privgrad.gradient.functional import (
    ABSENT,
    CONTAINERS,
    SCALARS,
    TENSORS,
    VALUES,
    Contents,
    Structure,
    copy_of,
    equal,
    held_in,
    named_modules,
    own_parameters,
    same,
    spectral_norms,
    version_of,
)

_ITEMS, _NODES = 200, 2000  # most objects of one container; of all that is read at one time
_COPIED = 2**17  # the largest size of a tensor that is copied
_SMALL = 64  # most entries of a tensor whose values are read
DEPTH = 3  # of functions in the closures and arguments of functions
_CHECKS, _EVERY = 8, 50  # checks after changes of a number between steps: at once, and one more in so many steps
_CODE = (FunctionType, MethodType, partial, type, ModuleType, nn.Module)
_HELD = (MethodType, partial, nn.Module)  # what they hold has places of its own
_PARTS = (FunctionType, staticmethod, classmethod, property)  # of a class; a pass does not set them
_LOGGED = frozenset({"append", "extend", "add", "update"})  # calls that read nothing of their object
_KEY = "[#"  # begins a key that the code does not name: it may be private, so that no message shows it


class Variable(NamedTuple):
    """A place that holds a value: an entry of a dict, or an attribute, such as the contents of a closure's cell."""

    path: str
    holder: Any
    key: Any

    def get(self) -> Any:
        """Return the value; `ABSENT` if there is none."""
        try:
            is_entry = isinstance(self.holder, dict)
            return self.holder[self.key] if is_entry else getattr(self.holder, self.key)
        except (KeyError, AttributeError, ValueError):  # the last one: an empty cell
            return ABSENT

    def set(self, value: Any) -> None:
        """Replace the value; `ABSENT` removes it."""
        is_entry = isinstance(self.holder, dict)
        if value is ABSENT:
            (operator.delitem if is_entry else delattr)(self.holder, self.key)
        else:
            (operator.setitem if is_entry else setattr)(self.holder, self.key, value)


def references(path: str, function: Any) -> Iterator[Variable]:
    """Yield what a function, a method or a partial holds: its closure, defaults and attributes, or its arguments."""
    if isinstance(function, FunctionType):
        code, defaults = function.__code__, function.__defaults__ or ()
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield Variable(name, cell, "cell_contents")
        for name, default in zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False):
            yield Variable(name, {0: default}, 0)
        for holder, prefix in ((function.__kwdefaults__ or {}, ""), (vars(function), f"{path}.")):
            for name in holder:
                yield Variable(f"{prefix}{name}", holder, name)
        return
    is_method = isinstance(function, MethodType)
    for part in (function.__func__, function.__self__) if is_method else (function.func, *function.args):
        yield Variable(path, {0: part}, 0)
    for name in () if is_method else function.keywords:
        yield Variable(name, function.keywords, name)


class Scope(Contents):
    """The variables that the code of a model and its loss_fn reads, found by a walk over that code."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.variables = list[Variable]()  # those that nothing else watches
        # Those of the model's modules, which the engines and `functional.preserved` watch.
        self.buffers, self.attributes = list[Variable](), list[Variable]()
        self.code = list[Variable]()  # places that hold code
        self.names, self.texts = set[str](), set[str]()  # in that code; attributes with other names do not count
        self.parameters = dict[int, str]()  # the paths of parameters outside of the model, by id
        self.outside = list[nn.Module]()  # all modules outside of the model, such as those of a teacher
        # The buffers' paths by id; other objects may hold them too.
        self.watched = {id(x): f"model.{name}" for name, x in model.named_buffers()}
        modules = list(named_modules(model, "model"))
        self._own = {id(module) for _, module in modules}
        known = -1
        while len(self.names) > known:  # a method that was found may name others
            known = len(self.names)
            for found in (self.seen, self.variables, self.buffers, self.attributes, self.code, self.outside):
                found.clear()
            self.read([self._kept(Variable("loss_fn", {0: loss_fn}, 0)), *modules])

    def _kept(self, variable: Variable, found: list[Variable] | None = None) -> tuple[str, Any]:
        """Keep a place unless it holds code; return what to visit."""
        value: Any = variable.get()
        # A pass may give attributes to a function or a class of the user's, which it knows by a name.
        has_attributes = variable.key != 0 and _has_own_attributes(value)
        is_code = isinstance(value, _CODE)
        if has_attributes or not is_code:
            (self.variables if found is None else found).append(variable)
        if is_code and variable.key != 0:
            self.code.append(variable)
        return variable.path, variable.get()

    def inside(self, label: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Keep the variables of code, and yield what to visit in it, or in an object or a container."""
        if isinstance(value, type):
            yield from self._of_class(value)
        if id(value) in self.seen or isinstance(value, ModuleType | Tensor | str):
            return
        self.seen.add(id(value))
        if isinstance(value, FunctionType):
            own = _is_own(value.__module__)
            if not own and not (value.__module__ or "").startswith("privgrad"):
                return
            names, texts, reads = _named_by(value.__code__)
            self.names |= names
            self.texts |= texts
            found = reads - vars(builtins).keys() if own else ()
            yield from (self._kept(Variable(name, value.__globals__, name)) for name in found)
        if isinstance(value, FunctionType | MethodType | partial):
            # A log in a closure is not read.
            read = (x for x in references(label, value) if x.key != "cell_contents" or x.path in self.names)
            yield from map(self._kept, read)
        elif not isinstance(value, type):
            yield from self._of_class(cast("type[Any]", type(value)))
            if isinstance(value, nn.Module):
                yield from self._of_module(label, value)
            for variable in self.contents(label, value):
                if (
                    isinstance(variable.get(), _CODE) and _KEY not in variable.path
                ):  # hooks of the model: see `Structure`
                    self.code.append(variable)
                yield variable.path, variable.get()

    def contents(self, path: str, value: Any) -> Iterator[Variable]:
        """Yield the items of a container, which are no places, or the attributes of an object that the code names."""
        if isinstance(value, dict):
            for number, key in enumerate(list(islice(cast("dict[Any, Any]", value), _ITEMS))):
                named = isinstance(key, str) and key in self.texts
                yield Variable(path + (f"[{key!r}]" if named else f"{_KEY}{number}"), value, key)
        elif isinstance(value, CONTAINERS):
            for number, part in enumerate(list(islice(cast("Iterable[Any]", value), _ITEMS))):
                yield Variable(f"{path}{_KEY}{number}", {0: part}, 0)
        elif _has_own_attributes(value):
            for name in self.names.intersection(cast(Any, vars(value))):
                if not (name.startswith("__") or isinstance(vars(value)[name], _PARTS)):
                    yield Variable(f"{path}.{name}", value, name)
        elif _is_readable(value):
            own, kind = getattr(value, "__dict__", {}), cast(Any, type(value))
            named = {*own} if hasattr(kind, "get_params") else self.names  # an estimator's code is not read
            # A number of the class is the default of an attribute.
            others = {name for name in named.difference(own) if type(getattr(kind, name, None)) in (int, float)}
            for holder, names in ((own, own), (value, others.union(cast(Any, copyreg)._slotnames(kind)))):
                yield from (Variable(f"{path}.{name}", holder, name) for name in named.intersection(names))

    def _of_class(self, owner: type) -> Iterator[tuple[str, Any]]:
        """Keep a class, and yield those of its methods and attributes that some code names."""
        for base in owner.__mro__:
            if id(base) in self.seen or not _is_own(base.__module__):
                continue
            self.seen.add(id(base))
            self.variables.append(Variable(base.__name__, {0: base}, 0))
            for name, part in list(vars(base).items()):
                part = getattr(part, "__func__", getattr(part, "fget", part))
                named = name in self.names or name == "forward" or name.startswith("__")
                if named and name != "__init__" and isinstance(part, FunctionType):
                    yield f"{base.__name__}.{name}", part
            yield from ((variable.path, variable.get()) for variable in self.contents(base.__name__, base))

    def _of_module(self, path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield a module's hooks and objects, and keep its buffers and attributes."""
        own = id(module) in self._own
        watched = own or module.training or _is_own(type(module).__module__)
        for name, value in list(vars(module).items()):
            if name.endswith("_hooks"):
                yield path, value
            elif name == "_buffers" and watched and isinstance(value, dict):  # TorchScript has another type
                for buffer in cast("dict[str, Any]", value):
                    yield self._kept(Variable(f"{path}.{buffer}", value, buffer), self.buffers if own else None)
            elif not name.startswith("_") and (watched or isinstance(value, _CODE)):
                found = self.attributes if own and not _is_readable(value) else None
                yield self._kept(Variable(f"{path}.{name}", vars(module), name), found)
        if not own:
            self.outside.append(module)
            self.parameters |= {id(x): f"{path}.{name}" for name, x in own_parameters(module).items()}
            yield from named_modules(module, path)


class Snapshot(Contents):
    """The values of variables at one time, inside containers and objects too."""

    def __init__(self, scope: Scope, variables: Iterable[Variable], *, copied: Collection[str] | None = ()) -> None:
        super().__init__()
        self._scope, self._copied = scope, copied
        # By path: numbers, texts, copies of tensors, and code; of other tensors their id and count of writes.
        self.values = dict[str, Any]()
        self.places, self.tensors = dict[str, Variable](), dict[int, str]()  # by path; the paths of tensors by id
        self._held, self._writes = list[tuple[Variable, Any]](), list[tuple[Any, Any]]()
        self._forms = list[Collection[Any]]()  # containers: items, keys, or names of attributes
        self.read(map(self._entry, variables))
        self._formed = [*chain.from_iterable(self._forms)]

    def is_current(self) -> bool:
        """Return whether all is as it was; this costs far less than another snapshot."""
        if self.copies:
            return False
        entries, attributes, held, absent, tensors, arrays = self._places
        try:  # without a call for each of them
            now = [holder[key] for holder, key in entries] + [getattr(holder, key) for holder, key in attributes]
        except (KeyError, AttributeError, ValueError):
            return False
        return (
            same(now, held)
            and same([*chain.from_iterable(self._forms)], self._formed)
            and [x._version for x, _ in tensors] == [trace for _, trace in tensors]
            and all(x.get() is ABSENT for x in absent)
            and all(version_of(x) == trace for x, trace in arrays)
        )

    @cached_property
    def _places(self) -> tuple[list[Any], ...]:
        """The places that were read: entries of dicts, attributes, what both held; empty ones; tensors, and arrays."""
        of_entries = [(x, value) for x, value in self._held if isinstance(x.holder, dict) and value is not ABSENT]
        others = [(x, value) for x, value in self._held if not isinstance(x.holder, dict) and value is not ABSENT]
        entries, attributes = ([(x.holder, x.key) for x, _ in found] for found in (of_entries, others))
        held = [value for _, value in (*of_entries, *others)]
        absent = [x for x, value in self._held if value is ABSENT]
        tensors = [(x, trace) for x, trace in self._writes if isinstance(x, Tensor) and not x.is_inference()]
        arrays = [(x, trace) for x, trace in self._writes if not isinstance(x, Tensor)]
        return entries, attributes, held, absent, tensors, arrays

    def _entry(self, variable: Variable) -> tuple[str, Any]:
        value = variable.get()
        self.places[variable.path] = variable
        self._held.append((variable, value))
        return variable.path, value

    def inside(self, label: str, value: Any) -> Iterable[tuple[str, Any]]:
        if isinstance(value, TENSORS):
            self._note(label, value)
        elif type(value) in SCALARS or isinstance(value, VALUES):
            self.values[label] = value
        elif id(value) not in self.seen and len(self.seen) < _NODES and not isinstance(value, _HELD):
            self.seen.add(id(value))
            if isinstance(value, CONTAINERS):
                self.values[label] = range(len(cast("Collection[Any]", value)))  # no number that counts
                if not isinstance(value, tuple | dict):
                    self.containers.append((shown(label), value, held_in(value)))
            else:
                kind = getattr(cast(object, value), "__code__", type(cast(object, value)))
                self.values[label] = value if isinstance(value, Enum | type) else kind
            form = cast(Any, value) if isinstance(value, CONTAINERS) else getattr(cast(Any, value), "__dict__", ())
            self._forms.append(form)
            return map(self._entry, self._scope.contents(label, value))
        return ()

    def _note(self, path: str, value: Any) -> None:
        is_tensor = isinstance(value, Tensor)
        self.tensors[id(value)] = path
        is_trained = isinstance(value, nn.Parameter) and value.requires_grad
        if is_trained or self._scope.watched.get(id(value), path) != path:
            return  # `functional.parameters_kept` watches it, or the loop trains it
        self._writes.append((value, trace := version_of(value)))
        self.values[path] = id(value), trace
        wanted = self._copied is None or shown(path) in self._copied
        if wanted and (value.numel() if is_tensor else value.size) <= _COPIED:
            self.values[path] = copy = copy_of(value)
            self.copies.append((shown(path), value, copy))

    def changed(self, after: "Snapshot") -> set[str]:
        """Return the paths whose values differ in another snapshot, up to a key that the code does not name."""
        if after is self or (not (self.copies or after.copies) and self.values == after.values):
            return set()
        paths = self.values.keys() | after.values.keys()
        return {shown(x) for x in paths if not equal(self.values.get(x, ABSENT), after.values.get(x, ABSENT))}

    def undo_since(self, after: "Snapshot", but: Collection[str] = ()) -> None:
        """Restore all values that differ in a later snapshot, except those of paths in `but`."""
        for path in after.places.keys() - self.places.keys():
            if shown(path) not in but:
                after.places[path].set(ABSENT)
        for variable, value in self._held:
            if shown(variable.path) not in but and variable.get() is not value:
                variable.set(value)
        self.undo(but)


class State:
    """The state besides the modules that passes of one training may change."""

    def __init__(self, loss_fn: Any) -> None:
        self.loss_fn, self.scope = loss_fn, cast("Scope | None", None)
        self.counters = dict[str, Any]()  # how much each step adds to a number; passes see that of the step's begin
        self.overwritten = set[str]()  # what each pass sets again, and no pass reads before
        self.undone = set[str]()  # what passes change without an effect on losses; it keeps its values
        self.unknown = set[str]()  # what else passes have changed, since `scope` was found
        self.changes = 0  # the steps before which the loop has changed something
        self._steps, self._credit, self._warned = 0, float(_CHECKS), set[str]()
        self._last: tuple[Snapshot, Snapshot] | None = None  # variables, and what else the loop may set
        self._others = list[Variable]()
        self._now: Snapshot | None = None  # within a step: the variables as the last pass left them
        self._code = list[Variable](), list[Variable]()  # places of functions: in dicts, and attributes
        self._functions = list[Any]()  # at these places, when the last step began
        self._outside: Structure | None = None  # of the modules outside of the model
        self._place: tuple[object, int] = None, 0

    def learn(self, scope: Scope, counters: dict[str, Any], overwritten: set[str], undone: set[str]) -> None:
        """Take over what a check has found. If all batches before were empty, counters count their steps too."""
        containers = [x for x in scope.attributes if isinstance(x.get(), dict | list | set | deque)]
        tensors = [x for x in scope.attributes if isinstance(x.get(), TENSORS) and x.key in scope.names]
        self._others = [*scope.buffers, *containers, *tensors]
        roots = {path.split("[")[0] for path in counters} | counters.keys()
        scope.variables += [x for x in (*scope.attributes, *scope.buffers) if x.path in roots]
        late = {path: by * self._steps for path, by in counters.items()} if self.scope is None else {}
        self.scope, self.counters, self._last, self._now = scope, counters, None, None
        self.overwritten, self.undone, self.unknown = overwritten, undone, set[str]()
        self._advance(late)
        in_dicts, others = ([x for x in scope.code if isinstance(x.holder, dict) == kind] for kind in (True, False))
        self._code = in_dicts, others
        self._functions = self._functions_now()
        self._outside = Structure(nn.ModuleList(scope.outside)) if scope.outside else None

    @contextmanager
    def kept(self) -> Generator[None]:
        """Undo what a pass changes, except what every pass overwrites; refuse a counter that changed otherwise."""
        if self.scope is None or not self.scope.variables:
            yield
            return
        # The engine gives a pass copies of buffers, so counters there are read within the pass.
        before = self._read(self.scope) if self._now is None or self.counters else self._now
        wrong = list[str]()
        counted = [(path, before.places[path], before.places[path].get()) for path in self.counters]
        for _, place, value in counted:
            if isinstance(value, Tensor):
                place.set(value.clone())  # the engines refuse writes to buffers
        try:
            yield
        finally:
            after = self._read(self.scope, before)
            wrong += [path for path, place, value in counted if amount(value, place.get()) != self.counters[path]]
            changed = before.changed(after) - self.counters.keys() - self.overwritten
            if changed or counted:
                before.undo_since(after, self.overwritten)
            self._now = None if changed or counted or self._now is None else after
            self.unknown |= changed - self.undone
        if wrong:
            raise set_from_examples(wrong)

    def begin_step(self, structure: Structure) -> bool:
        """Return whether a number, text, function or module changed since the last step, so that a check is due.

        It also is if the model has moved to another device or dtype. Warn once of each tensor that was written or
        replaced since; but not of those that a move of the model replaced.
        """
        self._now = None
        place, last = _place_of(structure), self._last
        if self.scope is None or last is None or self._place[0] != place[0]:
            self.changes += 1  # not known
            due = self.scope is not None and last is not None and self._credit >= 1
            self._credit -= due
            return due
        self._now, _ = both = self._both(self.scope)
        changed = {path for then, now in zip(last, both, strict=True) for path in then.changed(now)}
        changed -= self.overwritten | self.counters.keys()
        if changed and self._place[1] != place[1]:  # `.to()` replaces buffers
            then, found = last[0].values | last[1].values, both[0].values | both[1].values
            pairs: list[Any] = [
                (path, value, then.get(path)) for path, value in found.items() if path.startswith("model.")
            ]
            changed -= {shown(x) for x, value, old in pairs if type(value) is type(old) is tuple and value[0] != old[0]}
        before, self._functions = self._functions, self._functions_now()
        is_other = not same(before, self._functions)
        switched = is_other and _codes(before) != _codes(self._functions)
        at = zip(chain(*self._code), before, self._functions, strict=True) if is_other else ()
        replaced = {
            shown(x.path) for x, old, new in at if old is not new and not same(_tensors_of(old), _tensors_of(new))
        }
        if self._outside is not None:
            before = self._outside.modules
            switched |= self._outside.follow().modules is not before  # it has read them again
        if not (changed or switched or replaced):
            return False
        self.changes += 1
        now, places = both[0].values | both[1].values, both[0].places | both[1].places
        tensors = changed & {shown(path) for path, value in now.items() if isinstance(value, tuple | Tensor)}
        due = (switched or bool(changed - tensors)) and self._credit >= 1  # a loop may set a number at every step
        self._credit -= due
        tensors |= replaced
        if tensors - self._warned:
            # The vectors of spectral norms follow the weights.
            vectors = {id(vector) for _, _, both in structure.once(spectral_norms) for vector in both}
            values = {path: places[path].get() for path in tensors if path in places}
            public = {path for path, x in values.items() if id(x) in vectors or getattr(x, "ndim", 1) == 0}
            if names := sorted(tensors - self._warned - public)[:5]:
                what = f"{', '.join(names)} changed between two steps. If it was computed from a private batch outside"
                effect = "it is private, and enters all later gradients without clipping and noise"
                warnings.warn(f"{what} of private_grad, {effect}", stacklevel=2)
            self._warned |= tensors
        return due

    def _functions_now(self) -> list[Any]:
        in_dicts, others = self._code
        try:  # without a call for each of them
            return [holder[key] for _, holder, key in in_dicts] + [getattr(holder, key) for _, holder, key in others]
        except (KeyError, AttributeError, ValueError):
            return [x.get() for x in (*in_dicts, *others)]

    def held(self) -> list[tuple[Variable, Any]]:
        """Return the places of code and objects that passes read and do not set, and what they hold now."""
        if self.scope is None:
            return []
        found = [(place, place.get()) for place in (*self.scope.variables, *self.scope.code)]
        set_by_passes = self.overwritten | self.undone | self.counters.keys()
        others = ((x, value) for x, value in found if value is not None and not isinstance(value, VALUES))
        return [(x, value) for x, value in others if shown(x.path) not in set_by_passes]

    def end_step(self, structure: Structure) -> None:
        """Advance the counters, and remember the state."""
        self._steps += 1
        self._credit += 1 / _EVERY
        self._advance(self.counters)
        self._place = _place_of(structure)
        if self.scope is not None:
            self._last, self._now = self._both(self.scope), None

    def _both(self, scope: Scope) -> tuple[Snapshot, Snapshot]:
        """Return the variables, and what else the loop may set: the last snapshots, where nothing changed."""
        last, others = self._last or (None, None)
        others = others if others and others.is_current() else Snapshot(scope, self._others)
        return self._now or self._read(scope, last), others

    def _read(self, scope: Scope, last: Snapshot | None = None) -> Snapshot:
        return last if last and last.is_current() else Snapshot(scope, scope.variables, copied=self.undone)

    def _advance(self, amounts: Mapping[str, Any]) -> None:
        if self.scope is not None and any(amounts.values()):
            places, self._now = self._read(self.scope).places, None
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
    numbers = type(before) is not bool and isinstance(before, Number) and isinstance(after, Number)
    return cast(Any, after) - cast(Any, before) if numbers else None


def _place_of(structure: Structure) -> tuple[object, int]:
    first = next(iter(structure.trained.values()))
    return (first.device, first.dtype), first.data_ptr()


def _tensors_of(value: Any) -> list[Tensor]:
    """Return what a module without parameters keeps, and a function in its closure or its arguments."""
    if isinstance(value, nn.Module):
        return [] if any(True for _ in value.parameters()) else list(value.buffers())
    is_function = isinstance(value, FunctionType | partial)
    return [x.get() for x in references("", value) if isinstance(x.get(), Tensor)] if is_function else []


def _codes(functions: Iterable[Any]) -> list[object]:
    """Return what each one does; a function that a loop makes again does the same as before, and a module may not."""
    return [id(cast(object, x)) if isinstance(x, nn.Module) else state_of(x, DEPTH) for x in functions]


def state_of(value: object, depth: int) -> object:
    """Return what the configuration sees of a value. Functions of one code are equal."""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType | partial):
        parts = (state_of(part.get(), depth - 1) for part in (references("", value) if depth else ()))
        return getattr(cast(object, value), "__code__", partial), *parts
    if isinstance(value, Tensor):
        return nonzero(value)
    if value is None or isinstance(value, bool | str | type | Enum | bytes | range | frozenset | np.bool_):
        return cast(object, value)
    if callable(value):  # a function of C, or an object of a class with __call__
        return type(value), str(getattr(value, "__qualname__", ""))
    return cast(Any, value) != 0 if isinstance(value, Number) else None


def nonzero(value: Tensor) -> object:
    """Return which entries of a small tensor on the CPU are not zero; None for a large one or one that is trained."""
    # A tensor on a GPU is not read, because the CPU would have to wait for it in every step. Other types are those of
    # several processes, for instance.
    plain = type(value) in (Tensor, nn.Parameter) and value.is_cpu and value.layout is torch.strided
    if value.requires_grad or value.numel() > _SMALL or not plain:
        return None
    try:
        return tuple(map(bool, cast("list[object]", value.flatten().tolist()))) if value.dim() else bool(value.item())
    except RuntimeError:  # a quantized type
        return None


def shown(path: str) -> str:
    """Return a path up to the first key that the code does not name."""
    return path.split(_KEY, 1)[0]


def _has_own_attributes(value: Any) -> bool:
    """Return whether this is a function, a class or an imported module of the user's."""
    of_module = isinstance(value, ModuleType) and _is_own(value.__name__)
    return of_module or (isinstance(value, FunctionType | type) and _is_own(value.__module__))


def _is_readable(value: Any) -> bool:
    """Return whether attributes of an object are read: one of the user's classes, or an estimator of scikit-learn."""
    kind = type(cast("object", value))
    is_known = issubclass(kind, SimpleNamespace | Namespace) or hasattr(kind, "get_params")
    return is_known or (not isinstance(value, _CODE) and _is_own(kind.__module__))


@lru_cache(maxsize=4096)
def _is_own(module: str | None) -> bool:
    """Return whether code of this module is the user's: no installed package, and not Python's own."""
    root = (module or "builtins").partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    installed = "site-packages" in file or "dist-packages" in file or root in ("privgrad", "torch")
    return not installed and (root not in sys.stdlib_module_names or root == "__main__")


@lru_cache(maxsize=4096)
def _named_by(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the names, the texts and the globals that a function's code reads, and functions that it makes."""
    names, reads = set[str](), set[str]()
    for one, then in pairwise(dis.get_instructions(code)):
        is_logged = then.opname in ("LOAD_ATTR", "LOAD_METHOD") and then.argval in _LOGGED
        if one.opname.startswith("LOAD_") and isinstance(one.argval, str) and not is_logged:
            names.add(one.argval)
            # An attribute is no global: `batch.x` does not read an x of the training loop.
            reads |= {one.argval} if one.opname == "LOAD_GLOBAL" else set()
    texts = {x for x in code.co_consts if isinstance(x, str)}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more = _named_by(inner)
            names, texts, reads = names | more[0], texts | more[1], reads | more[2]
    return frozenset(names), frozenset(texts), frozenset(reads)
