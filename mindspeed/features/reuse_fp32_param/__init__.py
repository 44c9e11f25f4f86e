"""Main weights joined from bf16 weights and residuals."""
