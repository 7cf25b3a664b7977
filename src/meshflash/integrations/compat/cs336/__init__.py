"""Names of Stanford's CS336, assignment 2: FlashAttention, DDP, FSDP, a sharded optimizer, and training loops.

The names are those of the assignment's adapters and of a study plan for it. The implementations are torch's DDP,
`fully_shard` and ZeroRedundancyOptimizer over the default process group. Each name works without the others.
"""

from meshflash.integrations.compat.cs336.attention import (
    FlashAttentionFunction,
    FlashAttentionTorch,
    FlashAttentionTriton,
    _spec,  # noqa: F401 tests read what kernels get
    flash_attention_forward,
    get_flashattention_autograd_function_pytorch,
    get_flashattention_autograd_function_triton,
    standard_attention,
)
from meshflash.integrations.compat.cs336.parallel import (
    FullySharded,
    ddp_bucketed_on_after_backward,
    ddp_bucketed_on_train_batch_start,
    ddp_individual_parameters_on_after_backward,
    ddp_on_after_backward,
    ddp_on_train_batch_start,
    fsdp_gather_full_params,
    fsdp_on_after_backward,
    get_ddp,
    get_ddp_bucketed,
    get_ddp_individual_parameters,
    get_fsdp,
    get_sharded_optimizer,
)
from meshflash.integrations.compat.cs336.training import (
    benchmark_ddp,
    cleanup_ddp,
    setup_ddp,
    train_with_ddp,
    train_with_fsdp,
)

__all__ = [
    "FlashAttentionFunction",
    "FlashAttentionTorch",
    "FlashAttentionTriton",
    "FullySharded",
    "benchmark_ddp",
    "cleanup_ddp",
    "ddp_bucketed_on_after_backward",
    "ddp_bucketed_on_train_batch_start",
    "ddp_individual_parameters_on_after_backward",
    "ddp_on_after_backward",
    "ddp_on_train_batch_start",
    "flash_attention_forward",
    "fsdp_gather_full_params",
    "fsdp_on_after_backward",
    "get_ddp",
    "get_ddp_bucketed",
    "get_ddp_individual_parameters",
    "get_flashattention_autograd_function_pytorch",
    "get_flashattention_autograd_function_triton",
    "get_fsdp",
    "get_sharded_optimizer",
    "setup_ddp",
    "standard_attention",
    "train_with_ddp",
    "train_with_fsdp",
]
