"""GPT and ViT models that run on any mesh, layout and schedule."""
