"""Other people's training loops: accelerate, Trainer, Lightning, Ignite and skorch take the steps of the plain loop.

`plain` is the loop of the design page. Every loop takes its steps bit for bit, or to rounding where it accumulates, and
resumes bit for bit. Where a stock loop cannot do what a rule needs, a test says which way was chosen: the lines of
docs/loops.md, which the tests read from there, or a sentence that names what is missing.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from bayesgrad import optim
from cases import same, states, weights

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* does not support|.* sets all its parameters to -1 or 1"),
    # Lightning's advice about workers, devices and logging, and what it still calls in torch.
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:Warning:(lightning|pytorch_lightning|torch|accelerate)"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found:UserWarning"),
]
PAGE = Path(__file__).parents[2] / "docs" / "loops.md"
D = torch.float64
STEPS, SIZE = 6, 4
RULES: dict[str, Callable[[nn.Module], Any]] = {
    "AdaBayes": lambda model: optim.AdaBayes(model.parameters(), 0.01, batch_size=SIZE, weight_decay=0.1),
    "AdaBayesFP": lambda model: optim.AdaBayesFP(model.named_parameters(), 0.01),
    "KalmanMomentum": lambda model: optim.KalmanMomentum(model.parameters(), 0.01, batch_size=SIZE),
    "FOOF": lambda model: optim.FOOF(model, 0.1),
    "KFAC": lambda model: optim.KFAC(model, 0.01, seed=0),
    "KroneckerFilterFP": lambda model: optim.KroneckerFilterFP(model, 0.01, batch_size=SIZE, seed=0),
    "AdaBayes-sampled": lambda model: optim.AdaBayes(model.parameters(), batch_size=SIZE, fisher="sampled", seed=0),
    "Newton": lambda model: optim.Newton(model.parameters(), 0.1, num_data=100, seed=0),
    "IVON": lambda model: optim.IVON(model.parameters(), 0.1, num_data=100, seed=0),
    "VOGN": lambda model: optim.VOGN(model, 0.1, num_data=100, seed=0),
    "VON": lambda model: optim.VON(model.parameters(), 0.1, num_data=100, seed=0),
    "BayesBiNN": lambda model: optim.BayesBiNN(model.parameters(), 0.01, num_data=100, seed=0),
    "SpikeSlab": lambda model: optim.SpikeSlab(model, 0.01, seed=0),
}
NEEDS = {name: make(nn.Linear(2, 2, bias=False)).needs for name, make in RULES.items() if name not in ("FOOF",)}
DRAWS = [name for name, needs in NEEDS.items() if needs.draws]
OBSERVES = [name for name, needs in NEEDS.items() if not needs.draws and (needs.outputs or needs.loss)]
every_rule = pytest.mark.parametrize("name", RULES)
rules_that_draw = pytest.mark.parametrize("name", DRAWS)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Trainer collects garbage in every run: what exists before, and its own imports, are left out."""
    from transformers import Trainer  # noqa: F401

    gc.freeze()
    yield
    gc.unfreeze()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(D)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * SIZE, 5, generator=generator, dtype=D)
    return TensorDataset(x, torch.randint(0, 3, (len(x),), generator=generator))


def batches() -> DataLoader:
    return DataLoader(data(), SIZE)


def plain(name: str, parts: int = 1, max_norm: float | None = None) -> tuple[nn.Module, Any]:
    """The loop of the design page, with a step for every `parts` batches."""
    model = network()
    optimizer = RULES[name](model)
    for index, (x, y) in enumerate(batches()):
        if index % parts == 0:
            optimizer.zero_grad()
        with optimizer.sampled():
            outputs = model(x)
            loss = cross_entropy(outputs, y) / parts
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        if index % parts == parts - 1:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return model, optimizer


def check(model: nn.Module, optimizer: Any, expected: tuple[nn.Module, Any], exact: bool = True) -> None:
    """Weights, state and number of draws are those of another run."""
    other, plain_optimizer = expected
    found, wanted = ({**weights(net), **states(opt)} for net, opt in ((model, optimizer), expected))
    assert any(value.abs().sum() > 0 for value in states(optimizer).values())
    assert not same(weights(other), weights(network()))
    assert optimizer.draws == plain_optimizer.draws
    if exact:
        assert same(found, wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-14)


