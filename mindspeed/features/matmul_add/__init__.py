"""Weight gradients added to their fp32 buffer by the matrix product that computes them."""
