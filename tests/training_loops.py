"""The training loops of accelerate, Trainer, Lightning, Ignite and skorch, and the plain loop that they have to equal.

Each of `LOOPS` is a function (rule, `Run`) -> model and optimizer, with stock classes and `bayesgrad.integrations`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from bayesgrad import optim
from bayesgrad.integrations import attach
from cases import weights

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

D = torch.float64
STEPS, SIZE = 6, 4
RULES: dict[str, Callable[[nn.Module], Any]] = {
    "AdaBayes": lambda model: optim.AdaBayes(model.parameters(), 0.01, batch_size=SIZE, weight_decay=0.1),
    "AdaBayesFP": lambda model: optim.AdaBayesFP(model.named_parameters(), 0.01, batch_size=SIZE),
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
TABLE = ["AdaBayesFP", "IVON", "VOGN", "FOOF", "KFAC", "KroneckerFilterFP", "KalmanMomentum"]  # of docs/loops.md


@dataclass
class Run:
    """What a loop has to do.

    Args:
        folder: for checkpoints.
        parts: micro-batches of a step.
        clip: the largest norm of a gradient, for loops that clip.
        half: None for all data; 0 for the first half, saved at its end; 1 for the second half, loaded before it.
        seen: the weights of each forward pass in evaluation mode, for a run that evaluates after training.
    """

    folder: Path
    parts: int = 1
    clip: float | None = None
    half: int | None = None
    seen: list[dict[str, Tensor]] | None = None
    data: TensorDataset = field(init=False)

    def __post_init__(self) -> None:
        whole = examples()
        some = {None: slice(None), 0: slice(STEPS * SIZE // 2), 1: slice(STEPS * SIZE // 2, None)}[self.half]
        self.data = TensorDataset(*whole[some])

    def loader(self) -> DataLoader:
        return DataLoader(self.data, SIZE)

    def network(self) -> nn.Module:
        net = network()
        if self.seen is not None:
            net.register_forward_hook(self._note)
        return net

    def _note(self, net: nn.Module, *_: Any) -> None:
        if not net.training and self.seen is not None:
            self.seen.append(weights(net))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(D)


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * SIZE, 5, generator=generator, dtype=D)
    return TensorDataset(x, torch.randint(0, 3, (len(x),), generator=generator))


class Classifier(nn.Module):
    """As models of transformers are: takes labels, and returns loss and logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def plain(name: str, parts: int = 1, clip: float | None = None) -> tuple[nn.Module, Any]:
    """The loop of docs/design.md, with a step for every `parts` batches."""
    model = network()
    optimizer = RULES[name](model)
    for index, (x, y) in enumerate(DataLoader(examples(), SIZE)):
        if index % parts == 0:
            optimizer.zero_grad()
        with optimizer.sampled():
            outputs = model(x)
            loss = cross_entropy(outputs, y) / parts
            optimizer.observe(outputs, loss=loss)
            loss.backward()
        if index % parts == parts - 1:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model, optimizer


