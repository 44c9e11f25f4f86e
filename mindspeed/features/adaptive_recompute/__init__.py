"""Parts of layers that are kept, recomputed or swapped, chosen for a budget of device memory."""
