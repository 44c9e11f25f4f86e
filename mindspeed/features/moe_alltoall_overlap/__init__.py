"""All-to-alls behind shared experts, weight gradients and one another."""
