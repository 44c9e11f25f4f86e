"""Storages that leave memory and come back in place: recomputed regions of a forward pass, and a meter of live bytes."""
