"""Storages that are freed and restored in place: recomputed regions of a forward pass, and a meter of live bytes."""
