"""Copies of a model that share with it only what they should: hooks and functions of a copy refer to the copy."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

_TAKEN_AS_THEY_ARE = (FunctionType, MethodType, partial, weakref.ref)


def copy_structure(model: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """A deep copy in which some objects, by id, are replaced by others.

    Every module has a dozen empty tables of hooks, and copying those is most of the work: they are made here. Each copy
    is in its module's mode: what torchvision's ``create_feature_extractor`` made is copied in training mode otherwise.
    """
    memo = dict(replaced)
    for module in model.modules():
        for value in vars(module).values():
            if type(value) in (dict, set, OrderedDict) and not value:
                memo[id(value)] = type(value)()
    copied = copy.deepcopy(model, memo)
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in copied.named_modules():
        module.training = modes.get(name, module.training)
    for module in copied.modules():
        _rebind_(vars(module), memo)
    return copied


def _rebind_(table: Any, memo: dict[int, Any], depth: int = 1) -> None:
    """Let functions in a module's tables, as hooks, and weak references refer to the copy of what they referred to."""
    for key, held in table.items() if isinstance(table, dict) else enumerate(table):
        if isinstance(held, _TAKEN_AS_THEY_ARE):
            table[key] = _rebound(held, memo)
        elif depth and type(held) in (dict, list, OrderedDict):
            _rebind_(held, memo, depth - 1)


def _rebound(function: Any, memo: dict[int, Any], depth: int = 3) -> Any:
    """A function with copies in place of what it took along from around its definition; itself if there are none.

    ``copy.deepcopy`` takes functions as they are: a hook that keeps ``self.features`` would go on filling the model's.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, _TAKEN_AS_THEY_ARE):
            return _rebound(value, memo, depth - 1) if depth else value
        return memo.get(id(value), value)

    if isinstance(function, weakref.ref):
        target = moved(function())
        return function if target is function() else weakref.ref(target)
    if isinstance(function, MethodType):
        code, owner = moved(function.__func__), moved(function.__self__)
        same = code is function.__func__ and owner is function.__self__
        return function if same else MethodType(code, owner)
    if isinstance(function, partial):
        named = {key: moved(value) for key, value in function.keywords.items()}
        return partial(moved(function.func), *map(moved, function.args), **named)
    cells = function.__closure__ or ()
    held = [cell.cell_contents for cell in cells if cell != CellType()]  # one may be empty
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if all(moved(value) is value for value in (*held, *defaults, *named.values())):
        return function
    fresh = tuple(cell if cell == CellType() else CellType(moved(cell.cell_contents)) for cell in cells)
    given = tuple(map(moved, defaults)) or None
    made = FunctionType(function.__code__, function.__globals__, function.__name__, given, fresh)
    made.__kwdefaults__ = {key: moved(value) for key, value in named.items()} or None
    made.__dict__.update(function.__dict__)
    return made
