"""A capacity that follows the load: no token of capacity-gated experts is dropped."""
