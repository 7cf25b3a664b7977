"""Train a Hugging Face model on sequences sharded over ranks, in plain PyTorch with FSDP2.

torchrun --nproc-per-node 2 examples/transformers_fsdp.py
"""

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from meshflash import init
from meshflash.integrations.transformers import context_parallel, tile_loss
from meshflash.parallel import init_mesh

TOKENS = 1001  # any number


def main() -> None:
    """Train a tiny Llama for a few steps."""
    with init() as world:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(world.device).train()
        mesh = init_mesh(cp=world.world_size)
        tile_loss(model)  # logits of all tokens never exist
        context_parallel(model, mesh["cp"], verify=True)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["cp"])
        fully_shard(model, mesh=mesh["cp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(6):
            generator = torch.Generator().manual_seed(step)  # the same batch on all ranks of cp
            ids = (torch.randint(1, 8, (1, TOKENS), generator=generator).cumsum(1) % 512).to(world.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0:
                print(f"step {step}: loss {loss:.5f}", flush=True)


if __name__ == "__main__":
    main()
