"""One file an operation: a plain `reference`, and a launcher of the file's name that picks the way
to compute it.

Knows tensors only; imports torch and nothing else of ours.
"""
