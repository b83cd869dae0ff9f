"""Imports of large packages: without the garbage collector, and without packages that nothing here uses."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import cache
from textwrap import dedent

import pytest
from processes import ROOT, run_python

from ragr1_actors.core.process.imports import hidden, quick_imports


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_in_the_block_and_what_it_made_is_old_afterwards() -> None:
    with quick_imports():
        assert not gc.isenabled()
        made: list[object] = [[]]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert any(visited is made for visited in gc.get_objects(generation=2))


def test_garbage_of_the_block_can_be_collected() -> None:
    class Node:
        pass

    with quick_imports():
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        found = weakref.ref(node)
        del node
    gc.collect()
    assert found() is None


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with quick_imports():
        pass
    assert not gc.isenabled()


def test_the_collector_goes_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()


END = """
    import atexit, sys
    from contextlib import nullcontext
    from types import ModuleType
    from ragr1_actors.core.process.imports import quick_exit
    class Node:
        def __del__(self):
            print("visited")
    with quick_exit() if "quickly" in sys.argv else nullcontext():
        node = Node()
        node.itself = node
        del node
        atexit.register(print, "registered", end=" ")
        if "triton" in sys.argv:
            library = sys.modules["triton._C.libtriton"] = ModuleType("libtriton")
            library.held = Node()  # it goes with the module, and not as garbage
            del library
        {}
"""


def test_a_quick_exit_looks_for_no_garbage() -> None:
    assert run_python(END.format(""), "slowly") == "registered visited\n"
    assert run_python(END.format(""), "quickly") == "registered "


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [("", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('why')", 1, "why\n"), ("raise LookupError", 1, "LookupError\n")],
)
def test_a_process_with_triton_ends_before_its_modules_are_taken_apart(end: str, status: int, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", dedent(END.format(end)), "quickly", "triton"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (status, "registered ")
    assert done.stderr.endswith(told)


@pytest.mark.vllm
def test_the_library_of_triton_has_nothing_to_say_at_the_end() -> None:
    pytest.importorskip("triton._C.libtriton")
    script = """
        import triton._C.libtriton
        from ragr1_actors.core.process.imports import quick_exit
        with quick_exit():
            pass
    """
    assert run_python(script, stderr=subprocess.STDOUT) == ""


@cache
def has_wave() -> bool:
    return importlib.util.find_spec("wave") is not None


def test_a_hidden_package_is_not_found_and_a_loaded_one_is() -> None:
    sys.modules.pop("wave", None)
    assert has_wave()
    with hidden("wave", "json", checks=(has_wave,)):
        assert not has_wave()
        with pytest.raises(ImportError):
            import wave
        import json
    assert has_wave()
    import wave

    assert (wave.__name__, json.__name__) == ("wave", "json")


@pytest.mark.engine
def test_a_policy_loads_without_packages_that_nothing_here_uses() -> None:
    script = """
        import sys
        import ragr1_actors.core.models.huggingface
        print([name for name in ("scipy", "sklearn", "boto3") if name in sys.modules])
    """
    assert run_python(script).strip() == "[]"
