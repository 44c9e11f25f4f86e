"""A package that is not Megatron, for patches of tests; and what patches bring."""

import functools


def double(x):
    return 2 * x


def greet(name):
    return f"hello {name}"


class Shape:
    def area(self, side):
        return side * side


def bracket_wrapper(fn):
    @functools.wraps(fn)
    def call(*args, **kwargs):
        return ("bracket", fn(*args, **kwargs))

    return call


def star_decorator(fn):
    @functools.wraps(fn)
    def call(*args, **kwargs):
        return ("star", fn(*args, **kwargs))

    return call


def forgotten_suffix(fn):
    @functools.wraps(fn)
    def call(*args, **kwargs):
        return fn(*args, **kwargs)

    return call


def triple(x):
    return 3 * x


def quadruple(x):
    return 4 * x
