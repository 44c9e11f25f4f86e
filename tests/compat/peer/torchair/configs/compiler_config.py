"""The configuration of the compiler, which nothing reads."""


class CompilerConfig:
    """Nothing is configured."""
