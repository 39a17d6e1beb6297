"""LoRA adapters with a Laplace posterior: a small GPT-2 is adapted to a new task by few examples, and knows that it is.

    python examples/laplace_lora.py

The model is built from a configuration and trained on a first task: whether most tokens of a sequence are above 10. For
the second task, the limit is 6. Its adapters are trained by AdamW; the posterior is about them alone.
"""

from __future__ import annotations

import torch
from digits import small
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2ForSequenceClassification

import bayesgrad
from bayesgrad.metrics import classification

Batch = dict[str, Tensor]


def batches(count: int, limit: int, seed: int) -> list[Batch]:
    """Sequences of tokens 1 to 20, of several lengths, as tokenizers and collators make them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 21, (count, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(5, 13, (count, 1), generator=generator)).long()
    labels = (((ids > limit) * mask).sum(1) > mask.sum(1) / 2).long()
    loader = DataLoader(TensorDataset(ids * mask, mask, labels), 32)
    return [dict(zip(("input_ids", "attention_mask", "labels"), batch)) for batch in loader]


def train(model: nn.Module, data: list[Batch], epochs: int, lr: float) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    model.train()
    for batch in data * epochs:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval()


def main(count: int, epochs: int) -> None:
    torch.manual_seed(0)
    sizes = dict(n_embd=32, n_layer=2, n_head=2, n_positions=12, vocab_size=21, initializer_range=0.1)
    config = GPT2Config(num_labels=2, pad_token_id=0, bos_token_id=0, eos_token_id=0, **sizes)
    base = GPT2ForSequenceClassification(config)
    train(base, batches(count, 10, 0), epochs, 3e-3)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    few, held_out, test = batches(64, 6, 1), batches(64, 6, 2), batches(1000, 6, 3)
    train(model, few, 10 * epochs, 3e-3)

    posterior = bayesgrad.laplace(model, few, likelihood="categorical", structure="kron")
    posterior.tune_prior(method="heldout", heldout=held_out, temperature=True)
    print(f"posterior about {sum(value.numel() for value in posterior.mean.values())} weights of the adapters")
    labels = torch.cat([batch["labels"] for batch in test])
    for name, method in (("network", "mean"), ("posterior", "linear")):
        scores = classification(posterior.predict(test, method=method, progress=False).log(), labels)
        print(f"{name}: error {scores['error']:.3f}, calibration error {scores['ece']:.3f}, NLL {scores['nll']:.3f}")


if __name__ == "__main__":
    main(*((1000, 4) if small() else (4000, 10)))
