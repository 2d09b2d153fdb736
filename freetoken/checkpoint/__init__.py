"""Checkpoints on disk: safetensors folders and GGUF files as named tensors, and the demo model.

Tensor names and bytes only: no architecture, no configuration, no text.
"""
