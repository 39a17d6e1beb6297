"""`bayesgrad.integrations`: other people's training loops take the steps of the plain loop.

The table of docs/loops.md, run with the real packages: each loop trains as the plain loop does, bit for bit, or to
rounding where it accumulates; resumes bit for bit; evaluates at the weights to evaluate with.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from bayesgrad import Posterior, optim
from bayesgrad.integrations import attach, report
from cases import same, states, weights
from training_loops import (
    ACCUMULATES,
    CLIPS,
    LOOPS,
    RULES,
    SIZE,
    STEPS,
    TABLE,
    Classifier,
    Run,
    constant,
    dicts,
    examples,
    hf_trainer,
    lightning_trainer,
    lit_module,
    network,
    plain,
    skorch_net,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* trains .* by |.* sets all its parameters to -1 or 1"),
    # Lightning's advice about workers, devices and logging, and what it still calls in torch.
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:Warning:(lightning|pytorch_lightning|torch|accelerate)"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator is found:UserWarning"),
]
every_rule = pytest.mark.parametrize("name", RULES)
table = pytest.mark.parametrize("name", TABLE)
every_loop = pytest.mark.parametrize("loop", LOOPS)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Trainer collects garbage in every run: what exists before, and its own imports, are left out."""
    from transformers import Trainer  # noqa: F401

    gc.freeze()
    yield
    gc.unfreeze()


def check(found: tuple[nn.Module, Any], expected: tuple[nn.Module, Any], exact: bool = True) -> None:
    """Weights to train with, state and number of draws are those of another run."""
    (_, optimizer), (other, plain_optimizer) = found, expected
    optimizer.train()
    mine, wanted = ({**weights(net), **states(opt)} for net, opt in (found, expected))
    assert any(value.abs().sum() > 0 for value in states(optimizer).values())
    assert not same(weights(other), weights(network()))
    assert optimizer.draws == plain_optimizer.draws
    if exact:
        assert same(mine, wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-12, atol=1e-14)


@every_loop
@every_rule
def test_training(loop: str, name: str, tmp_path: Path) -> None:
    clip = 0.5 if loop in CLIPS else None
    check(LOOPS[loop](name, Run(tmp_path, clip=clip)), plain(name, 1, clip))


@pytest.mark.parametrize("loop", ACCUMULATES)
@every_rule
def test_accumulation(loop: str, name: str, tmp_path: Path) -> None:
    """Also where the loop clips inside of the closure, as Lightning does."""
    clip = 0.5 if loop in CLIPS else None
    check(LOOPS[loop](name, Run(tmp_path, parts=2, clip=clip)), plain(name, 2, clip), exact=False)


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the network in the checkpoint of any loop."""
    names = ("model.safetensors", "model.pt", "state.pt", "last.ckpt", "checkpoint*.pt")
    (path,) = [path for name in names for path in folder.rglob(name)]
    if path.suffix == ".safetensors":
        found = load_file(path)
    else:
        found = torch.load(path, weights_only=True)
        found = found.get("model", found.get("state_dict", found))
    return {key.removeprefix("net."): value for key, value in found.items()}


@every_loop
@table
def test_resuming(loop: str, name: str, tmp_path: Path) -> None:
    """Checkpoints are written with the weights to evaluate with."""
    first, own = LOOPS[loop](name, Run(tmp_path, half=0))
    own.eval()
    assert same(saved_weights(tmp_path), weights(first))
    check(LOOPS[loop](name, Run(tmp_path, half=1)), plain(name))


@every_loop
@table
def test_evaluation(loop: str, name: str, tmp_path: Path) -> None:
    """KalmanMomentum's weights in training are ahead of the posterior mean."""
    run = Run(tmp_path, seen=[])
    LOOPS[loop](name, run)
    model, optimizer = plain(name)
    if name == "KalmanMomentum":
        before = weights(model)
        optimizer.eval()
        assert not same(before, weights(model))
    assert run.seen
    for seen in run.seen:
        assert same(seen, weights(model))


# --- Hugging Face's Trainer ---


