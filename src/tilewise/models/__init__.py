"""Model families. One folder each with fixed roles: config, model, sharding, weights, README.

A family's folder says everything about it: what its configuration file may ask for, its graph, how tensor
parallelism cuts it, and what its tensors are called in files. Nothing outside the folder knows the family's
names.
"""

__all__ = ["llama"]
