"""The size of a chunk where it is not given. Light, no torch."""


def default_chunks(vocabulary: int, hidden_size: int) -> int:
    """Return the smallest number of chunks with which the logits of a chunk are not larger than the hidden states.

    ``vocabulary`` counts the rows of the output weight on a rank.
    """
    return max(1, -(-vocabulary // hidden_size))
