"""Train with Hugging Face's Trainer on sequences sharded over ranks.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
torchrun --nproc-per-node 4 examples/transformers_trainer.py --dp 2
"""

import argparse
import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from meshflash.integrations.accelerate import same_batch
from meshflash.integrations.transformers import context_parallel


def samples(number: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(number):
        ids = torch.randint(1, 8, (301,), generator=generator).cumsum(0) % 512
        keep = torch.arange(301) < torch.randint(100, 302, (1,), generator=generator)
        made.append(dict(input_ids=ids, attention_mask=keep.long(), labels=ids.masked_fill(~keep, -100)))
    return made


def main() -> None:
    """Train a tiny Llama for a few steps and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=1, help="ranks with different batches")
    dp = parser.parse_args().dp
    parallelism = same_batch(cp=int(os.environ.get("WORLD_SIZE", "1")) // dp, dp=dp)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=4 // dp, learning_rate=3e-3,
        gradient_accumulation_steps=2, gradient_checkpointing=True, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), include_num_input_tokens_seen="all",
        parallelism_config=parallelism,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=samples(64), callbacks=[parallelism.counter()])
    context_parallel(model, trainer.accelerator.torch_device_mesh["cp"])
    trainer.train()


if __name__ == "__main__":
    main()
