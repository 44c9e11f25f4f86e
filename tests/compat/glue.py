"""What a feature imports when it registers its patches."""

import functools


def scaled(factor):
    def scale_wrapper(fn):
        @functools.wraps(fn)
        def call(x):
            return factor * fn(x)

        return call

    return scale_wrapper
