"""What test patches name: replacements, wrappers and mixins that need nothing of megatron."""

import functools

from mindspeed.plugins.patches import wrapper


def size_of_42():
    return 42


def size_of_7():
    return 7


def triple(value, factor=3, *, offset=1):
    return value * factor + offset


def marked(original):
    @functools.wraps(original)
    def call(*args, **kwargs):
        return ("marked", original(*args, **kwargs))

    return call


def alone(original):
    return lambda *args, **kwargs: "alone"


def starred(original):
    @functools.wraps(original)
    def call(*args, **kwargs):
        return ("starred", original(*args, **kwargs))

    return call


@wrapper
def passed(original, *args, **kwargs):
    return original(*args, **kwargs)


def broken(original):
    raise ValueError("no")


def returns_none(original):
    return None


class Loud:
    def forward(self, x):
        return ("loud", *super().forward(x))


class Quiet:
    def forward(self, x):
        return ("quiet", *super().forward(x))


class Alone:
    """A replacement that is no subclass of what it replaces."""

    def forward(self, x):
        return ("alone", x)

    @staticmethod
    def shape(x):
        return ("alone", x)


def other_compiler(function=None):
    return ("compiled", function)


BIG = 99


_kept = []


def handing_out_what_others_hold(original):
    return _kept[0] if _kept else _kept.append(triple) or triple


def unchanged(original):
    return original
