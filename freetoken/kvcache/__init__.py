"""KV memory: pages, the prefix tree over them, and the tensors they index."""
