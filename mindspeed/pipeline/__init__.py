"""Pipeline schedules as lists of operations: synthesis and simulation without torch, execution on Megatron's model chunks."""