def attached(name: str, run: Run) -> tuple[nn.Module, Any]:
    """The loop of torch's tutorials."""
    model = run.network()
    own = RULES[name](model)
    whole = Classifier(model)
    attach(own, whole)
    if run.half == 1:
        saved = torch.load(run.folder / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        own.load_state_dict(saved["optimizer"])
        own.train()
    for index, (x, y) in enumerate(run.loader()):
        loss = whole(x, labels=y)["loss"] / run.parts
        loss.backward()
        if index % run.parts == run.parts - 1:
            if run.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            own.step()
            own.zero_grad()
    if run.seen is not None or run.half == 0:
        own.eval()
        whole.eval()
        whole(x, labels=y)
    if run.half == 0:
        torch.save({"model": model.state_dict(), "optimizer": own.state_dict()}, run.folder / "state.pt")
    return model, own


def accelerated(name: str, run: Run) -> tuple[nn.Module, Any]:
    """The loop of accelerate's quick tour."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=run.parts)
    net = run.network()
    own = RULES[name](net)
    model, optimizer, loader = accelerator.prepare(Classifier(net), own, run.loader())
    attach(optimizer, model)
    if run.half == 1:
        accelerator.load_state(str(run.folder))
    model.train()
    optimizer.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = model(x, labels=y)["loss"]
            accelerator.backward(loss)
            if run.clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), run.clip)
            optimizer.step()
            optimizer.zero_grad()
    if run.seen is not None or run.half == 0:
        model.eval()
        optimizer.eval()
        model(x, labels=y)
    if run.half == 0:
        accelerator.save_state(str(run.folder))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return net, own


def dicts(data: TensorDataset) -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for x, y in data]


def constant(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1.0)


def hf_trainer(folder: Path, model: nn.Module, arguments: Any = (), **options: Any) -> Any:
    """The stock Trainer, but for the order of examples."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    settings = dict(per_device_train_batch_size=SIZE, num_train_epochs=1, max_grad_norm=0.0, use_cpu=True)
    settings |= dict(report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no") | dict(arguments)
    settings |= dict(output_dir=str(folder), lr_scheduler_type="constant", remove_unused_columns=False)
    return InOrder(model, TrainingArguments(**settings), **{"train_dataset": dicts(examples()), **options})


def trained(name: str, run: Run) -> tuple[nn.Module, Any]:
    """Trainer, with the callback."""
    from bayesgrad.integrations.huggingface import BeliefTrainerCallback

    net = run.network()
    own = RULES[name](net)
    arguments: dict[str, Any] = {"gradient_accumulation_steps": run.parts, "max_grad_norm": run.clip or 0.0}
    if run.half is not None:
        steps = STEPS // run.parts
        arguments |= {"save_strategy": "steps", "save_steps": 3, "max_steps": steps if run.half else steps // 2}
    if run.seen is not None:
        arguments["eval_strategy"] = "epoch"
    options = {
        "optimizers": (own, constant(own)),
        "callbacks": [BeliefTrainerCallback()],
        "eval_dataset": dicts(run.data),
    }
    trainer = hf_trainer(run.folder, Classifier(net), arguments, **options)
    trainer.train(resume_from_checkpoint=str(run.folder / "checkpoint-3") if run.half else None)
    if run.seen is not None:  # the model is left with these weights
        run.seen.append(weights(net))
    return net, own


def lit_module(net: nn.Module, make: Callable[[nn.Module], Any], *, mixin: bool = False) -> Any:
    """A LightningModule without a line of this package; with `mixin`, with its base class."""
    import pytorch_lightning as pl

    from bayesgrad.integrations.lightning import BeliefModuleMixin

    class Module(*([BeliefModuleMixin] if mixin else []), pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def configure_optimizers(self) -> Any:
            return make(self.net)

        def training_step(self, batch: Any, index: int) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    return Module()


def lightning_trainer(folder: Path, **options: Any) -> Any:
    import pytorch_lightning as pl

    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", devices=1)
    quiet |= dict(enable_checkpointing=False, num_sanity_val_steps=0, max_epochs=1, precision="64-true")
    return pl.Trainer(default_root_dir=folder, **{**quiet, **options})


def lightning(name: str, run: Run) -> tuple[nn.Module, Any]:
    """Automatic optimisation."""
    from bayesgrad.integrations.lightning import BeliefLightningCallback

    mixin = run.half is None  # both ways
    options: dict[str, Any] = dict(accumulate_grad_batches=run.parts, gradient_clip_val=run.clip)
    options |= dict(
        callbacks=[] if mixin else [BeliefLightningCallback()], max_epochs=1 if run.half is None else run.half + 1
    )
    module = lit_module(run.network(), RULES[name], mixin=mixin)
    trainer = lightning_trainer(run.folder, **options)
    loaders = [run.loader(), *([run.loader()] if run.seen is not None else [])]
    if run.half == 0:  # saved in training, when weights are those to train with
        trainer.callbacks.append(_saving(run.folder / "last.ckpt"))
    ckpt = {"ckpt_path": run.folder / "last.ckpt", "weights_only": True} if run.half else {}
    trainer.fit(module, *loaders, **ckpt)
    if run.seen is not None:
        run.seen.append(weights(module.net))
    return module.net, trainer.optimizers[0]


def _saving(path: Path) -> Any:
    import pytorch_lightning as pl

    class Saving(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(path)

    return Saving()


def ignited(name: str, run: Run) -> tuple[nn.Module, Any]:
    """The stock trainer of Ignite."""
    from ignite.engine import create_supervised_trainer
    from ignite.handlers import Checkpoint, DiskSaver

    net = run.network()
    own = RULES[name](net)
    attach(own, net)

    def loss_fn(outputs: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(outputs, y)
        if own.needs.loss:
            own.observe(outputs, loss=loss)
        return loss

    trainer = create_supervised_trainer(net, own, loss_fn, gradient_accumulation_steps=run.parts)
    objects = {"model": net, "optimizer": own}
    if run.half == 1:
        (path,) = run.folder.glob("*.pt")
        Checkpoint.load_objects(objects, torch.load(path, weights_only=True))
        own.train()
    trainer.run(run.loader())
    if run.seen is not None or run.half == 0:
        own.eval()
        net.eval()
        net(run.data.tensors[0])
    if run.half == 0:
        Checkpoint({**objects, "trainer": trainer}, DiskSaver(str(run.folder), require_empty=False))(trainer)
    return net, own


SKORCH: dict[str, tuple[type, dict[str, Any]]] = {
    "AdaBayes": (optim.AdaBayes, dict(lr=0.01, weight_decay=0.1)),
    "AdaBayesFP": (optim.AdaBayesFP, dict(lr=0.01)),
    "KalmanMomentum": (optim.KalmanMomentum, dict(lr=0.01)),
    "FOOF": (optim.FOOF, dict(lr=0.1)),
    "KFAC": (optim.KFAC, dict(lr=0.01, seed=0)),
    "KroneckerFilterFP": (optim.KroneckerFilterFP, dict(lr=0.01, seed=0)),
    "AdaBayes-sampled": (optim.AdaBayes, dict(lr=0.001, fisher="sampled", seed=0)),
    "Newton": (optim.Newton, dict(lr=0.1, num_data=100, seed=0)),
    "IVON": (optim.IVON, dict(lr=0.1, num_data=100, seed=0)),
    "VOGN": (optim.VOGN, dict(lr=0.1, num_data=100, seed=0)),
    "VON": (optim.VON, dict(lr=0.1, num_data=100, seed=0)),
    "BayesBiNN": (optim.BayesBiNN, dict(lr=0.01, num_data=100, seed=0)),
    "SpikeSlab": (optim.SpikeSlab, dict(lr=0.01, seed=0)),
}


def skorch_net(name: str, net: nn.Module, **more: Any) -> Any:
    from bayesgrad.integrations.skorch import BeliefClassifier

    kind, options = SKORCH[name]
    settings = dict(criterion=nn.CrossEntropyLoss, batch_size=SIZE, max_epochs=1, train_split=None, verbose=0)
    settings |= dict(optimizer=kind, iterator_train__shuffle=False)
    settings |= {f"optimizer__{key}": value for key, value in options.items()} | more
    return BeliefClassifier(
        net, **{key: value for key, value in settings.items() if value is not None or key == "train_split"}
    )


def skorched(name: str, run: Run) -> tuple[nn.Module, Any]:
    """The estimator."""
    net = skorch_net(name, run.network()).initialize()
    files = {"f_params": str(run.folder / "model.pt"), "f_optimizer": str(run.folder / "optimizer.pt")}
    if run.half == 1:
        net.load_params(**files)
    net.partial_fit(*run.data.tensors)
    if run.seen is not None:
        net.predict(run.data.tensors[0])
    if run.half == 0:
        net.save_params(**files)
    return net.module_, net.optimizer_


LOOPS: dict[str, Callable[[str, Run], tuple[nn.Module, Any]]] = {
    "torch": attached,
    "accelerate": accelerated,
    "Trainer": trained,
    "Lightning": lightning,
    "Ignite": ignited,
    "skorch": skorched,
}
CLIPS = ("torch", "accelerate", "Trainer", "Lightning")  # the others have no option for it
ACCUMULATES = (*CLIPS, "Ignite")
