"""Keep pydantic usable where the metadata of an installed package is damaged.

pydantic asks all metadata for plugins when the first model is made, and fails where one file cannot be read. Models are made
without plugins then; the damaged package is a row of ``mindspeed features list`` (MS101).
"""

from __future__ import annotations

import os

from pydantic import create_model

try:
    create_model("FirstModel")
except Exception:  # damaged in any way
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
