"""Diffusion transformers of Hugging Face diffusers over sharded sequences: `context_parallel(transformer, mesh)`.

Nothing of diffusers is patched or imported: hooks cut the inputs of blocks, and a `TorchFunctionMode` replaces torch's
`scaled_dot_product_attention` while an attention module of a block runs.
"""

from meshflash.integrations.diffusers.model import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
