"""The quick start of the design of NNTile 2.0 (its section 5.2): one block, parameters sharded over eight devices.

Comments that begin with "changed" say where a line differs from the design, and why.
"""

import sys

import numpy as np

import tilewise
from tilewise import ComputeGraph, DistributionStrategy, ExecutionPolicy

seq_len, batch_size, embed_dim = 16, 8, 64

# Initialize with MPI. Without a launcher, this process has all devices.
tilewise.init(mpi=True)

# Define computation graph
graph = ComputeGraph("transformer_block")

# Declare tensors
# changed: the batch comes first, and its label says what devices share and what gradients sum over
x = graph.input([batch_size, seq_len, embed_dim], name="input", labels=[tilewise.BATCH, None, None])
wq = graph.parameter([embed_dim, embed_dim], name="W_query")
wk = graph.parameter([embed_dim, embed_dim], name="W_key")
wv = graph.parameter([embed_dim, embed_dim], name="W_value")
wo = graph.parameter([embed_dim, embed_dim], name="W_out")
gamma = graph.parameter([embed_dim], name="ln_gamma")
beta = graph.parameter([embed_dim], name="ln_beta")

# Define computation
q = graph.matmul(x, wq)
k = graph.matmul(x, wk)
v = graph.matmul(x, wv)
attn = graph.scaled_dot_product_attention(q, k, v)
out = graph.matmul(attn, wo)
out = graph.add(out, x)  # Residual
out = graph.layer_norm(out, gamma, beta)
graph.output(out, "output")  # changed: the design reads "output" without naming it

# Configure distribution for 8 devices in 2 groups
dist = DistributionStrategy.fsdp(world_size=8, shard_degree=4)
graph.set_distribution(dist)

# changed: a policy is data that cannot change later, so its fields are arguments
policy = ExecutionPolicy(placement="owner_computes", enable_offloading=True)
graph.set_execution_policy(policy)

# Instantiate - creates actual tensors with proper tiling
instance = graph.instantiate()

# Load weights
# changed: the file is an argument, so that the example also runs without one
if len(sys.argv) > 1:
    instance.load_parameters(sys.argv[1])
else:
    instance.initialize(seed=0)

# Execute
# changed: inputs are given with the call
values = np.random.default_rng(0).standard_normal((batch_size, seq_len, embed_dim))
instance.forward(input=values.astype(np.float32))

# Get outputs
output = instance.get_tensor("output")
print("output", output.shape, "mean square", float(np.square(output).mean().round(3)))

tilewise.shutdown()
