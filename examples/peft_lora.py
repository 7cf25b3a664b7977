"""Train LoRA adapters of PEFT on sequences sharded over ranks.

torchrun --nproc-per-node 2 examples/peft_lora.py
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from meshflash import init
from meshflash.integrations.transformers import context_parallel
from meshflash.parallel import init_mesh


def main() -> None:
    """Train adapters of a tiny Qwen3 for a few steps with DDP."""
    with init() as world:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, pad_token_id=0,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).to(world.device)
        mesh = init_mesh(cp=world.world_size)
        context_parallel(model, mesh["cp"])
        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora).train()
        if world.world_size > 1:  # averages the gradients of adapters
            run: nn.Module = nn.parallel.DistributedDataParallel(adapted, process_group=mesh["cp"].get_group())
        else:
            run = adapted
        optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=3e-2)
        for step in range(6):
            generator = torch.Generator().manual_seed(step)  # the same batch on all ranks of cp
            ids = (torch.randint(1, 8, (2, 301), generator=generator).cumsum(1) % 512).to(world.device)
            loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if world.rank == 0:
                print(f"step {step}: loss {loss:.5f}", flush=True)


if __name__ == "__main__":
    main()
