"""Train with Lightning on sequences sharded over ranks; Lightning starts the processes.

python examples/lightning_context_parallel.py --cp 2
python examples/lightning_context_parallel.py --cp 2 --dp 2
"""

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from meshflash.integrations.lightning import ContextParallelStrategy
from meshflash.integrations.transformers import context_parallel


class Model(lightning.LightningModule):
    """A tiny Llama."""

    def configure_model(self) -> None:
        """Make the model, once processes have started."""
        if hasattr(self, "model"):
            return
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).train()
        context_parallel(self.model, self.trainer.strategy.mesh["cp"])

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """Return the loss of the whole batch."""
        loss = self.model(**batch).loss
        mean = self.trainer.strategy.reduce(loss.detach())
        if self.trainer.is_global_zero:
            print(f"step {index}: loss {mean:.5f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--dp", type=int, default=1, help="ranks with different batches")
    given = parser.parse_args()
    data = torch.randint(1, 8, (12, 301), generator=torch.Generator().manual_seed(0)).cumsum(1) % 512
    loader = DataLoader([dict(input_ids=ids, labels=ids) for ids in data], batch_size=2 // given.dp)
    trainer = lightning.Trainer(
        accelerator="auto", devices=given.cp * given.dp, strategy=ContextParallelStrategy(cp=given.cp), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), loader)
