"""A package outside megatron."""


def compiled(function=None):
    return function


def helper(x):
    return ("helper", x)


alias_of_helper = helper
TABLE = {"helper": helper}
FLAG = True
