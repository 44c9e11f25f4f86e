"""Up-projections of multi-latent attention whose products are what attention reads."""