def test_trainer_needs_the_callback_for_draws_and_says_so(tmp_path: Path) -> None:
    net = network()
    own = RULES["IVON"](net)
    with pytest.raises(RuntimeError, match=r"integrations.attach\(optimizer, model\)"):
        hf_trainer(tmp_path, Classifier(net), optimizers=(own, constant(own))).train()


def test_trainer_saves_the_posterior_beside_the_checkpoint_and_logs(tmp_path: Path) -> None:
    from bayesgrad.integrations.huggingface import POSTERIOR, BeliefTrainerCallback

    net = network()
    own = RULES["IVON"](net)
    logged: list[Any] = []
    callback = BeliefTrainerCallback(save_posterior=True, log=lambda values, *, step: logged.append((step, values)))
    arguments = {"save_strategy": "steps", "save_steps": 6, "logging_strategy": "steps", "logging_steps": 2}
    model = Classifier(net)
    trainer = hf_trainer(tmp_path, model, arguments, optimizers=(own, constant(own)), callbacks=[callback])
    trainer.train()
    saved, expected = Posterior.load(tmp_path / "checkpoint-6" / POSTERIOR, model), own.posterior(model)
    assert same(dict(saved.mean), dict(expected.mean))
    assert same(dict(saved.variance()), dict(expected.variance()))
    assert [step for step, _ in logged] == [2, 4, 6]
    assert all(values["temperature"] == 1.0 and values["effective_lr"] > 0 for _, values in logged)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["effective_lr"] for row in rows] == [values["effective_lr"] for _, values in logged]


@pytest.mark.parametrize("last", [4, 6])
def test_trainer_ends_at_the_best_model(last: int, tmp_path: Path) -> None:
    """It loads the weights of a checkpoint, which are those to evaluate with, whatever mode the optimizer is in."""
    from bayesgrad.integrations.huggingface import BeliefTrainerCallback

    net = network()
    own = RULES["KalmanMomentum"](net)
    arguments = dict(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, max_steps=last - 1)
    arguments |= dict(load_best_model_at_end=True, metric_for_best_model="loss")
    options = {
        "optimizers": (own, constant(own)),
        "callbacks": [BeliefTrainerCallback()],
        "eval_dataset": dicts(examples()),
    }
    trainer = hf_trainer(tmp_path, Classifier(net), arguments, **options)
    trainer.train()
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    assert same(weights(trainer.model), best)
    trainer.evaluate()
    assert same(weights(trainer.model), best)


def test_trainer_builds_an_optimizer_with_its_groups(tmp_path: Path) -> None:
    """`weight_decay` of the arguments holds for matrices, as Trainer's groups say."""
    model, other = Classifier(network()), Classifier(network())
    kinds = {True: [], False: []}
    for key, p in other.named_parameters():
        kinds[not key.endswith("bias")].append(p)
    groups = [{"params": some, "weight_decay": 0.1 * matrices} for matrices, some in kinds.items()]
    rule = (optim.AdaBayesFP, {"lr": 0.01, "betas": (0.9, 0.99)})
    hf_trainer(tmp_path, model, {"weight_decay": 0.1}, optimizer_cls_and_kwargs=rule).train()
    optimizer = optim.AdaBayesFP(groups, 0.01, betas=(0.9, 0.99))
    hf_trainer(tmp_path, other, optimizers=(optimizer, constant(optimizer))).train()
    assert same(weights(model), weights(other))
    assert not same(weights(model), weights(Classifier(network())))


def test_trainer_builds_a_rule_that_takes_the_model_by_a_factory(tmp_path: Path) -> None:
    """Trainer gives its groups to classes and the model to factories, which state weight_decay themselves."""
    model, other = Classifier(network()), Classifier(network())
    factory = (lambda: optim.FOOF, {"lr": 0.1, "weight_decay": 0.1})
    hf_trainer(tmp_path, model, optimizer_cls_and_kwargs=factory).train()
    optimizer = optim.FOOF(other, 0.1, weight_decay=0.1)
    hf_trainer(tmp_path, other, optimizers=(optimizer, constant(optimizer))).train()
    assert same(weights(model), weights(other))
    with pytest.raises(TypeError, match=r"FOOF takes the model, not its parameters, got list"):
        hf_trainer(tmp_path, model, optimizer_cls_and_kwargs=(optim.FOOF, {"lr": 0.1})).train()


