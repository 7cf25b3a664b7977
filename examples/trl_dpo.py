"""Learn preferences with TRL's DPOTrainer, with log-probabilities of sequences that are sharded over ranks.

torchrun --nproc-per-node 2 examples/trl_dpo.py
"""

import copy
import os
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from meshflash.integrations.accelerate import same_batch
from meshflash.integrations.transformers import context_parallel


def preferences(number: int) -> Dataset:
    """Return prompts with a chosen and a rejected answer, all of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def text() -> str:
        length = int(torch.randint(20, 90, (1,), generator=generator))
        return " ".join(f"w{n}" for n in torch.randint(3, 512, (length,), generator=generator).tolist())

    return Dataset.from_list([dict(prompt=text() + " ", chosen=text(), rejected=text()) for _ in range(number)])


def main() -> None:
    """Train a tiny Llama for a few steps and print the losses."""
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(512)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w1")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model, before = LlamaForCausalLM(config), LlamaForCausalLM(copy.deepcopy(config))
    before.load_state_dict(model.state_dict())
    parallelism = same_batch(cp=int(os.environ.get("WORLD_SIZE", "1")))
    arguments = DPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=2, learning_rate=3e-3, logging_steps=1,
        save_strategy="no", report_to=[], bf16=False, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        parallelism_config=parallelism,
    )  # fmt: skip
    trainer = DPOTrainer(
        model, before, arguments, train_dataset=preferences(16), processing_class=tokenizer,
        callbacks=[parallelism.counter()],
    )  # fmt: skip
    for each in (model, before):  # the loss is computed outside of the model, so it needs the logits of all tokens
        context_parallel(each, trainer.accelerator.torch_device_mesh["cp"], outputs="whole")
    trainer.train()


if __name__ == "__main__":
    main()