def page(heading: str) -> dict[str, Any]:
    """The names that the code of one section of the page defines."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    (source,) = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), names)
    return names


# --- accelerate ---


@pytest.fixture
def accelerator() -> Iterator[Callable[..., Any]]:
    """Makes an Accelerator, each as in a process of its own."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def make(**options: Any) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Accelerator(cpu=True, **options)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerated(
    accelerator: Any, name: str, loader: Any, folder: Path | None = None, resume: bool = False
) -> tuple[nn.Module, Any]:
    """A run that loads from a folder at its beginning, and saves there at its end."""
    model = network()
    own = RULES[name](model)
    if resume:
        accelerator.prepare(model, own)
        accelerator.load_state(str(folder))
        accelerator._optimizers.clear()
        accelerator._models.clear()
    page("accelerate")["train"](accelerator, model, own, loader, cross_entropy)
    if folder is not None:
        accelerator.save_state(str(folder))
    return model, own


@every_rule
def test_accelerate(name: str, accelerator: Any) -> None:
    check(*accelerated(accelerator(), name, batches()), plain(name, 1, 0.5))


@every_rule
def test_accelerate_accumulates(name: str, accelerator: Any) -> None:
    found = accelerated(accelerator(gradient_accumulation_steps=2), name, batches())
    check(*found, plain(name, 2, 0.5), exact=False)


@every_rule
def test_accelerate_resumes(name: str, accelerator: Any, tmp_path: Path) -> None:
    halves = [DataLoader(TensorDataset(*data()[some]), SIZE) for some in (slice(12), slice(12, None))]
    accelerated(accelerator(), name, halves[0], tmp_path)
    check(*accelerated(accelerator(), name, halves[1], tmp_path, resume=True), plain(name, 1, 0.5))


# --- Hugging Face's Trainer ---


class Classifier(nn.Module):
    """As models of transformers are: takes labels, and returns loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def dicts() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for x, y in data()]


def hf_trainer(folder: Path, model: nn.Module, draws: bool = True, arguments: Any = (), **options: Any) -> Any:
    """The Trainer of docs/loops.md, or the stock one, which visits examples in order."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(page("Trainer")["BeliefTrainer"] if draws else Trainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    settings = dict(per_device_train_batch_size=SIZE, num_train_epochs=1, max_grad_norm=0.0, use_cpu=True)
    settings |= dict(report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no") | dict(arguments)
    settings |= dict(output_dir=str(folder), lr_scheduler_type="constant", remove_unused_columns=False)
    return InOrder(model, TrainingArguments(**settings), train_dataset=dicts(), **options)


def constant(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0)


@every_rule
@pytest.mark.parametrize("parts", [1, 2])
def test_trainer(name: str, parts: int, tmp_path: Path) -> None:
    model = Classifier()
    own = RULES[name](model.net)
    arguments = {"gradient_accumulation_steps": parts}
    trainer = hf_trainer(tmp_path, model, arguments=arguments, optimizers=(own, constant(own)))
    trainer.train()
    check(model.net, own, plain(name, parts), exact=parts == 1)


@every_rule
def test_trainer_resumes(name: str, tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    for steps in (3, STEPS):
        model = Classifier()
        own = RULES[name](model.net)
        arguments |= {"max_steps": steps}
        trainer = hf_trainer(tmp_path, model, arguments=arguments, optimizers=(own, constant(own)))
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if steps > 3 else None)
    check(model.net, own, plain(name))


@rules_that_draw
def test_trainer_without_draws_says_what_is_missing(name: str, tmp_path: Path) -> None:
    model = Classifier()
    own = RULES[name](model.net)
    trainer = hf_trainer(tmp_path, model, draws=False, optimizers=(own, constant(own)))
    with pytest.raises(RuntimeError, match=r"inside `with optimizer.sampled\(\):`"):
        trainer.train()


@pytest.mark.parametrize("name", OBSERVES)
def test_trainer_without_observations_says_what_is_missing(name: str, tmp_path: Path) -> None:
    model = Classifier()
    own = RULES[name](model.net)
    trainer = hf_trainer(tmp_path, model, draws=False, optimizers=(own, constant(own)))
    with pytest.raises(RuntimeError, match=r"observe\("):
        trainer.train()


def test_trainer_builds_an_optimizer_with_its_groups(tmp_path: Path) -> None:
    """`weight_decay` of the arguments holds for matrices, as Trainer's groups say."""
    model, other = Classifier(), Classifier()
    kinds = {True: [], False: []}
    for key, p in other.named_parameters():
        kinds[not key.endswith("bias")].append(p)
    groups = [{"params": some, "weight_decay": 0.1 * matrices} for matrices, some in kinds.items()]
    rule = (optim.AdaBayesFP, {"lr": 0.01, "betas": (0.9, 0.99)})
    hf_trainer(tmp_path, model, False, {"weight_decay": 0.1}, optimizer_cls_and_kwargs=rule).train()
    optimizer = optim.AdaBayesFP(groups, 0.01, betas=(0.9, 0.99))
    own = hf_trainer(tmp_path, other, False, optimizers=(optimizer, constant(optimizer)))
    own.train()
    assert same(weights(model), weights(other))
    assert not same(weights(model), weights(Classifier()))


def test_trainer_builds_a_rule_that_takes_the_model_by_a_factory(tmp_path: Path) -> None:
    """Trainer gives its groups to classes and the model to factories, which state weight_decay themselves."""
    model, other = Classifier(), Classifier()
    factory = (lambda: optim.FOOF, {"lr": 0.1, "weight_decay": 0.1})
    hf_trainer(tmp_path, model, False, optimizer_cls_and_kwargs=factory).train()
    optimizer = optim.FOOF(other, 0.1, weight_decay=0.1)
    hf_trainer(tmp_path, other, False, optimizers=(optimizer, constant(optimizer))).train()
    assert same(weights(model), weights(other))
    with pytest.raises(TypeError, match=r"FOOF takes the model, not its parameters, got list"):
        hf_trainer(tmp_path, model, False, optimizer_cls_and_kwargs=(optim.FOOF, {"lr": 0.1})).train()


@pytest.mark.parametrize(("rule", "options"), [("IVON", {"num_data": 100}), ("BayesBiNN", {"num_data": 100})])
def test_trainer_tells_a_rule_with_a_prior_that_it_has_no_weight_decay(rule: str, options: Any, tmp_path: Path) -> None:
    cls = (getattr(optim, rule), {"lr": 0.1, **options})
    hf_trainer(tmp_path, Classifier(), arguments={"weight_decay": 0.0}, optimizer_cls_and_kwargs=cls).train()
    with pytest.raises(ValueError, match=r"weight_decay must be 0, because the prior decays weights, got 0.1\."):
        hf_trainer(tmp_path, Classifier(), arguments={"weight_decay": 0.1}, optimizer_cls_and_kwargs=cls).train()


# --- Lightning ---


def lightning(name: str, folder: Path, automatic: bool = True, **options: Any) -> tuple[Any, Any]:
    """The module of docs/loops.md, and a trainer."""
    import pytorch_lightning as pl

    module = page("Lightning")["BeliefModule"](network(), cross_entropy, RULES[name], automatic)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1)
    trainer = pl.Trainer(default_root_dir=folder, precision="64-true", **{"max_epochs": 1, **quiet, **options})
    return module, trainer


