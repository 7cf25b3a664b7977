"""Models of Hugging Face Transformers over sharded sequences: `context_parallel(model, mesh)`.

Nothing of Transformers is patched: an attention function and a mask function are registered by name.
"""

try:
    import transformers  # noqa: F401
except ImportError as problem:
    raise ImportError(
        "meshflash.integrations.transformers needs Transformers: pip install 'meshflash[transformers]'"
    ) from problem

from meshflash.integrations.transformers.attention import NAME
from meshflash.integrations.transformers.batches import shard_batch
from meshflash.integrations.transformers.loss import TiledLoss, tile_loss
from meshflash.integrations.transformers.model import ContextParallel, context_parallel

__all__ = ["NAME", "ContextParallel", "TiledLoss", "context_parallel", "shard_batch", "tile_loss"]
