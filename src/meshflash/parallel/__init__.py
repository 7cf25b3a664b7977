"""Models on a mesh of ranks: data, sharded, context and tensor parallelism out of torch's own parts."""

from meshflash.parallel.context import ContextParallel, MeshAttention
from meshflash.parallel.linear import ColumnParallelLinear, RowParallelLinear
from meshflash.parallel.linear_styles import ColumnParallel, RowParallel
from meshflash.parallel.loss import IGNORED, count_tokens, cross_entropy_sum, gradient_scale, next_tokens
from meshflash.parallel.mesh import init_mesh
from meshflash.parallel.optimizer import clip_grad_norm, gradient_norm, sharded_optimizer
from meshflash.parallel.recompute import recompute
from meshflash.parallel.sampler import MeshSampler
from meshflash.parallel.step import Accumulated, accumulate, blank, micro_batches, spread_batch
from meshflash.parallel.tensor_ranks import TensorRanks
from meshflash.parallel.tiles import tile_mlp
from meshflash.parallel.weights import parallelize, replicate, shard, synchronized

__all__ = [
    "IGNORED",
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
    "blank",
    "clip_grad_norm",
    "count_tokens",
    "cross_entropy_sum",
    "gradient_norm",
    "gradient_scale",
    "init_mesh",
    "micro_batches",
    "next_tokens",
    "parallelize",
    "recompute",
    "replicate",
    "shard",
    "sharded_optimizer",
    "spread_batch",
    "synchronized",
    "tile_mlp",
]
