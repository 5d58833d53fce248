"""``Training``: a run in progress, epoch by epoch. All of its processes do the same; the first one writes files."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgate.flow import CollapseError, ReplayError, TraceError, compact
from narrowgate.flow.plan import plan_traced
from narrowgate.flow.trace import Tracer
from narrowgate.flow.verify import full_precision
from narrowgate.measure import summarize
from narrowgate.measure.counts import CountError
from narrowgate.models import ModelError
from narrowgate.rivals.apg import ApgSgd
from narrowgate.train.augment import seeded
from narrowgate.train.data import Data, FolderData
from narrowgate.train.feed import ArrayFeed, FolderFeed, Place, held_out_batches
from narrowgate.train.finish import Pruned, prune
from narrowgate.train.fused import Fused, Looks
from narrowgate.train.log import EpochRow, RunLog
from narrowgate.train.norm_activation import why_not
from narrowgate.train.recipe import Recipe
from narrowgate.train.setup import Parts, build, make_budget, make_feed, make_shrinker
from narrowgate.train.show import Show
from narrowgate.train.step import GraphLoop, Loop, Step, count_hits
from narrowgate.train.teacher import load_teacher
from narrowgate.train.team import Team
from narrowgate.train.watch import TrainingError, Watch

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_LOOKS = 10  # how often a run that removes more at its end looks at what would be left


@dataclass(frozen=True)
class Size:
    """Parameters and multiply-adds of a network without its gates."""

    parameters: int
    multiply_adds: int

    @classmethod
    def of(cls, model: nn.Module, example: torch.Tensor) -> Size:
        """The size of a network as it is, closed channels included."""
        summary = summarize(model, example[:1])
        return cls(summary.parameters, summary.multiply_adds)


class Training:
    """A network, what trains it, and how far it has come."""

    def __init__(
        self, recipe: Recipe, folder: Path, data: Data | FolderData, place: Place, fabric: Fabric, show: Show
    ) -> None:
        self.recipe, self.data, self.place = recipe, data, place
        self.team, self.show = Team(fabric, place), show
        torch.manual_seed(_seed("weights", recipe.train.seed))
        self.parts: Parts = build(recipe, data.classes, data.image_shape, place.device)
        self.example = next(held_out_batches(data, "held-out", Place(place.device), batch=4))[0]
        self.full = self.left = self._full_size()
        self.shrinker = make_shrinker(recipe, self.parts, self.example)
        self.budget = make_budget(recipe, self.parts, self.example)
        self.batch = recipe.train.batch
        self.feed = make_feed(recipe, data, place, self.batch)
        self.teacher = load_teacher(recipe.teacher, data.classes, data.image_shape, place.device)
        self.epoch, self.seconds, self.best = 0, 0.0, -1.0
        self._loop: Loop | None = None
        self._tracer = Tracer()
        self._watch = Watch(recipe, folder, self.feed.steps)
        self._log = RunLog(folder) if place.rank == 0 else None

    def _full_size(self) -> Size:
        try:
            return Size.of(self.parts.model, self.example)
        except CountError as error:
            shape = "x".join(map(str, self.data.image_shape))
            reason = error.__cause__ or error
            raise ModelError(f"{self.recipe.model.name} can't take images of {shape}: {reason}") from error

    def one_epoch(self) -> EpochRow:
        """Train one epoch, then shrink, steer, evaluate and write it down."""
        started = time.perf_counter()
        loss, accuracy = self._train()
        trained = time.perf_counter() - started
        lr, images = self._lr_at(self.epoch), self.feed.steps * self.batch * self.place.world
        penalty, recipe = self.parts.penalty, self.recipe
        strength = 0.0 if penalty is None else penalty.strength  # a budget changes it below
        sound = math.isfinite(loss)  # if it is not, this ends below, where the trouble is named
        event = self._after_epoch() if sound else ""
        held_out = self._held_out_accuracy() if sound else None
        self.epoch += 1
        seconds = time.perf_counter() - started
        self.seconds += seconds
        row = EpochRow(
            epoch=self.epoch,
            epochs=recipe.train.epochs,
            lr=lr,
            strength=strength,
            sigma=1.0 if penalty is None else penalty.sigma,
            train_loss=loss,
            train_accuracy=accuracy,
            accuracy=held_out,
            closed=self.closed_fraction(),
            parameters=self.left.parameters,
            multiply_adds=self.left.multiply_adds,
            seconds=seconds,
            images_per_second=images / trained,
            event=event,
        )
        self._tell(row)
        return row

    def closed_fraction(self) -> float:
        """The share of the gates that the network began with that are closed or gone."""
        if self.shrinker is not None:
            return self.shrinker.closed_fraction()
        gates = self.parts.gates
        return 0.0 if gates is None else sum(int((g.final_value() == 0).sum()) for g in gates.modules()) / gates.count

    def _train(self) -> tuple[float, float]:
        self.seed_noise(self.epoch)
        if self.parts.penalty is not None:
            self.parts.penalty.set_epoch(self.epoch)
        if self._loop is None:
            self._loop = self.loop_for(self.parts)
        try:
            loss, accuracy = self.run_epoch(self._loop, self.epoch, self._lr_at)
            # The last step may have broken the weights: no checkpoint is to hold them.
            sums = torch.stack([p.detach().float().sum() for p in self.parts.model.parameters()])
            return loss if bool(sums.isfinite().all()) else math.nan, accuracy
        except ValueError as error:
            gates = [] if self.parts.gates is None else self.parts.gates.parameters()
            if any(bool(g.isnan().any()) for g in gates):  # on a CPU, gated layers refuse to compute with them
                return math.nan, math.nan
            if self.recipe.train.batch == 1:  # too little for a BatchNorm that gets one number of each image
                raise TrainingError(
                    f"train.batch = 1: {error}. Start again in another folder with a higher one"
                ) from error
            raise

    def _lr_at(self, progress: float) -> float:
        """Larger batches take fewer and longer steps, so that an epoch goes as far as before."""
        return self.recipe.lr_at(progress) * self.batch / self.recipe.train.batch

    def fit_batch(self, now: Size) -> None:
        """Take larger batches where a cut has made room for them; on resuming, those of the run before."""
        base, most = self.recipe.train.batch, self.recipe.shrink.batch
        if most <= base:
            return
        images = self.data.train_size if isinstance(self.data, FolderData) else len(self.data.train)
        room = base * self.full.multiply_adds // max(1, now.multiply_adds)
        quarter = base // 4 if base % 4 == 0 else base
        self.set_batch(max(base, min(room, most, images // self.place.world) // quarter * quarter))

    def set_batch(self, batch: int) -> None:
        """Train with batches of another size from the next epoch on."""
        if batch != self.batch:
            self.batch, self._loop = batch, None
            self.feed = make_feed(self.recipe, self.data, self.place, batch)

    def seed_noise(self, epoch: int) -> None:
        """Random numbers of an epoch (dropout, stochastic gates) belong to it alone, so that a resumed run has them."""
        torch.manual_seed(_seed("noise", self.recipe.train.seed, epoch, self.place.rank))

    def run_epoch(self, loop: Loop, epoch: int, lr_at: Any) -> tuple[float, float]:
        """One epoch of any loop: its mean loss and training accuracy, over all processes."""
        loop.epoch(epoch, lr_at, lambda step: self.show.step(step, self.feed.steps))
        loss, hits = loop.step.take_sums()
        sums = self.team.all_sum(torch.stack([loss.double(), hits.double()]))
        steps = self.feed.steps * self.place.world
        return float(sums[0]) / steps, float(sums[1]) / (steps * self.batch)

    def loop_for(self, parts: Parts) -> Loop:
        """What runs epochs of these parts: replays of a CUDA graph where that can be, steps on the host elsewhere."""
        recipe, device = self.recipe, self.place.device
        forward: Any = parts.model
        if recipe.train.compile and self.place.world == 1:
            forward = torch.compile(forward)
        elif recipe.train.compile:
            self.show.notice("train.compile is for one process: steps run as they are")
        if self.place.world > 1:
            forward = self.team.wrapped(forward, self.example)
        step = Step(
            forward,
            parts.optimizer,
            None if isinstance(parts.optimizer, ApgSgd) else parts.penalty,  # which has it in its own steps
            device,
            bf16=recipe.train.precision == "bf16",
            label_smoothing=recipe.train.label_smoothing,
            proximal=self._proximal(),
            backward=self.team.fabric.backward,
            teacher=self.teacher,
        )
        if reason := self._no_graph():
            if device.type == "cuda" and recipe.train.graph == "auto":
                self.show.notice(f"steps run without a CUDA graph: {reason}")
            return Loop(step, self.feed)
        assert isinstance(self.feed, ArrayFeed)
        if not recipe.train.compile and any(isinstance(module, nn.BatchNorm2d) for module in parts.model.modules()):
            step.forward = self._fused(step.forward)
        return GraphLoop(step, self.feed, self.show.notice)

    def _fused(self, forward: Any) -> Any:
        """The same forward in fewer kernels; as it was, with a notice, where that can't be."""
        if reason := why_not(self.place.device):
            self.show.notice(f"steps run with PyTorch's own kernels: {reason}")
            return forward
        return Fused(self.show.notice).around(forward)

    def accuracy(self, model: nn.Module, split: str, bf16: bool = False, noisy: Sequence[nn.Module] = ()) -> float:
        """The share of a split's images that a model gets right, with ``noisy`` layers of it in training mode."""
        batches = held_out_batches(self.data, split, self.place)
        quick = bf16 and self.place.device.type == "cuda" and not why_not(self.place.device)
        with full_precision(), Looks() if quick else nullcontext():
            counts = self.team.all_sum(count_hits(model, batches, self.place.device, bf16, noisy))
        return float(counts[0] / counts[1])

    def pruned(self) -> Pruned:
        """A smaller copy of the network, after the gates were closed that ``[finish]`` closes."""
        parts, earlier = self.parts, None if self.shrinker is None else self.shrinker.plan
        full, agree = self.full.parameters, self.team.agree
        return prune(parts.model, parts.gates, self.recipe, self.example, full, parts.began, earlier, agree)

    def rewind_log(self) -> None:
        """Drop what the log holds of epochs that will run again."""
        with self.team.first_alone():
            if self._log is not None:
                self._log.rewind(self.epoch)

    def close(self) -> None:
        """Close the logs."""
        if self._log is not None:
            self._log.close()

    def _after_epoch(self) -> str:
        """Shrink and steer; what happened, for the log."""
        self.team.share_buffers_(self.parts.model)
        if self.shrinker is None:
            if self.parts.gates is not None and self._removes_more_at_its_end() and self._is_time_to_look():
                self.left = self._left_after_removal()
            return ""
        event = ""
        self.parts.optimizer.zero_grad(set_to_none=True)  # gradients may lie in the graph's memory
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if self.budget is not None:
                self.budget.step(self.epoch)
            shrunk = self.shrinker.step(self.epoch) if self.recipe.shrink.when == "during" else None
        for warning in caught:
            self.show.notice(str(warning.message))
        if shrunk is not None:
            self._loop = None
            if self.budget is not None:
                self.budget.remember()
            self.team.check_same(self.shrinker.digest(), "removed other channels")
            self.left = Size.of(self.parts.model, self.example)
            sizes = f"{shrunk.parameters_before:,} -> {shrunk.parameters_after:,} parameters"
            event = f"shrunk {sizes} in {shrunk.seconds:.1f} s"
            before = self.batch
            self.fit_batch(self.left)
            if self.batch != before:
                event += f", batches of {self.batch}"
                self._tell_of_longer_steps()
        if self._removes_more_at_its_end() and (shrunk is not None or self._is_time_to_look()):
            self.left = self._left_after_removal()
        return event

    def _tell_of_longer_steps(self) -> None:
        if (penalty := self.parts.penalty) is not None:
            notice = self._watch.longer_steps(self.epoch + 1, self.batch, penalty.strength, penalty.sigma)
            if notice:
                self.show.notice(notice)

    def _removes_more_at_its_end(self) -> bool:
        """Whether everything goes at the end only, or what takes index operations."""
        part = self.recipe.shrink
        return part.when == "end" or (part.when == "during" and part.layout == "scatter")

    def _is_time_to_look(self) -> bool:
        done, epochs = self.epoch + 1, self.recipe.train.epochs
        return done % max(1, epochs // _LOOKS) == 0 or done == epochs

    def _left_after_removal(self) -> Size:
        """What removing the closed channels now would leave; as before where that can't be told."""
        model, part = self.parts.model, self.recipe.shrink
        layout = "aligned" if part.layout == "auto" else part.layout  # which would time every layer
        try:
            made = plan_traced(model, self.example, self._tracer, layout, part.constants, part.round_to, False)
            return Size.of(compact(model, made), self.example)
        except (CollapseError, ReplayError, TraceError):
            return self.left

    def _held_out_accuracy(self) -> float | None:
        part = self.recipe.train
        if (self.epoch + 1) % part.evaluate_every and self.epoch + 1 < part.epochs:
            return None
        return self._judge()

    def _judge(self, noisy: Sequence[nn.Module] = ()) -> float:
        return self.accuracy(self.parts.model, "held-out", self.recipe.train.precision == "bf16", noisy)

    def _tell(self, row: EpochRow) -> None:
        self._watch.check(row)  # raises if the loss is not a number
        gates = self.parts.gates
        notices = [] if gates is None else self._watch.notices(row, gates)
        shift = self._watch.variance_shift(row, self.parts.model, self.example, self._judge)
        notices += shift or self._watch.lagging_statistics(row, self.parts.model, self._judge)
        for notice in notices:
            self.show.notice(notice)
        self.show.epoch(row)
        with self.team.first_alone():
            if self._log is not None:
                self._log.epoch(row, gates)

    def _no_graph(self) -> str:
        """Why a step can't be a CUDA graph here; empty if it can."""
        if self.place.device.type != "cuda" or self.recipe.train.graph == "off":
            return "not asked for"
        if self.place.world > 1:
            return f"{self.place.world} processes exchange gradients in it"
        if isinstance(self.feed, FolderFeed):
            return "the images come from a folder, not from the GPU's memory"
        return ""

    def _proximal(self) -> float | None:
        if not self.recipe.penalty.proximal:
            return None
        momentum = self.recipe.optimizer.momentum if self.recipe.optimizer.kind == "sgd" else 0.0
        return 1 / (1 - momentum)


def _seed(name: str, *numbers: int) -> int:
    """A seed that belongs to a name and some numbers alone."""
    return seeded(f"narrowgate {name}", *numbers).initial_seed()
