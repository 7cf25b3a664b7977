"""Train models on a mesh of ranks: data, sharded data, context and tensor parallelism composed from torch's parts."""

from meshflash.parallel.activation_checkpointing import apply_activation_checkpointing
from meshflash.parallel.context import ContextParallel, MeshAttention
from meshflash.parallel.linear import ColumnParallelLinear, RowParallelLinear
from meshflash.parallel.linear_styles import ColumnParallel, RowParallel
from meshflash.parallel.loss import IGNORE_INDEX, count_tokens, cross_entropy_sum, gradient_scale, next_tokens
from meshflash.parallel.mesh import init_mesh
from meshflash.parallel.optimizer import clip_grad_norm, gradient_norm, sharded_optimizer
from meshflash.parallel.sampler import MeshSampler
from meshflash.parallel.step import Accumulated, accumulate, blank_batch, micro_batches, shard_batch
from meshflash.parallel.tensor_ranks import TensorRanks
from meshflash.parallel.tiled_mlp import tile_mlp
from meshflash.parallel.weights import parallelize, replicate, shard, synchronized

__all__ = [
    "IGNORE_INDEX",
    "Accumulated",
    "ColumnParallel",
    "ColumnParallelLinear",
    "ContextParallel",
    "MeshAttention",
    "MeshSampler",
    "RowParallel",
    "RowParallelLinear",
    "TensorRanks",
    "accumulate",
    "apply_activation_checkpointing",
    "blank_batch",
    "clip_grad_norm",
    "count_tokens",
    "cross_entropy_sum",
    "gradient_norm",
    "gradient_scale",
    "init_mesh",
    "micro_batches",
    "next_tokens",
    "parallelize",
    "replicate",
    "shard",
    "shard_batch",
    "sharded_optimizer",
    "synchronized",
    "tile_mlp",
]
