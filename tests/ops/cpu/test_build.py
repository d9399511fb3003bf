"""The compiled library: built once, trusted only if nobody else can have written it, and never the cause of a crash."""

import logging
import os
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from diff_transformer.ops import diff_attention
from diff_transformer.ops.cpu import build, layer, native
from diff_transformer.testing import assert_within_budget, make_inputs

KEPT = None if native.library() is None else build.library_path(build.compiler())
needs_native = pytest.mark.skipif(
    KEPT is None or not KEPT.exists(), reason="no C++ compiler with OpenMP, or no cache folder, on this machine"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, as in a new process; gives the folder of the libraries."""
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DIFF_TRANSFORMER_NATIVE", raising=False)
    build.library.cache_clear(), native.available_multiplies.cache_clear()
    yield tmp_path / "cache" / f"native-{os.geteuid()}"
    build.library.cache_clear(), native.available_multiplies.cache_clear()


@pytest.fixture
def become(fresh, monkeypatch, tmp_path):
    """Make these lines of a shell script the compiler. They may use $out and $built, the library as it should be.

    Gives a function that counts how often the compiler was called.
    """
    assert KEPT is not None
    built, calls, script = tmp_path / "built.so", tmp_path / "calls", tmp_path / "compiler"
    built.write_bytes(KEPT.read_bytes()[: -build.DIGEST_BYTES])
    monkeypatch.setenv("CXX", str(script))

    def write(*lines):
        head = ["#!/bin/sh", f"echo called >> {shlex.quote(str(calls))}", f"built={shlex.quote(str(built))}",
                "arguments=$*", 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done']  # fmt: skip
        script.write_text("\n".join([*head, *lines]) + "\n")
        script.chmod(0o700)
        return lambda: len(calls.read_text().splitlines()) if calls.exists() else 0

    return write


COPIES = 'cp "$built" "$out"'


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def computes():
    x = make_inputs(T=63, requires_grad=False)
    exact = diff_attention(*x, is_causal=True, backend="reference")
    assert_within_budget(diff_attention(*x, is_causal=True, backend="blockwise"), exact)


def test_a_machine_without_a_compiler_says_so_and_goes_on(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    computes()
    assert len(warnings(caplog)) == 1
    assert "no C++ compiler (no-such-compiler) is installed" in caplog.text


@needs_native
def test_library_is_built_once_into_the_cache_folder(fresh, become):
    calls = become(COPIES)
    assert build.library() is not None
    (made,) = fresh.glob("*.so")
    before = made.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library() is not None
    assert made.stat().st_mtime_ns == before
    assert calls() == 1
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700


def test_source_that_does_not_compile_is_told(monkeypatch, tmp_path):
    (tmp_path / "wrong.cpp").write_text("this is no program")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "wrong.cpp")
    try:
        command = build.compiler()
    except build.CannotBuild:
        pytest.skip("no C++ compiler here")
    with pytest.raises(build.CannotBuild, match=r"failed: .*error"):
        build.build(command, tmp_path / "wrong.so")
    assert not (tmp_path / "wrong.so").exists()


@needs_native
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_library_in_a_folder_that_others_can_write_is_not_loaded(fresh, become, caplog, mode):
    become(COPIES)
    path = build.library_path(build.compiler())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"planted")
    path.parent.chmod(mode)
    assert build.library() is not None
    assert path.read_bytes() == b"planted"
    assert len(warnings(caplog)) == 1
    assert f"{fresh} belongs to another user, or others can write to it" in caplog.text
    assert "set DIFF_TRANSFORMER_CACHE to a folder that you own" in caplog.text
    computes()


@needs_native
def test_a_folder_of_another_user_is_not_used(fresh, become, monkeypatch, caplog):
    become(COPIES)
    monkeypatch.setattr(build.os, "geteuid", lambda: 4242)
    assert build.library() is not None
    assert list((fresh.parent / "native-4242").iterdir()) == []
    assert "belongs to another user" in caplog.text


@needs_native
@pytest.mark.parametrize("place", ["the cache folder", "above it", "where a link leads"])
def test_a_folder_that_others_can_exchange_is_not_used(fresh, become, caplog, monkeypatch, tmp_path, place):
    calls = become(COPIES)
    open_to_all = tmp_path / "open"
    inner = open_to_all if place == "the cache folder" else open_to_all / "inner"
    inner.mkdir(parents=True)
    if place == "where a link leads":
        (tmp_path / "link").symlink_to(inner)
        inner = tmp_path / "link"
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(inner))
    open_to_all.chmod(0o1777)  # as /tmp: nobody can rename what is another's
    assert build.library() is not None
    assert warnings(caplog) == []
    open_to_all.chmod(0o777)
    for _ in range(2):
        build.library.cache_clear()
        assert build.library() is not None
    assert calls() == 3, "a library from there was loaded"
    assert f"{open_to_all} belongs to another user, or others can write to it" in caplog.text


@needs_native
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_in_one_of_another_user_is_not_used(fresh, become, caplog):
    become(COPIES)
    fresh.mkdir(parents=True)
    os.chown(fresh.parent, 4242, 4242)
    assert build.library() is not None
    assert list(fresh.iterdir()) == []
    assert f"{fresh.parent} belongs to another user" in caplog.text


@needs_native
def test_without_a_safe_place_nothing_is_compiled(fresh, become, caplog, monkeypatch, tmp_path):
    calls = become(COPIES)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "cache"))
    computes()
    assert calls() == 0
    assert f"{tmp_path / 'cache'} belongs to another user, or others can write to it; set TMPDIR" in caplog.text


@needs_native
@pytest.mark.parametrize("in_memory", [True, False])
def test_what_was_checked_is_loaded(fresh, become, monkeypatch, in_memory):
    """The file is exchanged after it was checked."""
    become(COPIES)
    assert build.library() is not None
    (made,) = fresh.glob("*.so")
    check = build.kept

    def checked_and_exchanged(path):
        content = check(path)
        made.unlink()
        made.write_bytes(b"foreign")
        return content

    monkeypatch.setattr(build, "kept", checked_and_exchanged)
    if not in_memory:
        monkeypatch.delattr(build.os, "memfd_create")
    build.library.cache_clear()
    computes()
    assert build.library() is not None


@needs_native
def test_an_umask_that_shares_new_folders_with_all_makes_no_difference(fresh, become, caplog):
    become(COPIES)
    before = os.umask(0)
    try:
        assert build.library() is not None
    finally:
        os.umask(before)
    assert warnings(caplog) == []


COMPILES = """
import sys
from diff_transformer.ops.cpu.build import library
library()
"""


@needs_native
@pytest.mark.parametrize("private", [True, False])
def test_a_killed_process_leaves_no_compiler_and_no_folder(fresh, become, monkeypatch, tmp_path, private):
    become("echo half > $out; echo half > $TMPDIR/half.s", "sleep 600 & echo $! > $built.pid", "wait")
    temporary, started = tmp_path / "temporary", tmp_path / "built.so.pid"
    temporary.mkdir()
    if not private:
        fresh.mkdir(parents=True)
        fresh.chmod(0o777)
    process = subprocess.Popen([sys.executable, "-c", COMPILES], env={**os.environ, "TMPDIR": str(temporary)})
    waited(lambda: started.exists() and started.read_text())
    process.kill()
    process.wait()
    assert ended(int(started.read_text())), "what the compiler started still runs"
    waited(lambda: not [*temporary.iterdir(), *fresh.glob(f"*{build._BUILDING}*")])


def waited(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@needs_native
def test_what_a_machine_that_went_down_left_is_removed(fresh, become):
    become(COPIES)
    path = build.library_path(build.compiler())
    left = path.with_name(f"{path.stem}{build._BUILDING}abc")
    left.mkdir(parents=True)
    fresh.chmod(0o700)
    assert build.library() is not None
    assert [one.name for one in fresh.iterdir() if one.is_dir()] == []


@needs_native
@pytest.mark.parametrize("damage", ["foreign", "truncated", "writable by others", "a link"])
def test_a_damaged_library_is_built_again(fresh, become, caplog, damage, tmp_path):
    calls = become(COPIES)
    assert build.library() is not None
    (made,) = fresh.glob("*.so")
    content = made.read_bytes()
    if damage == "a link":
        made.rename(tmp_path / "elsewhere.so")
        made.symlink_to(tmp_path / "elsewhere.so")
    elif damage == "writable by others":
        made.chmod(0o777)
    else:
        made.unlink()  # the old one is loaded
        made.write_bytes(b"something else" if damage == "foreign" else content[: len(content) // 2])
    build.library.cache_clear()
    assert build.library() is not None
    assert calls() == 2
    assert made.read_bytes() == content
    assert not made.is_symlink()
    assert warnings(caplog) == []


@needs_native
def test_no_home_folder(fresh, become, monkeypatch, caplog):
    become(COPIES)

    def unknown(uid):
        raise KeyError(uid)

    for name in ("DIFF_TRANSFORMER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert build.library() is not None
    computes()
    assert len(warnings(caplog)) == 1
    assert "there is no home folder" in caplog.text
    assert "DIFF_TRANSFORMER_CACHE" in caplog.text


@needs_native
def test_a_cache_folder_that_cannot_be_made_names_the_variable(fresh, become, caplog, tmp_path):
    become(COPIES)
    (tmp_path / "cache").touch()
    assert build.library() is not None
    assert len(warnings(caplog)) == 1
    assert f"{fresh} cannot be made (Not a directory); set DIFF_TRANSFORMER_CACHE to a folder" in caplog.text


@needs_native
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["echo it rains >&2; exit 3"], "failed: it rains"),
        (["echo text > $out"], "invalid ELF header|file too short"),
        (["exit 0"], "No such file"),
        (["sleep 600 & echo $! > $built.pid", "wait"], "has not ended after 1 s"),
    ],
    ids=["fails", "writes nonsense", "writes nothing", "hangs"],
)
def test_a_compiler_that_does_not_work_costs_one_warning(become, monkeypatch, caplog, tmp_path, lines, said):
    monkeypatch.setattr(build, "SECONDS", 1.0)
    calls = become(*lines)
    computes()
    computes()
    assert calls() == 1, "a failure is not remembered"
    assert len(warnings(caplog)) == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(caplog.text)
    started = tmp_path / "built.so.pid"
    assert not started.exists() or ended(int(started.read_text())), "what the compiler started still runs"


def ended(process):
    """Whether a process has ended, waited for or not."""
    for _ in range(50):
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def in_threads(function, count=8):
    threads = [threading.Thread(target=function) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@needs_native
def test_of_eight_ranks_one_compiles_and_the_others_wait(become):
    calls = become("sleep 0.5", COPIES)
    loaded = []
    in_threads(lambda: loaded.append(build._load(build.compiler(), build.FLAGS)[1]))
    assert len(loaded) == 8
    assert calls() == 1


@needs_native
def test_eight_ranks_share_a_failure_and_a_later_process_tries_again(become):
    calls = become("sleep 0.5", "exit 1")
    failed = []

    def rank():
        try:
            build._load(build.compiler(), build.FLAGS)
        except build.CannotBuild as error:
            failed.append(error)

    in_threads(rank)
    assert len(failed) == 8
    assert calls() == 1
    become(COPIES)
    assert build.library() is not None


@needs_native
def test_a_compiler_without_openmp_builds_for_one_thread(become, caplog):
    compiler = next(path for name in ("c++", "g++", "clang++") if (path := shutil.which(name)))
    rejects = 'case "$arguments" in *-fopenmp*) echo "error: unsupported option \'-fopenmp\'" >&2; exit 1;; esac'
    calls = become(rejects, f"exec {compiler} $arguments")
    torch.set_num_threads(3)
    try:
        for sizes in ({"T": 200}, {"T": 200, "B": 1, "H": 2, "G": 1}, {"T": 1, "S": 300}):
            x = make_inputs(**sizes)
            exact = diff_attention(*x, is_causal=True, backend="reference")
            out = diff_attention(*x, is_causal=True, backend="blockwise")
            assert_within_budget(out, exact)
            expected = torch.autograd.grad(exact.square().sum(), x)
            for value, gradient in zip(torch.autograd.grad(out.square().sum(), x), expected, strict=True):
                assert_within_budget(value, gradient)
    finally:
        torch.set_num_threads(1)
    assert calls() == 2
    assert build.library() is not None
    assert warnings(caplog) == []


@needs_native
def test_no_exception_leaves_the_library():
    """More memory than there is ends in a status, not in the process."""
    sizes = [0, 1, 1, 1, 1, 1, 2**44, 16, 16, True, 0, 1, 8, 1]
    numbers = [0] * (48 + 4 + 1 + 5) + sizes
    problem = native.LAYOUT.pack(*numbers, 0.25, *native.NO_NORM)
    lam = layer.LAMBDA.pack(0, 0, 0, 0, 0, 0.5)
    library = native.library()
    assert library is not None
    assert library.diff_attention_decode_workspace(problem, False) > 2**44
    status = library.diff_attention_decode_layer(problem, lam, False)
    with pytest.raises(MemoryError, match="could not allocate its workspace"):
        build.refuse_failure(status)
    assert library.diff_attention_forward_workspace(problem, 9) == -1  # no such form
    with pytest.raises(RuntimeError, match="set DIFF_TRANSFORMER_NATIVE=0 to use PyTorch"):
        build.refuse_failure(library.diff_attention_backward(problem, 9, None))


def test_a_wrong_value_of_the_switch_is_refused(fresh, monkeypatch):
    monkeypatch.setenv("DIFF_TRANSFORMER_NATIVE", "yes")
    with pytest.raises(ValueError, match="DIFF_TRANSFORMER_NATIVE is 'yes'; give 0"):
        diff_attention(*make_inputs(T=5), backend="blockwise")
    monkeypatch.setenv("DIFF_TRANSFORMER_NATIVE", "0")
    assert build.library() is None
