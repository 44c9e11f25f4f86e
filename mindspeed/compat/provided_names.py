"""Import names of MindSpeed that work here: the object behind each."""

from __future__ import annotations

from typing import Any, Final

from mindspeed.files.tables import table_beside

_TABLES: Final[dict[str, Any]] = table_beside(__file__)

PROVIDED: Final[dict[str, dict[str, str]]] = _TABLES["provided"]
"""Modules that exist in MindSpeed alone, and their names; ``"module"`` or ``"module:name"`` is what a name stands for."""

VARIABLES: Final[dict[str, dict[str, None]]] = {"mindspeed.args_utils": {"_MINDSPEED_ARGS": None}}
"""Variables of old modules, with their first values; consumers write to them."""

BUILDERS: Final[dict[str, list[str]]] = _TABLES["builders"]
"""MindSpeed's builders that have operators here: the functions, below ``mindspeed.ops``, that their ``load`` gives."""

BUILDERS_OF_FEATURES: Final[dict[str, str]] = _TABLES["builders_of_features"]
"""MindSpeed's builders whose library has no functions here, and the reason."""
