"""Read the locals of a counted function with a closure, as a debugger does: ``python counted_locals.py ROOT``.

Runs on any Python from 3.10 on, without a package installed.
"""

import sys
import traceback
from types import ModuleType

root = sys.argv[1]
package = ModuleType("mindspeed")
package.__path__ = [f"{root}/mindspeed"]
sys.modules["mindspeed"] = package

from mindspeed.engine.runtime.call_count import CallCount  # noqa: E402


def made(first, second):
    def add(a, b=2, *, c=3):
        if a > 5:
            raise ValueError(first)
        return second + a + b + c

    return add


class Base:
    def scaled(self):
        return 2


class Derived(Base):
    def scaled(self):
        print(sys._getframe(2).f_locals["self"] is self, end=" ")
        return super().scaled() * 3


function = made("first", 20)
counts = CallCount(function), CallCount(Derived.scaled)
try:
    function(9)
except ValueError as error:
    shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    frame = error.__traceback__.tb_next.tb_frame
print(function.__code__.co_freevars, sorted(set(frame.f_locals) & {"first", "second"}), "a = 9" in shown, end=" ")
print(Derived().scaled(), function(1), [count.calls for count in counts])
