"""One attention mask for all layers and micro-batches."""
