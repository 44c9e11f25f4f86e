from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import mindspeed
from mindspeed.files.tables import fields_of, table_beside

TABLES = sorted(file for file in Path(mindspeed.__file__).parent.rglob("*.yaml") if file.with_suffix(".py").is_file())


@pytest.mark.parametrize("table", TABLES, ids=lambda file: file.stem)
def test_a_table_is_the_same_without_the_loader_in_c(table, monkeypatch):
    read = table_beside(str(table.with_suffix(".py")))
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert table_beside(str(table.with_suffix(".py"))) == read


def test_no_key_of_a_table_is_given_twice_or_read_as_another_type():
    assert TABLES

    def keys(node: yaml.Node):
        if isinstance(node, yaml.MappingNode):
            names = [key.value for key, _ in node.value]
            assert len(names) == len(set(names)), names
            assert all(key.tag == "tag:yaml.org,2002:str" for key, _ in node.value), names
        if isinstance(node, yaml.CollectionNode):
            for part in node.value:
                for child in part if isinstance(part, tuple) else (part,):
                    keys(child)

    for table in TABLES:
        keys(yaml.compose(table.read_text(encoding="utf-8")))


def test_the_fields_of_a_row_have_tuples_for_lists():
    assert fields_of({"flag": "--a", "choices": {"b": "c"}, "off": [-1]}) == {
        "flag": "--a",
        "choices": {"b": "c"},
        "off": (-1,),
    }
