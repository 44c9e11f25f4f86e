"""Weight gradients that run in the idle time of the pipeline."""
