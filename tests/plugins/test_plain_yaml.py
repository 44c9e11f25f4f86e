"""YAML of users is plain data: no tags, no dates, text as keys, and limits that hold whatever the text is."""

import time

import pytest
import yaml

from mindspeed.files.plain_yaml import PlainDataError, read_plain

JOB = """
features: [a, b]            # a comment
settings:
  a: {size: 2, rate: 1.5, on: true, off: no, name: "2", text: 'x y', nothing: ~, hex: 0x10}
  b: &b
    list: [1, [2, 3], {c: 4}]
  d: *b
  e: {<<: *b, more: 1}
world:
  tp: 2
"""
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def error_of(text):
    with pytest.raises(PlainDataError) as caught:
        read_plain(text)
    return str(caught.value), caught.value.line


def test_a_job_file_reads_as_before():
    expected = yaml.safe_load(JOB.replace("on:", "'on':").replace("off:", "'off':"))
    assert read_plain(JOB) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("5", 5),
        ("-1.5", -1.5),
        ("1e-5", "1e-5"),
        ("2024-13-99", "2024-13-99"),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("yes", True),
        ("'yes'", "yes"),
        ("{1: a, ~: b, on: c}", {"1": "a", "~": "b", "on": "c"}),
        ("a: &x 1\nb: &x 2\nc: *x", {"a": 1, "b": 2, "c": 2}),
        ("{a: {<<: [{x: 1}, {x: 2, y: 3}], x: 0}}", {"a": {"x": 0, "y": 3}}),
    ],
)
def test_values_are_plain(text, value):
    assert read_plain(text) == value


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a:\n  - !!int x", "the tag !!int is not plain data", 2),
        ("!!python/object/apply:os.system [id]", "the tag !!python/object/apply:os.system is not plain data", 1),
        ("? [a, b]\n: 1", "a key is a list or a mapping, not text", 1),
        ("a: &a x\n? *a\n: 1", "a key is an alias, not text", 2),
        ("a: &a {b: *a}", "the alias *a refers to nothing before it", 1),
        ("[" * 3000, "lists and mappings are nested more than 30 levels deep", 1),
        (BOMB, "it has more than 50,000 values", 5),
        ("a: " + "9" * 5000, "a number has more than 40 digits", 1),
        ("a: 1\n---\nb: 2", "it has more than one document", 2),
        ("# x\n" * 100_000, "it has more than 200,000 characters", 1),
        ("{<<: [1, 2]}", "expected a mapping for merging, but found scalar", 1),
        ("a: [", "expected the node content, but found '<stream end>'", 1),
    ],
)
def test_what_is_no_plain_data_is_told_with_its_line(text, message, line):
    begin = time.process_time()
    assert error_of(text) == (message, line)
    assert time.process_time() - begin < 1


def test_a_key_that_is_given_twice_is_told_with_both_lines():
    repeated = []
    assert read_plain("{a: 1, a: 2}", repeated) == {"a": 2}
    assert repeated == [("the key 'a' is given twice, first in line 1", 1)]
    repeated.clear()
    assert read_plain("a: 1\nb:\n  c: 2\n  c: 3\na: 4", repeated) == {"a": 4, "b": {"c": 3}}
    assert repeated == [
        ("the key 'c' is given twice, first in line 3", 4),
        ("the key 'a' is given twice, first in line 1", 5),
    ]
