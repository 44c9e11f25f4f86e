"""Raw text: which files of a path are read, and what their documents are."""

import json

import pytest

from mindspeed.files import raw_text
from mindspeed.files.raw_text import documents, missing_package, mixed_formats, raw_files
from mindspeed.problems import RunError


def read(file, text, key="text"):
    file.write_text(text, encoding="utf-8")
    return list(documents([file], key))


def problem_of(file, text, key="text"):
    with pytest.raises(RunError) as caught:
        read(file, text, key)
    return caught.value.problems[0]


def test_each_format_gives_the_same_documents(tmp_path):
    rows = [{"text": "one, 1"}, {"text": "zwölf"}]
    assert read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n") == ["one, 1", "zwölf"]
    assert read(tmp_path / "a.json", json.dumps(rows)) == ["one, 1", "zwölf"]
    assert read(tmp_path / "a.csv", 'n,text\n1,"one, 1"\n2,zwölf\n') == ["one, 1", "zwölf"]
    assert read(tmp_path / "a.txt", "one, 1\n\nzwölf") == ["one, 1", "zwölf"]


def test_columns_of_parquet_and_arrow_give_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": ["one", "two"], "n": [1, 2]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pyarrow.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert list(documents([tmp_path / name], "text")) == ["one", "two"]


def test_a_format_without_its_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_text, "find_spec", lambda name: None)
    problem = missing_package([tmp_path / "a.parquet"])
    assert (problem.code, problem.fix_text) == ("MS501", "pip install pyarrow")
    assert problem.message == f"{tmp_path}/a.parquet needs the package pyarrow, which is not installed"
    assert missing_package([tmp_path / "a.jsonl"]) is None


def test_a_folder_gives_its_files_of_raw_text(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "model.safetensors"):
        (tmp_path / name).touch()
    assert [file.name for file in raw_files(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert raw_files(tmp_path / "model.safetensors") == raw_files(tmp_path / "none.jsonl") == ()


def test_a_record_without_its_text_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    problem = problem_of(file, '{"text": "a"}\n{"content": "b", "txt": 1}')
    assert problem.message == f"{file}, record 2 has no field 'text', only 'content', 'txt'"
    assert "txt" in problem.fix_text
    assert problem_of(file, "3").message == f"{file}, record 1 is no record with fields"
    assert problem_of(file, '{"n": 7}', "n").message == f"{file}, record 1 has no text in the field 'n', but int"


def test_a_broken_line_is_named(tmp_path):
    problem = problem_of(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": ')
    assert problem.message.startswith(f"{tmp_path}/a.jsonl cannot be read: line 2 is not JSON: ")


def test_a_folder_with_several_formats_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "LICENSE.txt").write_text("all rights")
    files = raw_files(tmp_path)
    problem = mixed_formats(tmp_path, files)
    assert problem is not None
    assert problem.message == f"{tmp_path} has 1 .jsonl and 1 .txt files, but training text of one format is read"
    assert mixed_formats(tmp_path, files[:1]) is None


def test_a_mark_of_the_byte_order_and_an_array_after_a_blank_line_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    (tmp_path / "b.json").write_text('\n [{"text": "two"}]')
    assert [list(documents([tmp_path / name], "text")) for name in ("a.jsonl", "b.json")] == [["one"], ["two"]]


def test_a_row_with_too_many_cells_or_an_open_quote_is_a_problem(tmp_path):
    for text in ("body\none,two\n", 'text\n"open,2\n'):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(RunError) as caught:
            list(documents([tmp_path / "a.csv"], "text"))
        assert caught.value.problems[0].code == "MS601"
