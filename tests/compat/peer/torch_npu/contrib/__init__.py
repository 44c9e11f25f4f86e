"""Calls of CUDA go to the stand-in, which importing it puts in force."""
