"""A sequence spread over ranks: the group and the rule of the loss."""
