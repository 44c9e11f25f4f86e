import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.files.indexed_paths import bin_path, idx_path
from mindspeed.megatron.indexed_data import MAGIC, read_index, write_indexed
from mindspeed.problems import RunError

REMAKE = "create it again with mindspeed data prepare, or copy it again from its source"


@pytest.fixture
def prefix(tmp_path):
    prefix = str(tmp_path / "text")
    write_indexed(prefix, [[np.arange(5), np.arange(3)], [np.arange(4)]], vocab_size=257)
    return prefix


def problem_of(prefix):
    with pytest.raises(RunError) as caught:
        read_index(prefix)
    (problem,) = caught.value.problems
    return str(problem)


def test_an_index_says_how_long_the_sequences_are(prefix):
    index = read_index(prefix)
    assert (index.lengths.tolist(), index.tokens, index.dtype) == ([5, 3, 4], 12, np.uint16)
    assert index.read(1, 3).tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path):
    prefix = str(tmp_path / "text")
    write_indexed(prefix, [[np.array([70000])]], vocab_size=100_000)
    assert read_index(prefix).read(0, 1).tolist() == [70000]


def test_missing_files_are_all_named(tmp_path):
    prefix = str(tmp_path / "none")
    assert problem_of(prefix) == (
        f"MS601 there is no {prefix}.idx and no {prefix}.bin\n"
        f"  where: data {prefix}\n"
        "  fix: mindspeed data prepare INPUT... -o PREFIX creates both files"
    )


def test_a_foreign_file_is_told_from_a_damaged_one(prefix):
    path = idx_path(prefix)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert problem_of(prefix) == (
        f"MS601 {path} cannot be read: the file is not an index of Megatron's indexed format, because it starts "
        "differently\n"
        f"  where: {path}\n"
        f"  fix: {REMAKE}"
    )


def test_an_unknown_version_is_refused(prefix):
    path = idx_path(prefix)
    path.write_bytes(MAGIC + bytes(200))
    assert problem_of(prefix).startswith(
        f"MS601 {path} cannot be read: the file has version 0 and type code 0, which are unknown"
    )


@given(st.data())
def test_every_truncation_of_the_index_is_noticed(tmp_path_factory, data):
    prefix = str(tmp_path_factory.mktemp("cut") / "text")
    write_indexed(prefix, [[np.arange(5), np.arange(3)]], vocab_size=257)
    content = idx_path(prefix).read_bytes()
    idx_path(prefix).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert problem_of(prefix).startswith("MS601 ")


def test_data_that_was_cut_off_is_noticed(prefix):
    path = bin_path(prefix)
    path.write_bytes(path.read_bytes()[:-2])
    assert problem_of(prefix) == (
        f"MS601 {path} cannot be read: the file has 22 bytes, but the index describes 24\n  where: {path}\n  fix: {REMAKE}"
    )


def test_nothing_is_left_of_an_interrupted_preparation(tmp_path):
    def documents():
        yield [np.arange(3)]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_indexed(str(tmp_path / "text"), documents(), vocab_size=257)
    assert list(tmp_path.iterdir()) == []


def test_megatron_reads_what_is_written(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    assert [sequence.tolist() for sequence in dataset[0:3]] == [list(range(5)), list(range(3)), list(range(4))]
    assert dataset.document_indices.tolist() == [0, 2, 3]
