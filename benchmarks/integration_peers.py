"""How each library shards the sequences of a model and trains one step, as its documentation says.

Each peer trains one optimizer step on some micro-batches and returns what its user gets: logits of all tokens, the loss
that is reported, and the gradients that the optimizer sees.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.one_device import Result, gradients

Batches = list[dict[str, Tensor]]


class NeedsGpu(Exception):  # noqa: N818 - an answer, not an error
    """A peer has no kernel for this on a CPU."""


class Peer(ABC):
    """A library under test.

    Attributes:
        title: Its name in tables.
        packages: The packages that it needs, whose versions are recorded.
        inner: The implementation of attention that it wraps here in place of one for GPUs; empty if it is the same.
    """

    title: str
    packages: tuple[str, ...]
    inner: str = ""

    @abstractmethod
    def load(self) -> None:
        """Import what is slow to import. ImportError means that the peer is not installed."""

    @abstractmethod
    def train(self, model: Any, batches: Batches, num_items: int | None, mesh: Any) -> Result:
        """Train one step without the optimizer's update.

        Args:
            model: The model, in training mode, the same on all ranks.
            batches: The micro-batches, the same on all ranks.
            num_items: The number of labels in all of them; None for models whose loss does not take it.
            mesh: The ranks that share a sequence.
        """


class Meshflash(Peer):
    """This library."""

    title = "meshflash"
    packages = ("meshflash", "transformers", "torch")

    def load(self) -> None:
        import meshflash.integrations.transformers  # noqa: F401

    def train(self, model: Any, batches: Batches, num_items: int | None, mesh: Any) -> Result:
        from meshflash.integrations.transformers import context_parallel

        context_parallel(model, mesh, outputs="whole", average_gradients=True)
        logits, total = [], torch.zeros(())
        for batch in batches:
            out = model(**batch, **_with_count(num_items))
            out.loss.backward()
            logits.append(out.logits.detach())
            total += out.loss.detach()
        return torch.cat(logits), total, gradients(model)


class Accelerate(Peer):
    """Accelerate's context parallelism under Trainer.

    Accelerate refuses CPUs when it is constructed, so its parallelism is set afterwards; what then runs is its own code
    and Trainer's. Gradients are averaged over ranks, as FSDP2, which Accelerate requires, would.
    """

    title = "Accelerate + Trainer"
    packages = ("accelerate", "transformers", "torch")

    def load(self) -> None:
        import accelerate  # noqa: F401
        import torch.distributed.tensor.experimental  # noqa: F401
        import transformers.trainer  # noqa: F401

    def train(self, model: Any, batches: Batches, num_items: int | None, mesh: Any) -> Result:
        import accelerate
        import transformers
        from torch.distributed.tensor.experimental._attention import context_parallel_unshard
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from benchmarks import torch_ring_on_cpu

        model.set_attn_implementation("sdpa")
        torch_ring_on_cpu.register()
        with tempfile.TemporaryDirectory() as folder:
            options = transformers.TrainingArguments(
                folder, use_cpu=True, report_to=[], gradient_accumulation_steps=len(batches)
            )
            trainer: Any = transformers.Trainer(model=model, args=options)
        state = trainer.accelerator.state
        state.parallelism_config = accelerate.ParallelismConfig(cp_size=mesh.size())
        state.device_mesh = mesh
        trainer.accelerator._prepare_cp(model)
        trainer.current_gradient_accumulation_steps = len(batches)
        logits: list[Tensor] = []
        hook = model.register_forward_hook(lambda module, args, out: logits.append(out.logits.detach()))
        batches, count = trainer.get_batch_samples(iter(batches), len(batches), torch.device("cpu"))
        lengths = [batch["labels"].shape[1] for batch in batches]
        try:
            # any other kernel of CPUs would be taken apart by DTensor, which no GPU does
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                total = sum(trainer.training_step(model, batch, count) for batch in batches)
        except RuntimeError as problem:
            if "No available kernel" in str(problem):
                raise NeedsGpu("torch's flash attention for CPUs does not serve this model") from None
            raise
        hook.remove()
        whole = []
        for length, x in zip(lengths, logits, strict=True):
            balancer = _load_balancer(length, mesh.size())
            is_whole = x.shape[1] == length
            whole.append(x if is_whole else context_parallel_unshard(mesh, [x], [1], balancer)[0])
        return torch.cat(whole), _mean(total.detach(), mesh), [_mean(g, mesh) for g in gradients(model)]


class Ringmaster(Peer):
    """axolotl-ringmaster, by the context manager that its axolotl plugin and TRL trainer use.

    Gradients and the reported loss are averaged over ranks, as FSDP2 and Trainer do.
    """

    title = "ringmaster"
    packages = ("axolotl-ringmaster", "transformers", "torch")
    inner = "sdpa"

    def load(self) -> None:
        import ringmaster  # noqa: F401

    def train(self, model: Any, batches: Batches, num_items: int | None, mesh: Any) -> Result:
        import ringmaster

        text = model.config.get_text_config()
        config = ringmaster.RingmasterConfig(size=mesh.size())
        runtime = ringmaster.setup(
            config,
            num_kv_heads=getattr(text, "num_key_value_heads", None),
            device_mesh=mesh,
            device_type="cpu",
            inner_attn=self.inner,
        )
        model.set_attn_implementation(runtime.attn_implementation)
        ringmaster.wire_recurrent_layers(model)
        if "pixel_values" in batches[0]:
            return self._train_images(model, batches, runtime, mesh)
        hooks = ringmaster.ContextParallelContextManager(
            [model],
            runtime.cp_group,
            gradient_accumulation_steps=len(batches),
            gather_outputs=True,
            load_balance=runtime.shard_load_balance,
        )
        logits, total = [], torch.zeros(())
        with hooks:
            for batch in batches:
                out = model(**batch, use_cache=False, **_with_count(num_items))
                out.loss.backward()
                logits.append(out.logits.detach())
                total += out.loss.detach()
        return torch.cat(logits), _mean(total, mesh), [_mean(g, mesh) for g in gradients(model)]

    def _train_images(self, model: Any, batches: Batches, runtime: Any, mesh: Any) -> Result:
        """Train a model of images, whose sequence is cut after the images' tokens are merged into it."""
        from ringmaster.cp_collectives import seq_gather_cp
        from ringmaster.loss import global_num_items_in_batch
        from ringmaster.multimodal import register_multimodal_sharding
        from ringmaster.shard import shard_batch

        register_multimodal_sharding(model, "model.language_model")
        logits, total = [], torch.zeros(())
        for batch in batches:
            labels = dict(input_ids=batch["input_ids"], labels=batch.pop("labels"))
            local, info = shard_batch(labels, cp_rank=runtime.cp_rank, cp_size=runtime.cp_size)
            out = model(**batch, use_cache=False)
            count = global_num_items_in_batch(local["shift_labels"], runtime.cp_group, len(batches))
            flat = out.logits.flatten(0, 1), local["shift_labels"].flatten()
            loss = torch.nn.functional.cross_entropy(*flat, reduction="sum") / count
            loss.backward()
            logits.append(seq_gather_cp(out.logits.detach(), runtime.cp_group)[:, : info.original_seq_len])
            total += loss.detach()
        return torch.cat(logits), _mean(total, mesh), [_mean(g, mesh) for g in gradients(model)]


#: All peers, by the name under which the command knows them.
PEERS: dict[str, type[Peer]] = {"meshflash": Meshflash, "accelerate": Accelerate, "ringmaster": Ringmaster}


def _with_count(num_items: int | None) -> dict[str, Tensor]:
    return {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}


def _mean(x: Tensor, mesh: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=mesh.get_group())
    return x / mesh.size()


def _load_balancer(tokens: int, ranks: int) -> Any:
    """Return the load balancer that torch took for a sequence."""
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as private

    return private._create_default_load_balancer(tokens, ranks, torch.device("cpu"))
