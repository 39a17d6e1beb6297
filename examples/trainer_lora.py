"""LoRA adapters of a small GPT-2, trained by IVON in Hugging Face's Trainer: a posterior about the adapters alone."""

from __future__ import annotations

import tempfile

import torch
from digits import small
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from bayesgrad.integrations import build_optimizer
from bayesgrad.integrations.huggingface import BeliefTrainerCallback
from bayesgrad.optim import IVON

LENGTH = 12


def counting(count: int) -> list[dict[str, torch.Tensor]]:
    """Sequences that count up in steps of 1 to 3, modulo 16."""
    generator = torch.Generator().manual_seed(0)
    first, by = torch.randint(16, (count, 1), generator=generator), torch.randint(1, 4, (count, 1), generator=generator)
    rows = (first + by * torch.arange(LENGTH)) % 16
    return [{"input_ids": row, "labels": row} for row in rows]


def main(count: int, epochs: int) -> float:
    torch.manual_seed(0)
    sizes = dict(n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=16, bos_token_id=0, eos_token_id=0)
    base = GPT2LMHeadModel(GPT2Config(**sizes))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    data = counting(count)
    tokens = count * (LENGTH - 1)  # the loss is a mean over tokens
    optimizer = build_optimizer(IVON, model, num_data=tokens, lr=2.0, hess_init=0.02, seed=0)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = Trainer(
        model, arguments, train_dataset=data, optimizers=(optimizer, schedule), callbacks=[BeliefTrainerCallback()]
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    posterior = optimizer.posterior(model)
    weights = sum(mean.numel() for mean in posterior.mean.values())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; posterior about {weights} weights of the adapters")
    return losses[-1] - losses[0]


if __name__ == "__main__":
    main(*((320, 3) if small() else (2000, 10)))
