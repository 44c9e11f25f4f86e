"""A stand-in for torchair: graphs are compiled by the eager backend."""


def get_npu_backend(compiler_config: object = None) -> str:
    """The backend for torch.compile."""
    return "eager"
