"""Operators on CUDA: `KERNELS` of each file maps schema names to kernels. Kernels are Triton's, attention is torch's own."""