@every_rule
@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_lightning(name: str, automatic: bool, tmp_path: Path) -> None:
    module, trainer = lightning(name, tmp_path, automatic, enable_checkpointing=False)
    trainer.fit(module, batches())
    check(module.net, trainer.optimizers[0], plain(name))


@pytest.mark.parametrize("name", [name for name in RULES if name not in DRAWS])
def test_lightning_accumulates(name: str, tmp_path: Path) -> None:
    module, trainer = lightning(name, tmp_path, accumulate_grad_batches=2, enable_checkpointing=False)
    trainer.fit(module, batches())
    check(module.net, trainer.optimizers[0], plain(name, 2), exact=False)


@rules_that_draw
def test_lightning_cannot_draw_where_it_accumulates(name: str, tmp_path: Path) -> None:
    """All but the last micro-batch run outside of step(closure), at the mean: accumulate in manual optimisation."""
    module, trainer = lightning(name, tmp_path, accumulate_grad_batches=2, enable_checkpointing=False)
    expected = network()
    RULES[name](expected)  # which makes weights binary, for some
    with pytest.raises(RuntimeError, match=r"inside `with optimizer.sampled\(\):`"):
        trainer.fit(module, batches())
    assert same(weights(module.net), weights(expected))


@rules_that_draw
def test_lightning_without_draws_says_what_is_missing(name: str, tmp_path: Path) -> None:
    module, trainer = lightning(name, tmp_path, automatic=False, enable_checkpointing=False)

    def training_step(batch: Any, batch_idx: int = 0) -> None:
        optimizer, (x, y) = module.optimizers(), batch
        optimizer.zero_grad()
        module.manual_backward(cross_entropy(module.net(x), y))
        optimizer.step()

    module.training_step = training_step
    with pytest.raises(RuntimeError, match=r"inside `with optimizer.sampled\(\):`"):
        trainer.fit(module, batches())


