"""Linear layers of tensor parallelism whose products and collectives are exchangeable: plain torch, groups passed in."""
