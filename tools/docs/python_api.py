"""The page of the Python API, made from the docstrings of its public names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final, cast

import mindspeed
from mindspeed import plugins
from tools.docs.markdown import code, page, table

ABOUT: Final = (
    "`mindspeed.plan` makes a plan or raises `ResolutionError` with every problem. `mindspeed.activate` patches Megatron in "
    "this process. Both may be called before or after Megatron is imported."
)
EXAMPLE: Final = """\
```python
import mindspeed

plan = mindspeed.plan(features=["rms-norm"], settings={"tensor-parallel": {"size": 2}}, world={"num_attention_heads": 4})
mindspeed.activate(plan)
...  # build and train the model
print(mindspeed.report().summary())
mindspeed.deactivate()
```"""


def python_api_page() -> str:
    """Functions of ``mindspeed`` with signature and docstring, and what ``mindspeed.plugins`` exports for authors."""
    functions = [list(_function(name)) for name in mindspeed.__all__ if not name.startswith("_")]
    exported = [
        (code(name), _first_line(getattr(plugins, name)))
        for name in sorted(cast("list[str]", plugins.__all__))
        if name.isidentifier()
    ]
    source = "the docstrings of mindspeed and mindspeed.plugins"
    operators = (
        "[Operators](operators.md) are functions of `mindspeed.ops`. [Public interfaces](interfaces.md) says what stays."
    )
    return page(
        "Python API",
        source,
        [ABOUT],
        [EXAMPLE],
        [operators],
        ["## mindspeed"],
        *functions,
        ["## mindspeed.plugins", "", "What a feature imports.", "", *table(("name", "what it is"), exported)],
    )


def _function(name: str) -> Iterator[str]:
    function = getattr(mindspeed, name)
    signature = str(inspect.signature(function)).replace("'", "")
    yield f"### {name}\n\n```python\n{name}{signature}\n```\n\n{_prose(function)}"


def _prose(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").replace("``", "`")


def _first_line(thing: Any) -> str:
    """The first line of the docstring of a class or function of this project; of another value what it is."""
    if getattr(thing, "__module__", "").startswith("mindspeed") and (inspect.isclass(thing) or inspect.isfunction(thing)):
        return _prose(thing).partition("\n")[0]
    return f"A {type(thing).__name__}." if not inspect.isroutine(thing) else "A function of pydantic."
