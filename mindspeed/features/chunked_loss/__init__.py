"""The output layer and the cross-entropy of a model, computed in chunks of tokens."""
