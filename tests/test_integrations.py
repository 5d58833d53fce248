"""Callbacks: they narrow what a trainer trains, as a plain loop would, and a resumed run ends with the same weights."""

import copy
import json
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import narrowgate as ng
from narrowgate.integrations import Settings
from narrowgate.integrations.narrowing import Narrowing, check_optimizer, reorder_
from narrowgate.train.state import names_in_groups

pytestmark = [
    # Lightning 2.6 with torch 2.14; and what it says of small loaders, of its checkpoints and of logging.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*(not have many workers|not empty|no `val_dataloader`|create the checkpoint).*"
    ),
]
EPOCHS = 5


def network(closed=5):
    """Two convolutions with gates of which one in five is closed from the start; the second gets a bias when cut."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 10, 3, bias=False), nn.BatchNorm2d(10), nn.ReLU()),
        *(nn.Conv2d(10, 15, 3, bias=False), nn.BatchNorm2d(15), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(15, 4)),
    )
    nn.init.constant_(model[1].bias, 0.2)
    for gate in ng.attach_gates_(model, init=0.3).modules():
        gate.g.data[::closed] = 0 if closed else gate.g.data
    return model


def data():
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(40, 1, 8, 8, generator=generator), torch.arange(40) % 4
    images[torch.arange(40), 0, labels * 2] += 1
    return images, labels


def batches():
    return DataLoader(TensorDataset(*data()), batch_size=8)


EXAMPLE = data()[0][:2]
ALIKE = {
    "penalty": Settings("l1", strength=0.02, every=1),
    "proximal": Settings("l1", strength=0.02, every=1, proximal=True),
    "relative": Settings("l1", strength=0.02, every=1, relative=True),
    "schedule": Settings("l1", strength=ng.schedules.Stepped((0.01, 0.05), at=(3,)), every=2, share=0.0),
    "budget": Settings("l1", budget="params: 40%", every=1),
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def size(model):
    return sum(p.numel() for name, p in model.named_parameters() if not name.endswith("gate.g"))


def assert_same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def plain_loop(settings):
    """What the callbacks should do, by hand."""
    model = network()
    gates = ng.gates_of(model)
    penalty = ng.Penalty(gates, settings.kind, settings.strength or 0.0, relative=settings.relative)
    optimizer = sgd(model)
    shrinker = ng.Shrinker(model, EXAMPLE, optimizer, every=settings.every, share=settings.share)
    budget = None
    if settings.budget:
        budget = ng.Budget(settings.budget, model, EXAMPLE, penalty, EPOCHS, optimizer=optimizer)
    for epoch in range(EPOCHS):
        if budget is None:
            penalty.set_epoch(epoch)
        for images, labels in batches():
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            if not settings.proximal:  # after it: in one backward, PyTorch 2.6 adds a gate's gradients in another order
                penalty().backward()
            optimizer.step()
            if settings.proximal:
                penalty.proximal_(0.05 / (1 - 0.9))
        if budget is not None:
            budget.step(epoch)
        shrinker.step(epoch)
    return model


# What both callbacks are made of


def test_settings_are_checked():
    with pytest.raises(ValueError, match="no gate would close"):
        Settings()
    with pytest.raises(ValueError, match="unknown shrink 'never'"):
        Settings(strength=1.0, shrink="never")
    with pytest.raises(ValueError, match="params: 30%"):
        Settings(budget="half")
    with pytest.raises(ValueError, match="unknown layout 'scater'"):  # now, not when the run is over
        Settings(strength=1.0, layout="scater")
    with pytest.raises(ValueError, match="threshold"):
        Settings(strength=1.0, threshold=-1.0)
    with pytest.raises(ValueError, match="no proximal step"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ng.attach_gates_(model, "hard-concrete")
        Narrowing(model, torch.rand(2, 2), Settings("l0", strength=1.0, proximal=True), 1)


@pytest.mark.parametrize("kind", ["l1", "l2", "bounded-l1"])
def test_the_gradient_that_is_added_is_that_of_a_penalty_in_the_loss(kind):
    images, labels = data()
    one = network()
    other = copy.deepcopy(one)
    narrowing = Narrowing(one, EXAMPLE, Settings(kind, strength=0.3), EPOCHS)
    penalty = ng.Penalty(ng.gates_of(other), kind, 0.3)
    F.cross_entropy(one(images), labels).backward()
    without = one[0].gate.g.grad.clone()
    narrowing.before_step_()
    (F.cross_entropy(other(images), labels) + penalty()).backward()
    assert not torch.equal(one[0].gate.g.grad, without)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_optimizers_order_is_named_and_restored():
    model = network()
    optimizer = torch.optim.SGD(
        [{"params": list(model.parameters())[3:]}, {"params": list(model.parameters())[:3]}], 0.1
    )
    order = names_in_groups(optimizer, model)
    assert order[1] == ["0.weight", "0.gate.g", "1.weight"]
    fresh = torch.optim.SGD([{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:]}], 0.1)
    assert names_in_groups(fresh, model) != order
    reorder_(fresh, model, order)
    assert names_in_groups(fresh, model) == order
    with pytest.raises(ValueError, match="other parameters or groups"):
        reorder_(fresh, model, order[:1])
    named = torch.optim.SGD([{"params": list(model.named_parameters())}], 0.1)
    names = [name for name, _ in model.named_parameters()][::-1]
    reorder_(named, model, [names])
    assert named.param_groups[0]["param_names"] == names_in_groups(named, model)[0] == names
    with pytest.raises(ValueError, match="not in Linear"):
        names_in_groups(fresh, nn.Linear(1, 1))


def test_an_optimizer_without_the_gates_is_refused():
    model = network()
    weights = [p for name, p in model.named_parameters() if "gate" not in name]
    with pytest.raises(ValueError, match=r"does not train '0\.gate\.g' \(2 such"):
        check_optimizer(torch.optim.SGD(weights, 0.1), model)


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS"])
def test_an_optimizer_that_cannot_be_cut_is_refused_before_the_run(kind):
    model = network()
    optimizer = getattr(torch.optim, kind)(model.parameters())
    with pytest.raises(ValueError, match=f"{kind} keeps"):
        Narrowing(model, EXAMPLE, Settings(strength=0.1), EPOCHS).use_(optimizer)
    Narrowing(model, EXAMPLE, Settings(strength=0.1, shrink="end"), EPOCHS).use_(optimizer)


def test_a_proximal_step_goes_by_each_gates_own_learning_rate():
    model = network(closed=1000)
    gates = ng.gates_of(model)
    first, second = gates.parameters()
    others = [p for p in model.parameters() if p is not first and p is not second]
    groups = [{"params": others}, {"params": [first], "lr": 0.0}, {"params": [second], "lr": 0.1, "momentum": 0.5}]
    narrowing = Narrowing(model, EXAMPLE, ALIKE["proximal"], EPOCHS)
    narrowing.use_(torch.optim.SGD(groups, lr=1.0))
    before = first.detach().clone(), second.detach().clone()
    narrowing.after_step_()
    assert torch.equal(first, before[0])
    torch.testing.assert_close(second.detach(), (before[1] - 0.02 * 0.1 / 0.5).clamp(min=0))


@pytest.mark.parametrize("momentum, dampening", [(0.9, 0.0), (0.9, 0.9), (0.5, 0.2), (0.0, 0.9)])
def test_a_proximal_step_is_as_fast_as_sgd(momentum, dampening):
    model = network(closed=1000)
    gate = ng.gates_of(model).parameters()[0]
    narrowing = Narrowing(model, EXAMPLE, ALIKE["proximal"], EPOCHS)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=momentum, dampening=dampening)
    narrowing.use_(optimizer)
    before = gate.detach().clone()
    narrowing.after_step_()
    proximal = (before - gate).max()
    for _ in range(200):  # until the momentum is what it comes to
        before = gate.detach().clone()
        gate.grad = torch.full_like(gate, ALIKE["proximal"].strength)
        optimizer.step()
    torch.testing.assert_close(proximal, (before - gate).max(), rtol=1e-3, atol=0)


def test_a_gate_that_is_frozen_does_not_stand_for_the_others():
    model = network(closed=1000)
    first, second = ng.gates_of(model).parameters()
    first.requires_grad_(False)
    narrowing = Narrowing(model, EXAMPLE, ALIKE["proximal"], EPOCHS)
    narrowing.use_(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    before = first.detach().clone(), second.detach().clone()
    narrowing.after_step_()
    assert torch.equal(first, before[0]) and (second[1:] < before[1][1:]).all()
    second.requires_grad_(False)
    with pytest.raises(ValueError, match="all are frozen"):
        narrowing.use_(sgd(model))


def test_weights_from_before_the_budget_was_met_are_noticed():
    model = network(closed=1000)
    before = copy.deepcopy(model.state_dict())
    narrowing = Narrowing(model, EXAMPLE, Settings("l1", budget="params: 40%", shrink="end"), EPOCHS)
    narrowing.use_(sgd(model))
    for epoch in range(EPOCHS):
        narrowing.end_epoch(epoch)
    assert size(narrowing.finish().small) == pytest.approx(0.4 * size(model), rel=0.1)
    model.load_state_dict(before)  # as load_best_model_at_end does
    with pytest.warns(UserWarning, match=r"was met with .*%, but .*% is left .* load_best_model_at_end"):
        narrowing.finish()


# Lightning


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning.pytorch")


def module(lightning, build=network, optimizer=sgd):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = build()

        def training_step(self, batch, index):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, index):
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return optimizer(self)

    return Module()


def callback(settings, **options):
    from narrowgate.integrations.lightning import NarrowgateCallback

    return NarrowgateCallback(settings, network="net", **{"example_inputs": EXAMPLE, **options})


def trainer(lightning, *callbacks, epochs=EPOCHS, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"enable_checkpointing": False, **quiet, **options}
    return lightning.Trainer(max_epochs=epochs, callbacks=list(callbacks), num_sanity_val_steps=0, **options)


def keep_all(lightning, folder, when="epoch end"):
    """Checkpoints epoch=0, epoch=1, ... at one of three moments, of which two are before the callback cuts."""
    options = {
        "epoch end": {"every_n_epochs": 1},
        "validation end": {"every_n_epochs": 1, "monitor": "loss"},
        "last step": {"every_n_train_steps": 5},
    }
    return lightning.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, **options[when])


@pytest.mark.parametrize("name", ALIKE)
def test_lightning_does_what_a_plain_loop_does(lightning, name):
    settings, model = ALIKE[name], module(lightning)
    narrow = callback(settings)
    fit = trainer(lightning, narrow)
    fit.fit(model, batches())
    assert_same_weights(model.net, plain_loop(settings))
    assert size(model.net) < 0.85 * size(network())  # something went while it trained
    assert narrow.result.plan.parameters_after == size(narrow.result.small) <= size(model.net)
    assert "same function" in str(narrow.result)
    assert fit.callback_metrics["narrowgate/parameters"] == size(model.net)
    assert fit.callback_metrics["narrowgate/closed"] == pytest.approx(narrow.result.closed)
    assert "on_load_checkpoint" not in vars(model)


def test_lightning_gives_a_network_that_can_be_saved(lightning, tmp_path):
    narrow = callback(ALIKE["penalty"])
    trainer(lightning, narrow).fit(module(lightning), batches())
    narrow.result.save(tmp_path / "small")

    def build():
        return ng.merge_gates_(network())

    again = ng.load(tmp_path / "small", build).eval()
    assert torch.equal(again(EXAMPLE), narrow.result.small.eval()(EXAMPLE))


def test_lightning_gives_a_compiled_network_under_its_own_names(lightning, tmp_path):
    model, narrow = module(lightning), callback(ALIKE["penalty"])
    model.net = torch.compile(model.net, backend="eager")
    trainer(lightning, narrow).fit(model, batches())
    narrow.result.save(tmp_path / "small")
    loaded = ng.load(tmp_path / "small", lambda: ng.merge_gates_(network())).eval()
    assert size(loaded) < 0.85 * size(network())
    assert torch.equal(loaded(EXAMPLE), narrow.result.small.eval()(EXAMPLE))


def test_without_penalty_and_closed_gates_lightning_removes_nothing(lightning):
    model = module(lightning, lambda: network(closed=1000))
    for gate in ng.gates_of(model.net).modules():
        gate.g.data.fill_(0.3)
    narrow = callback(Settings("l1", strength=0.0, every=1))
    trainer(lightning, narrow).fit(model, batches())
    assert size(narrow.result.small) == size(model.net) == size(network())
    assert narrow.result.closed == 0


def test_at_the_end_only(lightning):
    model, narrow = module(lightning), callback(Settings("l1", strength=0.02, shrink="end", every=1))
    trainer(lightning, narrow).fit(model, batches())
    assert size(model.net) == size(network())
    assert size(narrow.result.small) < 0.85 * size(network())


def test_accumulated_batches_are_one_step(lightning):
    seen = []

    def sgd_that_counts(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_post_hook(lambda *_: seen.append(model.net[0].gate.g.grad.clone()))
        return optimizer

    for strength in (0.0, 1.0):
        model = module(lightning, optimizer=sgd_that_counts)
        narrow = callback(Settings("l1", strength=strength, shrink="end"))
        trainer(lightning, narrow, epochs=1, accumulate_grad_batches=5).fit(model, batches())
    without, with_penalty = seen
    open_gates = network()[0].gate.g != 0
    torch.testing.assert_close(with_penalty - without, open_gates.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "WeightAveraging"])
def test_averages_of_weights_with_a_cut_at_the_end(lightning, name):
    if not hasattr(lightning.callbacks, name):
        pytest.skip("this version of Lightning has no such callback")
    average = getattr(lightning.callbacks, name)(*((0.05,) if name.startswith("Stochastic") else ()))
    model, narrow = module(lightning), callback(Settings("l1", budget="params: 40%", shrink="end"))
    trainer(lightning, narrow, average).fit(model, batches())
    assert size(narrow.result.small) == pytest.approx(0.4 * size(network()), rel=0.1)


def test_a_network_in_half_precision(lightning):
    model, narrow = module(lightning), callback(ALIKE["budget"])
    trainer(lightning, narrow, precision="bf16-true").fit(model, batches())
    assert model.net[0].weight.dtype == torch.bfloat16 and model.net[0].gate.g.dtype == torch.float32
    assert size(narrow.result.small) == pytest.approx(0.4 * size(network()), rel=0.1)


@pytest.mark.parametrize(
    "name, when",
    [
        ("penalty", "epoch end"),
        ("proximal", "validation end"),
        ("schedule", "epoch end"),
        ("schedule", "validation end"),
        ("schedule", "last step"),
        ("budget", "last step"),
    ],
)
def test_lightning_resumes_to_the_same_weights(lightning, tmp_path, name, when):
    loaders = (batches(), batches()) if when == "validation end" else (batches(),)
    whole, saving = module(lightning), keep_all(lightning, tmp_path, when)
    trainer(lightning, callback(ALIKE[name]), saving, enable_checkpointing=True).fit(whole, *loaders)
    resumed, narrow = module(lightning), callback(ALIKE[name])
    trainer(lightning, narrow).fit(resumed, *loaders, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert_same_weights(whole, resumed)
    assert narrow.result.parameters_full == size(network()) and narrow.result.closed >= 0.2
    assert sum(cut.epoch < 2 for cut in narrow._narrowing.shrinker.events) == 0  # those are the checkpoint's


def test_a_checkpoint_of_a_cut_network(lightning, tmp_path):
    model, narrow = module(lightning), callback(ALIKE["budget"])
    trainer(lightning, narrow, keep_all(lightning, tmp_path), enable_checkpointing=True).fit(model, batches())
    path = tmp_path / "epoch=4.ckpt"
    with pytest.raises(
        RuntimeError, match="size mismatch"
    ):  # the negative control: without the callback it does not fit
        module(lightning).load_state_dict(torch.load(path)["state_dict"])
    fresh = module(lightning)
    (result,) = trainer(lightning, callback(ALIKE["budget"])).validate(fresh, batches(), ckpt_path=path, verbose=False)
    assert_same_weights(fresh, model)
    assert result["loss"] > 0
    with pytest.raises(ValueError, match="freshly built network"):
        trainer(lightning, narrow).fit(model, batches(), ckpt_path=tmp_path / "epoch=0.ckpt")


@pytest.fixture
def nothing_of_ddp_left(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_ddp_is_not_cut_while_it_trains(lightning, nothing_of_ddp_left):
    ddp = {"strategy": "ddp", "devices": 1}
    with pytest.raises(ValueError, match="can't be cut while DDP trains it"):
        trainer(lightning, callback(ALIKE["penalty"]), **ddp).fit(module(lightning), batches())
    model, narrow = module(lightning), callback(Settings("l1", strength=0.02, shrink="end"))
    trainer(lightning, narrow, epochs=1, **ddp).fit(model, batches())
    assert size(narrow.result.small) < 0.85 * size(model.net)


def test_lightning_mistakes_are_named(lightning):
    def fit(model, *callbacks, **options):
        trainer(lightning, *callbacks, **options).fit(model, batches())

    penalty = ALIKE["penalty"]
    plain = module(lightning, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))
    with pytest.raises(ValueError, match="no gates; call attach_gates_ first"):
        fit(plain, callback(penalty))
    with pytest.raises(ValueError, match=r"no network 'net', but has other"):
        renamed = module(lightning)
        renamed.other = renamed._modules.pop("net")
        fit(renamed, callback(penalty))
    with pytest.raises(ValueError, match="example_input_array"):
        fit(module(lightning), callback(penalty, example_inputs=None))
    with pytest.raises(ValueError, match="no optimizer trains the gates"):
        fit(module(lightning, optimizer=lambda m: torch.optim.SGD([m.net[0].weight], 0.1)), callback(penalty))
    with pytest.raises(ValueError, match="max_epochs"):
        fit(module(lightning), callback(ALIKE["budget"]), epochs=-1, max_steps=2)
    with pytest.raises(ValueError, match=r"StochasticWeightAveraging keeps a copy .* Settings\(shrink='end'\)"):
        fit(module(lightning), callback(penalty), lightning.callbacks.StochasticWeightAveraging(0.1))


def test_a_run_that_ends_before_its_budget_is_met_says_so(lightning):
    narrow = callback(ALIKE["budget"])
    with pytest.warns(UserWarning, match=r"training ended before the budget '.*' was met: after 1 of 100 epochs"):
        trainer(lightning, narrow, epochs=100, max_steps=2).fit(module(lightning), batches())
    assert narrow.result is not None


# Hugging Face


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def resnet(transformers, closed=True):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=4, layer_type="basic"
    )
    model = transformers.ResNetForImageClassification(config)
    for gate in ng.attach_gates_(model, init=0.3).modules():
        gate.g.data[:: 5 if closed else 1000] = 0 if closed else 0.3
    return model


def hugging_face(transformers, folder, settings, model, **options):
    from narrowgate.integrations.transformers import NarrowgateCallback

    images, labels = data()
    images = F.interpolate(images, scale_factor=2)
    narrow = NarrowgateCallback(settings, {"pixel_values": images[:2]})
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    saving = {"logging_strategy": "epoch", "save_strategy": "epoch"}
    held_out = options.pop("eval_dataset", None)
    options = {"num_train_epochs": 4, "per_device_train_batch_size": 8, "learning_rate": 0.01, **options}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **quiet, **{**saving, **options})
    rows = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, labels, strict=True)]
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=held_out, callbacks=[narrow]
    ), narrow


@pytest.mark.parametrize(
    "name, options", [("penalty", {}), ("budget", {"bf16": True}), ("proximal", {"save_steps": 5})]
)
def test_hugging_face_narrows_and_resumes(transformers, tmp_path, name, options):
    if "save_steps" in options:  # at the last step of an epoch, before its end
        options = {**options, "save_strategy": "steps"}
    model = resnet(transformers)
    run, narrow = hugging_face(transformers, tmp_path, ALIKE[name], model, **options)
    run.train()
    full = size(resnet(transformers))
    assert size(model) < 0.85 * full and size(narrow.result.small) <= size(model)
    assert "same function" in str(narrow.result)
    assert run.state.log_history[-1]["narrowgate/parameters"] == size(model)
    again = resnet(transformers)
    rest, resumed = hugging_face(transformers, tmp_path, ALIKE[name], again, **options)
    resumed.resume_(rest, tmp_path / "checkpoint-10")
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert_same_weights(model, again)
    assert_same_weights(narrow.result.small, resumed.result.small)
    assert resumed.result.parameters_full == full


def test_without_penalty_and_closed_gates_hugging_face_removes_nothing(transformers, tmp_path):
    model = resnet(transformers, closed=False)
    run, narrow = hugging_face(transformers, tmp_path, Settings("l1", strength=0.0, every=1), model, num_train_epochs=2)
    run.train()
    assert size(narrow.result.small) == size(model) == size(resnet(transformers))


def test_epochs_of_a_dataset_without_a_length_are_counted(transformers, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self, rows):
            self.rows = rows

        def __iter__(self):
            return iter(self.rows)

    seen = []
    for settings in (Settings("l1", lambda epoch: seen.append(epoch) or 0.01, shrink="end"), ALIKE["budget"]):
        run, _ = hugging_face(transformers, tmp_path, settings, resnet(transformers), max_steps=15)
        run.train_dataset = Stream(run.train_dataset)  # five steps an epoch
        if settings.budget:
            with pytest.raises(ValueError, match="a budget needs to know how long the run is"):
                run.train()
        else:
            run.train()
    assert seen == [0, 0, 1, 2]


def test_hugging_face_mistakes_are_named(transformers, tmp_path):
    settings = Settings("l1", strength=0.02, shrink="end")
    run, _ = hugging_face(transformers, tmp_path, settings, resnet(transformers), num_train_epochs=1)
    run.train()
    again, narrow = hugging_face(transformers, tmp_path, settings, resnet(transformers), num_train_epochs=2)
    with pytest.raises(ValueError, match=r"call callback\.resume_"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    state = json.loads((tmp_path / "checkpoint-5" / "narrowgate.json").read_text())
    assert state["epochs"] == 1
    (tmp_path / "checkpoint-5" / "narrowgate.json").write_text('{"shrinker"')
    with pytest.raises(ValueError, match=r"narrowgate\.json is damaged .*; go back to the checkpoint before"):
        narrow.resume_(again, tmp_path / "checkpoint-5")
    (tmp_path / "checkpoint-5" / "narrowgate.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"narrowgate\.json is missing"):
        narrow.resume_(again, tmp_path / "checkpoint-5")
    best = {"load_best_model_at_end": True, "eval_strategy": "epoch", "eval_dataset": run.train_dataset}
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        hugging_face(transformers, tmp_path, ALIKE["penalty"], resnet(transformers), **best)[0].train()
