"""Main weights and states of the optimizer in host memory."""
