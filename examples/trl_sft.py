"""Fine-tune with TRL's SFTTrainer on packed documents, in sequences sharded over ranks.

torchrun --nproc-per-node 2 examples/trl_sft.py
"""

import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from meshflash.integrations.accelerate import same_batch
from meshflash.integrations.transformers import context_parallel


def documents(number: int) -> Dataset:
    """Return token ids of documents of different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 200, (number,), generator=generator).tolist()
    rows = [(torch.randint(3, 8, (n,), generator=generator).cumsum(0) % 500 + 3).tolist() for n in lengths]
    return Dataset.from_list([dict(input_ids=row) for row in rows])


def main() -> None:
    """Train a tiny Llama for a few steps and print the losses."""
    words = {f"w{n}": n for n in range(512)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), pad_token="w0", eos_token="w2"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, eos_token_id=2,
        )
    )  # fmt: skip
    parallelism = same_batch(cp=int(os.environ.get("WORLD_SIZE", "1")))
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=1, learning_rate=3e-3, packing=True,
        max_length=512, pad_token="w0", eos_token="w2", logging_steps=1, save_strategy="no", report_to=[], bf16=False,
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        parallelism_config=parallelism,
    )  # fmt: skip
    trainer = SFTTrainer(
        model, arguments, train_dataset=documents(60), processing_class=tokenizer, callbacks=[parallelism.counter()]
    )
    # the trainer computes its loss from log-probabilities, and needs those of all tokens
    context_parallel(model, trainer.accelerator.torch_device_mesh["cp"], outputs="whole")
    trainer.train()


if __name__ == "__main__":
    main()
