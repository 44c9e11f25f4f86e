"""The start of a job without its ranks: what each distinct rank would refuse is found in one process, on no device."""
