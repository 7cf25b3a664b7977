"""Evaluate a tiny Llama with Hugging Face's Trainer; print what it returns on rank 0.

torchrun --nproc-per-node RANKS evaluate_trainer.py --dp N
"""

import argparse
import json
import os
import tempfile
from typing import Any

import torch

TOKENS = 37
#: No multiple of the batch of all ranks: the last batch is short.
ROWS = 11


def main() -> None:
    """Print the loss, the metrics and a part of the predictions."""
    # here, because doctests import this file where Accelerate is not installed
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from meshflash.integrations.accelerate import same_batch
    from meshflash.integrations.transformers import context_parallel

    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--outputs", default="whole")
    options = parser.parse_args()
    dp = options.dp
    parallelism = same_batch(cp=int(os.environ["WORLD_SIZE"]) // dp, dp=dp)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # rows of different losses
    ids = torch.randint(1, 64, (ROWS, TOKENS))
    data: Any = [dict(input_ids=row, labels=row) for row in ids]

    def metrics(found):
        best = found.predictions.argmax(-1)
        return {"rows": len(best), "right": float((best[:, :-1] == found.label_ids[:, 1:]).mean())}

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_eval_batch_size=2, report_to=[], disable_tqdm=True,
        use_cpu=True, parallelism_config=parallelism,
    )  # fmt: skip
    trainer = Trainer(model, arguments, eval_dataset=data, compute_metrics=metrics)
    context_parallel(model, trainer.accelerator.torch_device_mesh["cp"], outputs=options.outputs)
    found, again = trainer.evaluate(), trainer.evaluate()  # a trainer sets its gathering again after each evaluation
    assert all(found[f"eval_{name}"] == again[f"eval_{name}"] for name in ("loss", "rows", "right"))
    predicted: Any = trainer.predict(data).predictions
    rows = trainer.accelerator.gather_for_metrics([f"rank {trainer.accelerator.process_index}"])
    if trainer.accelerator.is_main_process:
        logits = predicted.reshape(len(predicted), -1)[:, :50].tolist()
        print(json.dumps({**found, "logits": logits, "gathered": rows}), flush=True)


if __name__ == "__main__":
    main()