@pytest.mark.parametrize(("rule", "options"), [("IVON", {"num_data": 100}), ("BayesBiNN", {"num_data": 100})])
def test_trainer_tells_a_rule_with_a_prior_that_it_has_no_weight_decay(rule: str, options: Any, tmp_path: Path) -> None:
    from bayesgrad.integrations.huggingface import BeliefTrainerCallback

    def train(decay: float) -> None:
        kind = (getattr(optim, rule), {"lr": 0.1, **options})
        options_of_trainer = {"optimizer_cls_and_kwargs": kind, "callbacks": [BeliefTrainerCallback()]}
        hf_trainer(tmp_path, Classifier(network()), {"weight_decay": decay}, **options_of_trainer).train()

    train(0.0)
    with pytest.raises(ValueError, match=r"weight_decay must be 0, because the prior decays weights, got 0.1\."):
        train(0.1)


def tiny(kind: str) -> Any:
    """A model of transformers from its configuration, without dropout; with LoRA adapters for "lora"."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = dict(vocab_size=11, bos_token_id=0, eos_token_id=0)
    if kind == "bert":
        sizes = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=8)
        sizes |= dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, num_labels=3)
        return BertForSequenceClassification(BertConfig(vocab_size=11, **sizes)).double()
    small |= dict(n_embd=8, n_layer=1, n_head=2, n_positions=8, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    model = GPT2LMHeadModel(GPT2Config(**small)).double()
    adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(model, adapters) if kind == "lora" else model


def tokens(kind: str) -> list[dict[str, Any]]:
    """Sequences with padding, whose labels are -100."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(8):
        ids, mask = torch.randint(1, 11, (6,), generator=generator), torch.ones(6, dtype=torch.long)
        mask[6 - i % 3 :] = 0
        labels = torch.tensor(i % 3) if kind == "bert" else torch.where(mask == 1, ids, -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


LANGUAGE_RULES = {
    "AdaBayesFP": lambda model: optim.AdaBayesFP(model, 0.01),
    "IVON": lambda model: optim.IVON(model, 0.1, num_data=40, seed=0),
    "KalmanMomentum": lambda model: optim.KalmanMomentum(model, 0.01, batch_size=20),
    "FOOF": lambda model: optim.FOOF(model, 0.01, damping=1.0),
    "KFAC": lambda model: optim.KFAC(model, 1e-4, damping=1.0, seed=0),
    "KroneckerFilterFP": lambda model: optim.KroneckerFilterFP(model, 0.01, batch_size=20, seed=0),
    "KroneckerFilterFP-empirical": lambda model: optim.KroneckerFilterFP(
        model, 0.01, batch_size=20, fisher="empirical"
    ),
    "OGN": lambda model: optim.OGN(model, 0.1, num_data=40),
    "VOGN": lambda model: optim.VOGN(model, 0.1, num_data=40, seed=0),
}


@pytest.mark.parametrize("kind", ["bert", "gpt2", "lora"])
@pytest.mark.parametrize("name", LANGUAGE_RULES)
def test_trainer_with_models_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    """The plain loop, written out with masks and with the loss per token, takes the same steps."""
    from bayesgrad.integrations.huggingface import BeliefTrainerCallback

    model = tiny(kind)
    own = LANGUAGE_RULES[name](model)
    options = {
        "optimizers": (own, constant(own)),
        "callbacks": [BeliefTrainerCallback()],
        "train_dataset": tokens(kind),
    }
    hf_trainer(tmp_path, model, **options).train()
    own.train()

    other = tiny(kind).train()
    expected = LANGUAGE_RULES[name](other)
    for start in range(0, 8, SIZE):
        rows = tokens(kind)[start : start + SIZE]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        labels = batch.pop("labels")
        with expected.sampled():
            expected.zero_grad()
            logits = other(**batch).logits
            if kind == "bert":
                expected.observe(logits)
                loss = cross_entropy(logits, labels)
            else:
                counted = torch.cat([labels[:, 1:] != -100, torch.zeros(SIZE, 1, dtype=torch.bool)], 1)
                expected.observe(logits, weights=counted)
                total = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")
                loss = total / (labels != -100).sum()  # as Trainer counts tokens
            loss.backward()
        expected.step()
    for key, value in weights(other).items():
        torch.testing.assert_close(weights(model)[key], value, rtol=1e-10, atol=1e-12)
    changed = [key for key, value in weights(tiny(kind)).items() if not torch.equal(value, weights(model)[key])]
    assert changed
    assert kind != "lora" or all("lora" in key for key in changed)
    if kind == "lora" and name == "IVON":
        assert set(own.posterior(model).mean) == {key for key in weights(model) if "lora" in key}


@pytest.mark.parametrize(
    ("name", "processes", "average"), [("Newton", 2, True), ("Newton", 2, False), ("IVON", 2, True)]
)
def test_trainer_that_multiplies_the_loss_by_the_number_of_processes_is_refused(
    name: str, processes: int, average: bool
) -> None:
    """It does so after the model has returned the loss, of which the Hessian would be too small."""
    from bayesgrad.integrations.huggingface import BeliefTrainerCallback

    net = network()
    own = RULES[name](net)
    arguments = SimpleNamespace(world_size=processes, average_tokens_across_devices=average)
    words = r"Newton needs second .* use TrainingArguments\(average_tokens_across_devices=False\)\."
    with pytest.raises(ValueError, match=words) if name == "Newton" and average else nullcontext():
        BeliefTrainerCallback().on_train_begin(arguments, None, None, optimizer=own, model=Classifier(net))
    assert (own.attachment is None) == (name == "Newton" and average)


@pytest.mark.parametrize(("name", "enabled"), [("Newton", True), ("Newton", False), ("IVON", True)])
def test_a_prepared_optimizer_with_a_scaler_is_refused_by_rules_that_need_the_loss(name: str, enabled: bool) -> None:
    """accelerate multiplies the loss by the scale and divides it by micro-batches, which its product does not tell."""
    net = network()
    own = RULES[name](net)
    prepared = SimpleNamespace(optimizer=own, scaler=torch.amp.GradScaler("cpu", enabled=enabled))
    words = r"Newton needs second derivatives of the loss.* use mixed_precision='bf16' or 'no'"
    with pytest.raises(ValueError, match=words) if name == "Newton" and enabled else nullcontext():
        attach(prepared, Classifier(net))


# --- Lightning ---


@pytest.mark.parametrize("parts", [1, 2])
def test_lightning_draws_for_layers_that_training_step_calls(parts: int, tmp_path: Path) -> None:
    """No forward pass of a module that has all parameters begins."""
    import pytorch_lightning as pl

    from bayesgrad.integrations.lightning import BeliefModuleMixin

    class Module(BeliefModuleMixin, pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first, _, self.last = network()

        def configure_optimizers(self) -> Any:
            return RULES["IVON"](self)

        def training_step(self, batch: Any, index: int) -> Any:
            return {"loss": cross_entropy(self.last(self.first(batch[0]).tanh()), batch[1])}

    module = Module()
    trainer = lightning_trainer(tmp_path, accumulate_grad_batches=parts)
    trainer.fit(module, Run(tmp_path).loader())
    assert "training_step" not in vars(module)
    net = nn.Sequential(module.first, nn.Tanh(), module.last)
    check((net, trainer.optimizers[0]), plain("IVON", parts), exact=parts == 1)


@pytest.mark.parametrize("name", TABLE)
def test_lightning_manual_optimisation(name: str, tmp_path: Path) -> None:
    from bayesgrad.integrations.lightning import BeliefLightningCallback

    module = lit_module(network(), RULES[name])
    module.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int = 0) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(cross_entropy(module.net(batch[0]), batch[1]))
        optimizer.step()

    module.training_step = training_step
    trainer = lightning_trainer(tmp_path, callbacks=[BeliefLightningCallback()])
    trainer.fit(module, Run(tmp_path).loader())
    check((module.net, trainer.optimizers[0]), plain(name))


def test_lightning_saves_the_posterior_and_logs(tmp_path: Path) -> None:
    from pytorch_lightning.loggers import CSVLogger

    from bayesgrad.integrations.lightning import BeliefLightningCallback

    module = lit_module(network(), RULES["IVON"])
    logger = CSVLogger(tmp_path)
    options = dict(callbacks=[BeliefLightningCallback(save_posterior=True)], logger=logger, log_every_n_steps=2)
    trainer = lightning_trainer(tmp_path, **options)
    trainer.fit(module, Run(tmp_path).loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["posterior"]
    expected = trainer.optimizers[0].posterior(module)
    assert same(dict(Posterior.from_state_dict(saved, module).variance()), dict(expected.variance()))
    assert "effective_lr" in Path(logger.log_dir, "metrics.csv").read_text()


@pytest.mark.parametrize("patched", [False, True])
def test_lightning_saves_weights_to_evaluate_with_also_without_optimizers(patched: bool, tmp_path: Path) -> None:
    """Checkpoints of weights only have those of whole checkpoints; the hook of the module is called once for each."""
    import pytorch_lightning as pl

    from bayesgrad.integrations.lightning import BeliefLightningCallback

    class Saving(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            for only in (False, True):
                trainer.save_checkpoint(tmp_path / f"{only}.ckpt", weights_only=only)

    module = lit_module(network(), RULES["KalmanMomentum"])
    called: list[Any] = []
    if patched:
        module.on_save_checkpoint = called.append
    before = vars(module).get("on_save_checkpoint")
    trainer = lightning_trainer(tmp_path, callbacks=[BeliefLightningCallback(), Saving()])
    trainer.fit(module, Run(tmp_path).loader())
    whole, only = (torch.load(tmp_path / f"{only}.ckpt", weights_only=True) for only in (False, True))
    assert "optimizer_states" in whole
    assert "optimizer_states" not in only
    model, optimizer = plain("KalmanMomentum")
    found = {key.removeprefix("net."): value for key, value in only["state_dict"].items()}
    assert not same(found, weights(model))
    optimizer.eval()
    assert same(found, weights(model))
    assert same(only["state_dict"], whole["state_dict"])
    assert len(called) == 2 * patched
    assert vars(module).get("on_save_checkpoint") == before


def test_lightning_without_the_callback_says_what_is_missing(tmp_path: Path) -> None:
    """All but the last micro-batch run outside of step(closure), at the mean."""
    module = lit_module(network(), RULES["IVON"])
    with pytest.raises(RuntimeError, match=r"inside `with optimizer.sampled\(\):`"):
        lightning_trainer(tmp_path, accumulate_grad_batches=2).fit(module, Run(tmp_path).loader())
    assert same(weights(module.net), weights(network()))


@pytest.mark.parametrize("name", ["Newton", "IVON"])
def test_lightning_with_a_scaled_loss_is_refused_by_rules_that_need_the_loss(name: str, tmp_path: Path) -> None:
    """The loss of `on_before_backward` has the scale of the GradScaler, by which the Hessian would be too large."""
    from pytorch_lightning.plugins.precision import MixedPrecision

    from bayesgrad.integrations.lightning import BeliefLightningCallback

    module = lit_module(network().float(), RULES[name])
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer = lightning_trainer(tmp_path, callbacks=[BeliefLightningCallback()], plugins=[plugin], precision=None)
    loader = torch.utils.data.DataLoader([(x.float(), y) for x, y in examples()], SIZE)
    words = r"Newton needs second derivatives of the loss.* use precision='bf16-mixed' or '32-true'\."
    with pytest.raises(ValueError, match=words) if name == "Newton" else nullcontext():
        trainer.fit(module, loader)


# --- skorch ---


def test_skorch_counts_the_training_examples() -> None:
    x, y = examples().tensors
    nets = [skorch_net("IVON", network(), optimizer__num_data=given) for given in (20, None)]
    for net in nets:
        net.set_params(train_split=lambda data, y: (torch.utils.data.Subset(data, range(20)), data))
        net.fit(x, y)
    assert nets[1].optimizer_.param_groups[0]["num_data"] == 20
    assert same(weights(nets[0].module_), weights(nets[1].module_))
    assert skorch_net("AdaBayes", network()).initialize().optimizer_.param_groups[0]["batch_size"] == SIZE


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SIZE),
        ({"iterator_train__batch_size": 6}, 6),
        ({"iterator_train__batch_size": -1}, 20),
        ({"batch_size": 128}, 20),
        ({"batch_size": -1}, 20),
        ({"batch_size": -1, "iterator_train__batch_size": 6}, 6),
        ({"iterator_valid__batch_size": 6}, SIZE),
        ({"iterator_train__batch_size": 6, "optimizer__batch_size": 3}, 3),
    ],
)
def test_skorch_counts_the_examples_of_a_training_batch(options: dict[str, int], expected: int) -> None:
    """Steps are those with the size of the largest batch, given as `optimizer__batch_size`."""
    x, y = examples().tensors
    nets = [
        skorch_net("AdaBayes", network(), **{**options, **more}) for more in ({}, {"optimizer__batch_size": expected})
    ]
    for net in nets:
        net.fit(x[:20], y[:20])
    assert nets[0].optimizer_.param_groups[0]["batch_size"] == expected
    assert same(weights(nets[0].module_), weights(nets[1].module_))
    assert same(states(nets[0].optimizer_), states(nets[1].optimizer_))


