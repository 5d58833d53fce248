"""Take ``fully_shard`` off a model again: PyTorch offers no way back, so this is where its inner parts are touched.

What it leaves on a module are a class in front of the module's own, hooks, and two notes by which it refuses to be
applied twice. All of these are found by where they come from, not by number or order.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_MORE_OF_A_HOOK = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_NOTES = "__composable_api_state_key"


def fsdp() -> Any:
    """The module that has ``fully_shard``, or an error where this PyTorch has none."""
    try:
        from torch.distributed import fsdp as module

        module.fully_shard  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            "this build of PyTorch has no torch.distributed.fsdp.fully_shard; install PyTorch 2.6 or newer, with "
            "support for distributed training"
        ) from error
    return module


def reshard_(model: nn.Module) -> None:
    """Throw away gathered copies, so that every module holds its own part of its parameters."""
    for module in model.modules():
        if isinstance(module, fsdp().FSDPModule):
            module.reshard()


def forget_fsdp_(model: nn.Module) -> None:
    """Make all modules what they were before ``fully_shard``; their parameters must be plain ones already."""
    for module in model.modules():
        _remove_hooks_(module)
        for mark in _MARKS:
            module.__dict__.pop(mark, None)
        if isinstance(module, fsdp().FSDPModule):
            _remove_notes_(module)
            classes = type(module).__mro__
            module.__class__ = classes[classes.index(fsdp().FSDPModule) + 1]


def _remove_hooks_(module: nn.Module) -> None:
    for table in _HOOK_TABLES:
        hooks: dict[int, Any] = getattr(module, table, None) or {}
        for key in [key for key, hook in hooks.items() if _is_theirs(hook)]:
            del hooks[key]
            for more in _MORE_OF_A_HOOK:
                getattr(module, more, {}).pop(key, None)


def _is_theirs(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def _remove_notes_(module: nn.Module) -> None:
    from torch.distributed import _composable_state

    applied = fsdp().fully_shard
    for key in [key for key in module.__dict__ if key.startswith(_NOTES)]:
        notes = module.__dict__[key]
        notes.pop(getattr(applied, "__wrapped__", None), None)
        notes.pop(applied.__name__, None)
    _composable_state._module_state_mapping.pop(module, None)
