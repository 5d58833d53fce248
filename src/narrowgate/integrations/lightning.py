"""``NarrowgateCallback`` for Lightning: close gates, cut the network as it trains, and give out the small one."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from narrowgate.flow.trace import ExampleInputs
from narrowgate.gateset import gates_of
from narrowgate.integrations.narrowing import (
    Narrowed,
    Narrowing,
    Settings,
    cut_to_state_,
    reorder_,
)
from narrowgate.train.state import names_in_groups
from narrowgate.weights import uncompiled

_HOOK = "on_load_checkpoint"
# Of these, older versions of Lightning have the first only.
_AVERAGING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)


class NarrowgateCallback(Callback):
    """Narrows one network of a ``LightningModule``; ``result`` holds the small one after ``trainer.fit``.

    Attach gates in the module's ``__init__``: the callback puts none on. Its state goes into Lightning's checkpoints,
    and ``trainer.fit(fresh_module, ckpt_path=...)`` goes on from there, as do ``validate``, ``test`` and ``predict``.
    Under DDP, whose wrapper holds on to the shapes it has seen, use ``Settings(shrink="end")``.

    Args:
        settings: what closes the gates, and when channels go.
        network: the attribute of the module that is the gated network.
        example_inputs: what it is traced with, as for ``ng.plan``; by default the module's ``example_input_array``.
    """

    def __init__(
        self, settings: Settings, *, network: str = "model", example_inputs: ExampleInputs | None = None
    ) -> None:
        self.settings = settings
        self.network = network
        self.example_inputs = example_inputs
        self.result: Narrowed | None = None
        self._narrowing: Narrowing | None = None
        self._module: LightningModule | None = None
        self._order: list[list[str]] | None = None
        self._proximal: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look at the network while it has its full size."""
        network = self._find(pl_module)
        if stage == "fit":
            self._check_trainer(trainer)
            self.result = None
            if self._narrowing is None or self._narrowing.network is not network:
                self._narrowing = Narrowing(network, self._example(pl_module), self.settings, self._epochs(trainer))
        # Callbacks hear of a checkpoint after the weights were loaded; the module's own hook comes before.
        # A plain function, which is not copied with the module, as weight averaging copies it.
        vars(pl_module)[_HOOK] = lambda checkpoint: self._cut_first(pl_module, stage, checkpoint)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind on module and optimizer."""
        vars(pl_module).pop(_HOOK, None)
        if self._proximal is not None:
            self._proximal.remove()
            self._proximal = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the optimizer that has the gates."""
        narrowing = self._running
        gates = {id(gate) for gate in narrowing.gates}
        holders = [o for o in trainer.optimizers if any(id(p) in gates for g in o.param_groups for p in g["params"])]
        if not holders:
            raise ValueError(
                f"no optimizer trains the gates of {self.network!r}: attach them in the module's __init__, and let "
                "configure_optimizers take all parameters"
            )
        optimizer = holders[0]
        if trainer.precision == "16-mixed" and optimizer.defaults.get("fused"):
            raise ValueError(
                "a fused optimizer under 16-mixed scales gradients inside its step, where the penalty can't be added; "
                "use precision='bf16-mixed', or fused=False"
            )
        names_in_groups(optimizer, pl_module)  # raises if it could not be saved
        narrowing.use_(optimizer, trainer.precision_plugin.convert_input)
        self._module = pl_module
        if self._order is not None:
            reorder_(optimizer, pl_module, self._order)  # before Lightning loads its state
            self._order = None
        self._proximal = optimizer.register_step_post_hook(lambda *_: narrowing.after_step_())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Move schedules on; resumed from the last step of an epoch, Lightning does not say that the next begins."""
        self._running.begin_epoch(trainer.current_epoch)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add the penalty, once a step however many batches it accumulates, and before gradients are clipped."""
        if optimizer is self._running.optimizer:
            self._running.before_step_()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Steer, cut, and log."""
        if shrunk := self._running.end_epoch(trainer.current_epoch):
            rank_zero_info(f"epoch {trainer.current_epoch}: {shrunk}")
        pl_module.log_dict(self._running.metrics(), sync_dist=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the small network."""
        self.result = self._running.finish()
        rank_zero_info(str(self.result))

    def state_dict(self) -> dict[str, Any]:
        """What was cut, where the budget stands, and the order of the optimizer's parameters."""
        if self._narrowing is None or self._module is None:
            return {}
        return {**self._narrowing.state_dict(), "order": names_in_groups(self._narrowing.optimizer, self._module)}

    def _cut_first(self, pl_module: LightningModule, stage: str, checkpoint: dict[str, Any]) -> None:
        vars(pl_module).pop(_HOOK, None)
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        network = self._find(pl_module)
        if state and self._narrowing is not None and self._narrowing.network is network:
            self._narrowing.load_state_dict(state)
            self._order = state["order"] if stage == "fit" else None
        elif state:
            cut_to_state_(network, state)
        pl_module.on_load_checkpoint(checkpoint)

    @property
    def _running(self) -> Narrowing:
        assert self._narrowing is not None, "trainer.fit calls setup first"
        return self._narrowing

    def _find(self, pl_module: LightningModule) -> nn.Module:
        children = [name for name, _ in pl_module.named_children()]
        if self.network.partition(".")[0] not in children:
            raise ValueError(
                f"{type(pl_module).__name__} has no network {self.network!r}, but has {', '.join(children) or 'none'}; "
                "pass network=, and build it in __init__"
            )
        network = uncompiled(pl_module.get_submodule(self.network))
        gates_of(network)  # raises if there are none
        return network

    def _example(self, pl_module: LightningModule) -> ExampleInputs:
        example = pl_module.example_input_array if self.example_inputs is None else self.example_inputs
        if example is None:
            raise ValueError(
                "nothing to trace the network with: pass example_inputs=, a small batch, or set example_input_array"
            )
        return example

    def _epochs(self, trainer: Trainer) -> int:
        if self.settings.budget and (trainer.max_epochs is None or trainer.max_epochs < 1):
            raise ValueError("a budget needs to know how long the run is: give the Trainer max_epochs")
        return trainer.max_epochs or 1

    def _check_trainer(self, trainer: Trainer) -> None:
        others: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        averaging = [type(other).__name__ for other in others if isinstance(other, _AVERAGING)]
        if averaging and self.settings.shrink == "during":
            raise ValueError(
                f"{averaging[0]} keeps a copy of the network at full size, to which the weights of one that was cut "
                "don't fit: use Settings(shrink='end'), or leave it out"
            )
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise ValueError(
                f"{type(strategy).__name__} is not supported: gates need whole parameters. Use one device or DDP"
            )
        if isinstance(strategy, DDPStrategy) and self.settings.shrink == "during":
            raise ValueError(
                "the network can't be cut while DDP trains it, since its wrapper holds on to the old shapes: use "
                "Settings(shrink='end'), or one device"
            )
