"""What failed in a run is run once more, alone, if it is little; what fails again fails the run."""

import json

import pytest

from tests import second_try


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record failures in a folder; each of ``alone`` passes alone."""

    def record(tests, alone=()):
        cache = tmp_path / ".pytest_cache" / "v" / "cache"
        cache.mkdir(parents=True)
        (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(tests, True)), encoding="utf-8")
        monkeypatch.setattr(second_try, "passes_alone", lambda test: test in alone)
        return tmp_path

    return record


def test_what_passes_alone_is_named_as_flaky(recorded, capsys) -> None:
    assert second_try.main(recorded(["a::b", "a::c"], alone=["a::b", "a::c"])) == 0
    assert capsys.readouterr().out.splitlines() == [
        "FLAKY a::b: failed beside others, passes alone",
        "FLAKY a::c: failed beside others, passes alone",
    ]


def test_what_fails_twice_fails_the_run(recorded, capsys) -> None:
    assert second_try.main(recorded(["a::b", "a::c"], alone=["a::c"])) == 1
    assert "FAILED a::b: twice" in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 4])
def test_a_run_that_broke_or_failed_often_gets_no_second_try(recorded, capsys, number) -> None:
    tests = [f"a::{name}" for name in range(number)]
    assert second_try.main(recorded(tests, alone=tests)) == 1
    assert f"{number} failures are recorded" in capsys.readouterr().err


def test_without_a_record_there_is_nothing_to_try(tmp_path) -> None:
    assert second_try.failed(tmp_path) == []
