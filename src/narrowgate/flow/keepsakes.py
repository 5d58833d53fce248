"""What a forward keeps for its next call while it runs on shapes alone is taken away from it again.

A table of positions in an ``lru_cache``, a dictionary or an attribute of a class would be handed to the user's own
model ever after, without numbers.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor

from narrowgate.flow.unknown import has_numbers

_CACHE = type(functools.lru_cache(len))
_CHECK = "_detect_attribute_assignment"
_LARGEST = 10_000  # a dictionary of more entries is a table of something else


@contextmanager
def nothing_kept(model: nn.Module) -> Iterator[None]:
    """Take away what code keeps in between: of tensors without numbers, all that were not there before.

    Modules get back all of their attributes: beside a table there may be the size that it was made for, by which the
    next call decides whether it needs another one.
    """
    places = [(place, dict(vars(place))) for place in _places(model)]
    inside = [
        (value, value.copy())
        for _, before in places
        for value in list(before.values())
        if type(value) in (dict, list) and len(value) < _LARGEST
    ]
    found = (cache for _, before in places for value in before.values() for cache in _caches(value))
    caches = [(cache, cache.cache_info().misses) for cache in dict.fromkeys(found)]
    try:
        with _no_check_of_exports():
            yield
    finally:
        for cache, misses in caches:
            if cache.cache_info().misses != misses and any(map(_is_empty, gc.get_referents(cache))):
                cache.cache_clear()
        for container, was in inside:
            _restore_container_(container, was)
        for place, before in places:
            if isinstance(place, nn.Module):
                vars(place).clear()
                vars(place).update(before)
            else:
                put, remove = functools.partial(setattr, place), functools.partial(delattr, place)
                _restore_(dict(vars(place)), before, put, remove)


@contextmanager
def _no_check_of_exports() -> Iterator[None]:
    """Without export's own look at what modules keep: that of PyTorch 2.6 raises, and newer ones only warn."""
    from torch.export import _trace

    check = getattr(_trace, _CHECK, None)
    if check is not None:
        setattr(_trace, _CHECK, _attributes_kept)
    try:
        yield
    finally:
        if check is not None:
            setattr(_trace, _CHECK, check)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Attributes of all modules are what they were before, as behind export's own check."""
    kept = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, before in kept:
            vars(module).update(before)


def _places(model: nn.Module) -> Iterator[Any]:
    """Modules, their classes, the files that these are in and what those import: all but PyTorch's own."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if not _is_known(kind.__module__)}
    files = {kind.__module__ for kind in kinds}
    for name in [name for name in files if name in sys.modules]:
        for value in list(vars(sys.modules[name]).values()):
            source = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(source, str) and source.partition(".")[0] == name.partition(".")[0]:
                files.add(source)
    yield from model.modules()
    yield from kinds
    yield from (sys.modules[name] for name in files if name in sys.modules)


def _is_known(name: str) -> bool:
    """Whether this is code that keeps nothing of a model's."""
    return name.partition(".")[0] in ("torch", "builtins", "narrowgate")


def _caches(value: Any) -> Iterator[Any]:
    """The cache of a function: it may be inside a method, or behind a decorator around it."""
    value = getattr(value, "__func__", value) if isinstance(value, (staticmethod, classmethod)) else value
    if type(value) is _CACHE:
        yield value
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a cell may be empty
                if type(cell.cell_contents) is _CACHE:
                    yield cell.cell_contents


def _restore_container_(container: Any, was: Any) -> None:
    if isinstance(container, list):
        known = set(map(id, was))
        if any(id(one) not in known and _is_empty(one) for one in container):
            container[:] = was
    else:
        _restore_(dict(container), was, container.__setitem__, container.__delitem__)


def _restore_(
    after: dict[Any, Any], before: dict[Any, Any], put: Callable[[Any, Any], None], remove: Callable[[Any], None]
) -> None:
    """Put back what was in place of tensors without numbers."""
    for key, value in after.items():
        if value is before.get(key) or not _is_empty(value):
            continue
        if key in before:
            put(key, before[key])
        else:
            remove(key)


def _is_empty(value: Any, depth: int = 2) -> bool:
    """Whether something is a tensor without numbers, or holds one."""
    if isinstance(value, Tensor):
        return isinstance(value, FunctionalTensor) or not has_numbers(value)
    if depth and type(value) in (dict, list, tuple) and len(value) < _LARGEST:
        return any(_is_empty(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value))
    return False
