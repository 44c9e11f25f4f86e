"""Triton kernels of operators, for every device that Triton has a compiler for.

A file here holds kernels alone; `mindspeed/ops/cuda/<op>.py` launches them. They use the core language only: masks instead of
descriptors, no atomics, no inline assembly. Sums are taken in fp32, results rounded once. Nothing but these launchers imports
this package, so triton is needed by none but them. With TRITON_INTERPRET=1 they run on CPU tensors, slowly.
"""
