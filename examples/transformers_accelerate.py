"""Train with Hugging Face Accelerate on sequences sharded over ranks.

torchrun --nproc-per-node 2 examples/transformers_accelerate.py
"""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from meshflash.integrations.accelerate import same_batch
from meshflash.integrations.transformers import context_parallel


def main() -> None:
    """Train a tiny Gemma 3, whose layers alternate between windows and full attention, for a few steps."""
    cp = int(os.environ.get("WORLD_SIZE", "1"))
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), parallelism_config=same_batch(cp=cp))
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=64, layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).train()
    context_parallel(model, accelerator.torch_device_mesh["cp"])
    data = torch.randint(1, 8, (12, 301), generator=torch.Generator().manual_seed(0)).cumsum(1) % 512
    batches = DataLoader([dict(input_ids=ids, labels=ids) for ids in data], batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    for step, batch in enumerate(batches):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss:.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
