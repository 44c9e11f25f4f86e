"""Several threads read sources at once, as the matrix does: none loses what another one keeps."""

import ast
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from mindspeed.engine.inspection.source import Module, files_consulted, parse, read_text, trees_kept
from mindspeed.engine.inspection.source_cache import SourceCache


@pytest.fixture
def module(tmp_path: Path) -> Module:
    file = tmp_path / "one.py"
    file.write_text("value = 1\n")
    return Module("one", str(file), None)


def test_the_files_of_one_thread_are_not_those_of_another(module: Module) -> None:
    with files_consulted() as mine, ThreadPoolExecutor(1) as other:
        other.submit(read_text, module).result()
        assert mine == set()
        read_text(module)
        assert mine == {module.file}


def test_a_thread_keeps_its_trees_when_another_one_drops_its_own(module: Module) -> None:
    def keep_and_drop() -> ast.Module:
        with trees_kept():
            return parse(str(module.file))

    with trees_kept(), ThreadPoolExecutor(1) as other:
        tree = parse(str(module.file))
        assert other.submit(keep_and_drop).result() is not tree
        assert parse(str(module.file)) is tree


def test_a_cache_that_is_read_by_some_threads_while_others_fill_it_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MINDSPEED_CACHE", str(tmp_path / "cache"))
    modules = [Module(f"m{number}", str(tmp_path / f"m{number}.py"), None) for number in range(40)]
    for module in modules:
        Path(str(module.file)).write_text(f"value = {module.name!r}\n")
    cache, together, interval = SourceCache([tmp_path]), Barrier(4), sys.getswitchinterval()

    def fill(names: list[Module]) -> None:
        together.wait()
        for module in names:
            assert cache.get(module.name, lambda module=module: read_text(module).decode()) == f"value = {module.name!r}\n"
            cache.revalidate()
            cache.save()

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(fill, [modules[start::4] for start in range(4)]))
    finally:
        sys.setswitchinterval(interval)
    again = SourceCache([tmp_path])
    assert [again.get(module.name, lambda: "lost") for module in modules] == [f"value = {m.name!r}\n" for m in modules]
