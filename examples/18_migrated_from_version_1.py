"""The migration guide of the design of NNTile 2.0 (its section 8.1): what version 1 placed by hand follows from a
strategy.

Version 1 read:

    traits = TensorTraits([seq_len, batch_size], [seq_tile, batch_tile])
    distr = [0] * traits.grid.nelems  # All on node 0
    x = Tensor_fp32(traits, distr)
    model.forward_async()
    loss.calc_async()
    model.backward_async()

Comments that begin with "changed" say where a line differs from the design, and why.
"""

import numpy as np

from tilewise import BATCH, ComputeGraph, DistributionStrategy

seq_len, batch_size = 16, 8

# Graph-based definition
graph = ComputeGraph()
# changed: the batch comes first, and its label says what devices share
x = graph.input([batch_size, seq_len], name="x", labels=[BATCH, None])
hidden = graph.gelu(graph.matmul(x, graph.parameter([seq_len, 32], name="w1")))
out = graph.matmul(hidden, graph.parameter([32, seq_len], name="w2"))
graph.loss(graph.mse_loss(out, x))  # changed: the loss is a part of the graph

# Automatic distribution
graph.set_distribution(DistributionStrategy.fsdp(world_size=8))
instance = graph.instantiate()
instance.initialize(seed=0, scale=0.2)

# Same execution API
# changed: inputs are given with the call
instance.forward(x=np.random.default_rng(0).standard_normal((batch_size, seq_len)))
instance.backward()
print("loss", float(instance.get_tensor("loss")[0]), "gradient", instance.get_tensor("w1.grad").shape)

# As in version 1, calls also run in the background
step = instance.forward_async(["loss"], x=np.ones((batch_size, seq_len)))
instance.backward_async()
print("loss", float(step.result()["loss"][0]))
instance.close()
