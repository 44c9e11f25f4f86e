"""A sequence spread over ranks: the group, and the loss over all of them."""
