import json

import numpy as np
import pytest

from mindspeed.megatron.indexed_data import read_index
from mindspeed.problems import RunError
from mindspeed.workbench.training import corpus
from mindspeed.workbench.training.tokenizer import tokenizer_of


@pytest.fixture
def word_tokenizer(tmp_path):
    """A tokenizer.json of three words and an end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"a": 0, "b": 1, "?": 2, "</s>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def test_bytes_are_tokens_and_each_file_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("aé\xff".encode("latin-1"))
    (tmp_path / "b.txt").write_text("b")
    prefix = str(tmp_path / "out" / "data")
    corpus.prepare([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")], prefix)
    assert read_index(prefix).read(0, 2).tolist() == [98, 256, 97, 0xE9, 0xFF, 256]


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("z", "y", "x"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "text").write_text(name)
    corpus.prepare([str(tmp_path / "in")], str(tmp_path / "data"))
    assert tokenizer_of(str(tmp_path / "data")).decode(read_index(str(tmp_path / "data")).read(0, 3).tolist()) == "xyz"


def test_a_long_file_has_several_sequences_so_that_some_can_be_held_out(tmp_path):
    (tmp_path / "text").write_bytes(bytes(10_000))
    index = corpus.prepare([str(tmp_path / "text")], str(tmp_path / "data"))
    assert index.lengths.tolist() == [4096, 4096, 1809]


def test_a_given_tokenizer_is_kept_beside_the_data(tmp_path, word_tokenizer):
    (tmp_path / "text").write_text("a b c")
    prefix = str(tmp_path / "data")
    corpus.prepare([str(tmp_path / "text")], prefix, word_tokenizer)
    assert read_index(prefix).read(0, 1).tolist() == [0, 1, 2, 3]
    kept = tokenizer_of(prefix)
    assert (kept.vocab_size, kept.eod, kept.decode([0, 1])) == (4, 3, "a b")


def test_every_input_without_text_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    inputs = [str(tmp_path / "empty"), str(tmp_path / "gone")]
    with pytest.raises(RunError) as caught:
        corpus.prepare(inputs, str(tmp_path / "data"))
    said = [f"{inputs[0]} contains no text", f"{inputs[1]} does not exist"]
    assert [str(problem) for problem in caught.value.problems] == [
        f"MS601 {text}\n  where: {name}\n  fix: give a text file or a folder" for text, name in zip(said, inputs, strict=True)
    ]


def test_prepared_data_is_replaced_only_when_that_is_asked_for(tmp_path):
    (tmp_path / "text").write_text("a")
    arguments = [str(tmp_path / "text")], str(tmp_path / "data")
    corpus.prepare(*arguments)
    (tmp_path / "text").write_text("ab")
    with pytest.raises(RunError) as caught:
        corpus.prepare(*arguments)
    assert str(caught.value) == (
        f"MS603 data already exists: {tmp_path}/data.bin, {tmp_path}/data.idx\n"
        f"  where: {tmp_path}/data\n"
        "  fix: --overwrite to replace the data, or use another -o"
    )
    assert read_index(str(tmp_path / "data")).tokens == 2
    assert corpus.prepare(*arguments, overwrite=True).tokens == 3


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "text").write_text("a")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match=r"MS601 .*tokenizer.json is not a tokenizer"):
        corpus.prepare([str(tmp_path / "text")], str(tmp_path / "data"), str(tmp_path / "tokenizer.json"))


def test_data_that_does_not_name_its_tokenizer_says_how_to_name_it(tmp_path):
    prefix = str(tmp_path / "data")
    with pytest.raises(RunError) as caught:
        tokenizer_of(prefix)
    assert str(caught.value) == (
        f"MS601 {prefix} does not contain the tokenizer that created it: {prefix}.json does not exist\n"
        f"  where: {prefix}.json\n"
        "  fix: --tokenizer bytes, or --tokenizer with its tokenizer.json"
    )


def test_the_standard_library_is_prepared_once_and_in_one_order(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("b.py", "a.py", "test/c.py", "encodings/d.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name[-4] * 3)
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    prefixes = []
    for cache in ("one", "two"):
        monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / cache))
        prefixes += [corpus.standard_library(), corpus.standard_library()]
    assert prefixes[0] == prefixes[1]
    first, _, second, _ = (read_index(prefix).read(0, 2).tolist() for prefix in prefixes)
    assert first == second
    assert sorted(np.unique(first).tolist()) == [97, 98, 256]


def test_a_library_without_sources_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(RunError) as caught:
        corpus.standard_library()
    assert str(caught.value) == (
        f"MS601 without --data, the training text is the Python files of the standard library, but {tmp_path} contains none\n"
        "  fix: --data PREFIX of data that mindspeed data prepare created"
    )


def test_the_command_prints_what_it_made(tmp_path):
    from click.testing import CliRunner

    from mindspeed.cli import main

    (tmp_path / "text").write_text("abc")
    prefix = str(tmp_path / "data")
    done = CliRunner().invoke(main, ["data", "prepare", str(tmp_path / "text"), "-o", prefix, "--json"])
    assert json.loads(done.stdout) == {"prefix": prefix, "tokens": 4, "sequences": 1, "vocab_size": 257}


@pytest.mark.parametrize("prefix", ["", ".", "..", "folder/", "folder/.", "/"])
def test_an_output_without_a_name_is_refused_and_writes_no_hidden_file(tmp_path, monkeypatch, prefix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("words")
    with pytest.raises(RunError, match="contains no file name"):
        corpus.prepare(["text"], prefix)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
