def early():
    return "early"


from megatron.core import circular_b  # noqa: E402


def both():
    return early(), circular_b.early()
