"""Accelerate, and with it Trainer and TRL: ranks that share a sequence get the same batch, and metrics count it once.

Accelerate's own context parallelism drops masks and cuts batches itself, so its sizes stay 1 here. Only the device mesh
names the axis: data loaders read that. The accelerator's `gather_for_metrics` is replaced by one that knows the axis.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import TrainerCallback


def same_batch(cp: int, dp: int = 1) -> SameBatch:
    """Return the configuration of an `Accelerator` or of `TrainingArguments` whose ranks of `cp` get the same batch.

    Shard the model's sequences over `accelerator.torch_device_mesh["cp"]` by `context_parallel`. The accelerator's
    `gather_for_metrics` returns each row once, and raises where ranks that share a sequence hold different values.

    Args:
        cp: The number of ranks that share a sequence.
        dp: The number of ranks with different batches; `cp * dp` is the number of processes.
    """
    return SameBatch(cp, dp)


class SameBatch(ParallelismConfig):
    """What `same_batch` returns.

    Args:
        cp: The number of ranks that share a sequence.
        dp: The number of ranks with different batches.
    """

    def __init__(self, cp: int, dp: int = 1) -> None:
        if cp < 1 or dp < 1:
            raise ValueError(f"same_batch: cp={cp}, dp={dp}: expected at least 1")
        super().__init__(dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=1, sp_size=1)
        self.cp, self.dp = cp, dp

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axis over which FSDP2 shards weights: all ranks."""
        return ["dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Return the mesh (dp, cp).

        Args:
            device_type: The kind of device.
        """
        mesh = init_device_mesh(device_type, (self.dp, self.cp), mesh_dim_names=("dp_shard", "cp"))
        mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
        return mesh

    def counter(self) -> TrainerCallback:
        """Return a callback that makes a `Trainer` count each batch once in its logs, not once for each rank of cp.

        Other callbacks that log, such as those of `report_to`, run before it: their samples per second are `cp` times
        as many.
        """
        return _CountBatchesOnce(self.cp)

    def _validate_accelerator(self, accelerator: Any) -> None:
        if accelerator.num_processes != self.cp * self.dp:
            raise ValueError(
                f"same_batch: cp={self.cp} times dp={self.dp} ranks, but {accelerator.num_processes} processes"
            )
        if self.cp > 1:  # here, because nothing else of a configuration gets the accelerator
            accelerator.gather_for_metrics = partial(_gather_batches_once, accelerator, self.cp)

    def __deepcopy__(self, memo: dict[int, Any]) -> SameBatch:
        return self  # arguments of a trainer are copied, but process groups cannot be


def _gather_batches_once(accelerator: Any, cp: int, input_data: Any, use_gather_object: bool = False) -> Any:
    """Do what `Accelerator.gather_for_metrics` does, with the rows of one rank of each context axis.

    The accelerator's own method returns every row `cp` times, and then cuts the last batch as if rows came once.

    Args:
        accelerator: The accelerator.
        cp: The number of ranks that share a sequence.
        input_data: Tensors or objects of this rank, possibly nested. The first dimension counts rows.
        use_gather_object: Whether to gather tensors as objects, which may differ in size.
    """
    try:
        recursively_apply(lambda x: x, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    state = accelerator.gradient_state
    num_rows = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    if use_gather_object:
        of_ranks = gather_object([input_data])[::cp]
        return [row for rows in of_ranks for row in rows][:num_rows]

    def first_of_each_axis(gathered: Tensor) -> Tensor:
        parts = gathered.chunk(accelerator.num_processes)
        # all ranks hold the same parts, so that all of them raise
        if not all(_agree(parts[n - n % cp], part) for n, part in enumerate(parts)):
            raise ValueError(
                "gather_for_metrics: ranks that share a sequence hold different values, such as the logits of their "
                'own tokens; pass outputs="whole" to context_parallel, or gather these values with accelerator.gather'
            )
        return torch.cat(parts[::cp])[:num_rows]

    return recursively_apply(first_of_each_axis, accelerator.gather(input_data))


def _agree(first: Tensor, other: Tensor) -> bool:
    """Return whether two ranks hold the same values, up to rounding."""
    if not first.is_floating_point():
        return torch.equal(first, other)
    largest = float(first.nan_to_num(0.0, 0.0, 0.0).abs().amax()) if first.numel() else 0.0
    return torch.allclose(first, other, rtol=1e-2, atol=1e-2 * largest, equal_nan=True)


class _CountBatchesOnce(TrainerCallback):
    """A callback that corrects the numbers of tokens, and samples per second."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tokens = state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._tokens += (state.num_input_tokens_seen - self._tokens) // self._ranks
        state.num_input_tokens_seen = self._tokens

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        # of epochs Trainer counts samples, of max_steps the batches of all ranks
        name = "train_samples_per_second"
        if args.max_steps > 0 and logs and name in logs:
            logs[name] = state.log_history[-1][name] = logs[name] / self._ranks