@every_rule
def test_lightning_resumes(name: str, tmp_path: Path) -> None:
    options = dict(limit_train_batches=3, enable_checkpointing=False)
    first, trainer = lightning(name, tmp_path, **options)
    trainer.fit(first, batches())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    through, trainer = lightning(name, tmp_path, max_epochs=2, **options)
    trainer.fit(through, batches())
    module, resumed = lightning(name, tmp_path, max_epochs=2, **options)
    resumed.fit(module, batches(), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    check(module.net, resumed.optimizers[0], (through.net, trainer.optimizers[0]))
    assert not same(weights(module.net), weights(first.net))


# --- Ignite ---


@pytest.mark.parametrize("name", [name for name in RULES if name not in DRAWS])
@pytest.mark.parametrize("parts", [1, 2])
def test_ignite(name: str, parts: int) -> None:
    """The stock trainer; a loss function can observe."""
    from ignite.engine import create_supervised_trainer

    model = network()
    own = RULES[name](model)

    def loss_fn(outputs: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(outputs, y)
        own.observe(outputs, loss=loss)
        return loss

    create_supervised_trainer(model, own, loss_fn, gradient_accumulation_steps=parts).run(batches())
    check(model, own, plain(name, parts), exact=parts == 1)


@rules_that_draw
def test_ignite_without_draws_says_what_is_missing(name: str) -> None:
    from ignite.engine import create_supervised_trainer

    model = network()
    trainer = create_supervised_trainer(model, RULES[name](model), cross_entropy)
    trainer.logger.disabled = True  # it prints the traceback
    with pytest.raises(RuntimeError, match=r"inside `with optimizer.sampled\(\):`"):
        trainer.run(batches())


@every_rule
def test_ignite_with_an_update_function_resumes(name: str, tmp_path: Path) -> None:
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    for begin, end in ((0, 3), (3, STEPS)):
        model = network()
        own = RULES[name](model)

        trainer = Engine(page("Ignite")["update_function"](model, own, cross_entropy))
        saved = {"model": model, "optimizer": own, "trainer": trainer}
        if begin:
            (path,) = tmp_path.glob("*.pt")
            Checkpoint.load_objects({"model": model, "optimizer": own}, torch.load(path, weights_only=True))
        handler = Checkpoint(saved, DiskSaver(str(tmp_path), require_empty=False))
        trainer.add_event_handler(Events.COMPLETED, handler)
        trainer.run(list(batches())[begin:end])
    check(model, own, plain(name))


# --- skorch ---


def skorch(name: str) -> Any:
    """The classifier of docs/loops.md, which visits examples in order."""
    options = dict(criterion=nn.CrossEntropyLoss, batch_size=SIZE, max_epochs=1, train_split=None, verbose=0)
    options |= dict(optimizer=lambda model, lr: RULES[name](model), iterator_train__shuffle=False)
    return page("skorch")["BeliefClassifier"](network(), **options)


@every_rule
def test_skorch(name: str) -> None:
    """skorch passes a closure, so that it draws by itself."""
    x, y = data().tensors
    net = skorch(name).fit(x, y)
    check(net.module_, net.optimizer_, plain(name))


@every_rule
def test_skorch_resumes(name: str, tmp_path: Path) -> None:
    x, y = data().tensors
    files = {"f_params": str(tmp_path / "model.pt"), "f_optimizer": str(tmp_path / "optimizer.pt")}
    first = skorch(name).fit(x[: 3 * SIZE], y[: 3 * SIZE])
    first.save_params(**files)
    second = skorch(name).initialize()
    second.load_params(**files)
    second.partial_fit(x[3 * SIZE :], y[3 * SIZE :])
    check(second.module_, second.optimizer_, plain(name))


def test_skorch_passes_options_to_a_rule_that_takes_parameters() -> None:
    from skorch import NeuralNetClassifier

    options = dict(criterion=nn.CrossEntropyLoss, batch_size=SIZE, max_epochs=1, train_split=None, verbose=0)
    options |= dict(optimizer=optim.IVON, lr=0.1, optimizer__num_data=100, optimizer__seed=0)
    net = NeuralNetClassifier(network(), iterator_train__shuffle=False, **options).fit(*data().tensors)
    check(net.module_, net.optimizer_, plain("IVON"))
    with pytest.raises(TypeError, match=r"FOOF takes the model, not its parameters, got list"):
        NeuralNetClassifier(network(), optimizer=optim.FOOF).initialize()
