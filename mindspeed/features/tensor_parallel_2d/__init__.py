"""Linear layers whose weights are split along both dimensions, with the inputs and outputs of sequence parallelism."""
