"""Share an attention mask among all layers and micro-batches."""
