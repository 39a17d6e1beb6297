"""Hugging Face's Trainer with a callback: a small BERT learns whether most tokens of a sequence are large."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from digits import small
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from bayesgrad import Posterior
from bayesgrad.integrations import build_optimizer
from bayesgrad.integrations.huggingface import POSTERIOR, BeliefTrainerCallback
from bayesgrad.optim import AdaBayesFP, KroneckerFilterFP


def sequences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of tokens 1 to 20, of several lengths, with padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 21, (count, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(5, 13, (count, 1), generator=generator)).long()
    labels = (((ids > 10) * mask).sum(1) > ((ids <= 10) * mask).sum(1)).long()
    return [{"input_ids": i * m, "attention_mask": m, "labels": y} for i, m, y in zip(ids, mask, labels)]


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config = BertConfig(vocab_size=21, max_position_embeddings=12, initializer_range=0.1, **sizes)
    return BertForSequenceClassification(config)


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def train(kind: type, count: int, epochs: int, **options: object) -> float:
    network, data, folder = model(), sequences(count, 0), tempfile.mkdtemp()
    loader = torch.utils.data.DataLoader(data, 32)
    optimizer = build_optimizer(kind, network, loader, seed=0, **options)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=32,
        num_train_epochs=epochs,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(
        network,
        arguments,
        train_dataset=data,
        eval_dataset=sequences(400, 1),
        compute_metrics=accuracy,
        optimizers=(optimizer, schedule),
        callbacks=[BeliefTrainerCallback(save_posterior=kind is AdaBayesFP)],
    )
    trainer.train()
    if kind is AdaBayesFP:
        (*_, last) = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
        print("posterior about", len(Posterior.load(last / POSTERIOR, network).mean), "tensors, from", last.name)
    return trainer.evaluate()["eval_accuracy"]


if __name__ == "__main__":
    setting = dict(count=1280, epochs=2) if small() else dict(count=4000, epochs=4)
    for kind in (AdaBayesFP, KroneckerFilterFP):
        print(kind.__name__, "accuracy", train(kind, **setting, lr=3e-3, weight_decay=0.01))