def test_skorch_keeps_the_batch_size_of_a_group() -> None:
    net = skorch_net("AdaBayes", network(), optimizer__param_groups=[("0.*", {"batch_size": 3})], batch_size=128)
    net.fit(*examples().tensors)
    assert [group["batch_size"] for group in net.optimizer_.param_groups] == [3, STEPS * SIZE]


def test_skorch_refuses_to_draw_labels_from_probabilities() -> None:
    net = skorch_net("KFAC", network())
    net.set_params(criterion=nn.NLLLoss)
    with pytest.raises(ValueError, match=r"KFAC draws labels from logits, but outputs for NLLLoss are probabilities"):
        net.initialize()


# --- Optuna ---


class Falling:
    """As a trial of Optuna that is pruned after three reports."""

    def __init__(self) -> None:
        self.values: list[tuple[int, float]] = []

    def report(self, value: float, step: int) -> None:
        self.values.append((step, value))

    def should_prune(self) -> bool:
        return len(self.values) == 3


def test_pruning_reports_and_ends_runs(tmp_path: Path) -> None:
    import optuna

    from bayesgrad.integrations import huggingface, lightning, skorch

    trials = {name: Falling() for name in ("Trainer", "Lightning", "skorch", "plain")}
    net = network()
    own = RULES["AdaBayesFP"](net)
    callbacks = [huggingface.BeliefTrainerCallback(), huggingface.PruningTrainerCallback(trials["Trainer"])]
    options = {"optimizers": (own, constant(own)), "callbacks": callbacks, "eval_dataset": dicts(examples())}
    trainer = hf_trainer(tmp_path, Classifier(net), {"eval_strategy": "steps", "eval_steps": 1}, **options)
    with pytest.raises(optuna.TrialPruned):
        trainer.train()
    assert trainer.state.global_step == 3

    module = lit_module(network(), RULES["AdaBayesFP"])
    both = [lightning.BeliefLightningCallback(), lightning.PruningLightningCallback(trials["Lightning"])]
    loop = lightning_trainer(tmp_path, max_epochs=5, callbacks=both)
    with pytest.raises(optuna.TrialPruned):
        loop.fit(module, Run(tmp_path).loader(), Run(tmp_path).loader())

    estimator = skorch_net(
        "AdaBayesFP", network(), callbacks=[skorch.PruningSkorchCallback(trials["skorch"], "train_loss")]
    )
    estimator.set_params(max_epochs=5)
    with pytest.raises(optuna.TrialPruned):
        estimator.fit(*examples().tensors)

    for step in range(2):
        report(trials["plain"], {"loss": 1.0}, "loss", step)
    with pytest.raises(optuna.TrialPruned, match=r"pruned at step 7, with loss=1"):
        report(trials["plain"], {"loss": 1.0}, "loss", 7)
    assert all(len(trial.values) == 3 for trial in trials.values())
    with pytest.raises(optuna.TrialPruned, match="loss is nan at step 8"):
        report(trials["plain"], {"loss": float("nan")}, "loss", 8)
    with pytest.raises(KeyError, match=r"there is no metric 'other': monitor one of \['loss'\]"):
        report(trials["plain"], {"loss": 1.0}, "other", 9)
