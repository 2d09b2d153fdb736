"""Blocks of a decoder over plain tensors: no architecture names, no checkpoint names."""
