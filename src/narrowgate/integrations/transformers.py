"""``NarrowgateCallback`` for the Trainer of Hugging Face transformers, the twin of the one for Lightning."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from narrowgate.atomic import replace_file
from narrowgate.flow.trace import ExampleInputs
from narrowgate.integrations.narrowing import Narrowed, Narrowing, Settings, reorder_
from narrowgate.train.shrink import own_forward
from narrowgate.train.state import names_in_groups

STATE = "narrowgate.json"


class NarrowgateCallback(TrainerCallback):
    """Narrows the model of a ``Trainer``; ``result`` holds the small one after ``trainer.train``.

    Attach gates before the ``Trainer`` is made: the callback puts none on. Its state lies in each checkpoint folder.
    Before ``trainer.train(resume_from_checkpoint=folder)`` call ``resume_(trainer, folder)``, since the ``Trainer``
    loads weights before it asks its callbacks. With more than one process or GPU use ``Settings(shrink="end")``.

    Args:
        settings: what closes the gates, and when channels go.
        example_inputs: what the model is traced with, as for ``ng.plan``: usually a dict without labels.
    """

    def __init__(self, settings: Settings, example_inputs: ExampleInputs) -> None:
        self.settings = settings
        self.example_inputs = example_inputs
        self.result: Narrowed | None = None
        self._narrowing: Narrowing | None = None
        self._order: list[list[str]] = []
        self._epoch = -1  # the one that is running

    def resume_(self, trainer: Trainer, folder: str | Path) -> None:
        """Cut the fresh model of a trainer to the widths of a checkpoint, whose weights it then can load."""
        file = Path(folder) / STATE
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing: the checkpoint was written without this callback, or not to the end"
            )
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({error}); go back to the checkpoint before") from error
        self._check(trainer.args)
        model = cast(nn.Module, trainer.model)
        with own_forward(model):
            self._narrowing = Narrowing(model, self.example_inputs, self.settings, state["epochs"])
            self._narrowing.load_state_dict(state)
        # The trainer keeps the optimizer that it finds, and loads the checkpoint's state into it.
        reorder_(trainer.create_optimizer(), model, state["order"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the model and take the optimizer."""
        self._check(args)
        self._epoch = -1
        if self.settings.budget and state.num_train_epochs == sys.maxsize:
            raise ValueError("a budget needs to know how long the run is: give the dataset a length")
        model, self.result = kwargs["model"], None
        with own_forward(model):
            if self._narrowing is None or self._narrowing.network is not model:
                if state.global_step:
                    raise ValueError(
                        "call callback.resume_(trainer, folder) before trainer.train(resume_from_checkpoint=folder)"
                    )
                self._narrowing = Narrowing(model, self.example_inputs, self.settings, state.num_train_epochs)
            self._narrowing.use_(kwargs["optimizer"])
            names_in_groups(kwargs["optimizer"], model)  # raises if it could not be saved

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move schedules on."""
        # Without knowing the dataset's length, the trainer takes all steps for one epoch.
        self._epoch = max(self._epoch + 1, int(state.epoch or 0))
        with own_forward(kwargs["model"]):
            self._running.begin_epoch(self._epoch)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the penalty, once a step however many batches it accumulates; gradients are clipped by then."""
        self._running.before_step_()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the proximal step, if that is how the gates close."""
        self._running.after_step_()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Steer and cut, before evaluation and checkpoint of this epoch."""
        with own_forward(kwargs["model"]):
            self._running.end_epoch(self._epoch)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add closed gates, parameters and strength to what is logged."""
        if self._narrowing is not None:
            metrics = self._narrowing.metrics()
            kwargs["logs"].update(metrics)
            state.log_history[-1].update(metrics)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what a resumed run needs into the checkpoint's folder."""
        if state.is_world_process_zero:
            content = {
                **self._running.state_dict(),
                "order": names_in_groups(kwargs["optimizer"], kwargs["model"]),
                "epochs": state.num_train_epochs,
            }
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            replace_file(folder / STATE, json.dumps(content).encode())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the small model."""
        with own_forward(kwargs["model"]):
            self.result = self._running.finish()

    @property
    def _running(self) -> Narrowing:
        assert self._narrowing is not None, "trainer.train calls on_train_begin first"
        return self._narrowing

    def _check(self, args: TrainingArguments) -> None:
        if args.deepspeed or args.fsdp:
            raise ValueError("DeepSpeed and FSDP are not supported: gates need whole parameters. Use one device or DDP")
        if args.fp16 and not args.max_grad_norm:
            raise ValueError(
                "under fp16 without max_grad_norm gradients are still scaled when the penalty is added; use bf16=True, "
                "or a max_grad_norm"
            )
        if self.settings.shrink == "during" and args.parallel_mode.value != "not_parallel":
            raise ValueError(
                "the model can't be cut while several processes or GPUs train it, since the wrapper around it holds on "
                "to the old shapes: use Settings(shrink='end'), or one device"
            )
        if self.settings.shrink == "during" and args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end loads weights of other shapes than a model that was cut since: use "
                "Settings(shrink='end'), or load_best_model_at_end=False"
            )
