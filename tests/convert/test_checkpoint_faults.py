"""A conversion that is stopped anywhere, by anything, leaves the target absent or whole, and the next run
goes on.
"""

import errno
import json
import os
import shutil
import signal
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_helpers import CONFIG, contents, halve, llama, write_checkpoint
from fault_shim import FaultyOs, ShortWrites, failing
from stopped_runs import in_a_process, killed_run, run, terminated_run

from attnlib.convert.checkpoint import (
    CheckpointError,
    ConvertedLayer,
    NoSpaceError,
    OutputError,
    RequestError,
    VerificationError,
    conversion,
    convert,
    progress,
    writing,
)


@pytest.fixture(autouse=True)
def _syncs_take_no_time(monkeypatch):
    monkeypatch.setattr(writing, "os", FaultyOs())


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "in", llama(), shards=2)


@pytest.fixture
def whole(tmp_path, source):
    """What an undisturbed run makes."""
    run(source, tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    shutil.rmtree(tmp_path / "whole")
    return expected


def calls_of(source, out, monkeypatch, **options):
    """How many calls of the shim a run makes."""
    with monkeypatch.context() as patch:
        shim = FaultyOs()
        patch.setattr(writing, "os", shim)
        run(source, out, **options)
    assert shim.count > 50
    return shim.count


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_a_failure_of_any_call_is_clean_and_resumable(tmp_path, source, whole, monkeypatch, code, every):
    before = contents(source)
    count = calls_of(source, tmp_path / "counted", monkeypatch)
    for at in range(code % every, count, every):  # the errors' calls alternate
        out = tmp_path / f"out{at}"
        with monkeypatch.context() as patch:
            patch.setattr(writing, "os", FaultyOs(at, failing(code)))
            with suppress(OutputError):  # removing the lock of a finished run may fail unheard
                run(source, out)
                assert contents(out) == whole
        assert not [name for name in contents(tmp_path) if name.endswith(".tmp")]
        assert not out.exists() or contents(out) == whole
        assert contents(source) == before
        if not out.exists():
            run(source, out)
        assert contents(out) == whole, at
        with pytest.raises(RequestError):
            run(source, out)
        assert not list(tmp_path.glob(f"out{at}.*"))
        shutil.rmtree(out)


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [(errno.ENOSPC, NoSpaceError, 5), (errno.EDQUOT, NoSpaceError, 5), (errno.EIO, OutputError, 1)],
)
def test_the_error_says_what_to_do(tmp_path, source, monkeypatch, code, kind, exit_code):
    monkeypatch.setattr(writing, "os", FaultyOs(8, failing(code), ("write",)))
    with pytest.raises(kind) as error:
        run(source, tmp_path / "out")
    assert type(error.value) is kind
    assert (error.value.exit_code, error.value.errno) == (exit_code, code)
    [note] = error.value.__notes__
    assert "out.partial-" in note
    assert note.endswith(": finished work is kept: run the same command again to resume")
    assert "run the same command" not in str(error.value)  # the command prints both


def test_a_failure_can_leave_nothing_behind(tmp_path, source, monkeypatch):
    monkeypatch.setattr(writing, "os", FaultyOs(8, failing(errno.ENOSPC), ("write",)))
    with pytest.raises(NoSpaceError, match="finished work is removed"):
        run(source, tmp_path / "out", keep=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_failing_swap_brings_the_earlier_result_back(tmp_path, source, monkeypatch):
    old = write_checkpoint(tmp_path / "old", llama())
    run(old, tmp_path / "out")
    earlier = contents(tmp_path / "out")

    class NoSecondRename(FaultyOs):
        def rename(self, path, target):
            if Path(target) == tmp_path / "out" and Path(path).name == "checkpoint":
                failing(errno.EIO)("rename")
            os.rename(path, target)

    monkeypatch.setattr(writing, "os", NoSecondRename())
    for keep in (True, False):
        with pytest.raises(OutputError):
            run(source, tmp_path / "out", overwrite=True, keep=keep)
        assert contents(tmp_path / "out") == earlier


def test_an_earlier_result_that_cannot_be_brought_back_is_not_removed(tmp_path, source, whole, monkeypatch):
    old = write_checkpoint(tmp_path / "old", llama())
    run(old, tmp_path / "out")
    earlier = contents(tmp_path / "out")

    class NoWayBack(FaultyOs):
        def rename(self, path, target):
            if Path(target) == tmp_path / "out":
                failing(errno.EIO)("rename")
            os.rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "os", NoWayBack())
        with pytest.raises(OutputError):
            run(source, tmp_path / "out", overwrite=True, keep=False)
    (work,) = tmp_path.glob("out.partial-*")
    assert contents(work / "replaced") == earlier
    shutil.rmtree(work / "checkpoint")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError):
        run(source, tmp_path / "out")
    assert contents(work / "replaced") == earlier


def test_short_writes_are_completed(tmp_path, source, whole, monkeypatch):
    monkeypatch.setattr(writing, "os", ShortWrites())
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def test_every_file_and_folder_is_synced_before_the_final_rename(tmp_path, source, monkeypatch):
    log = []

    class Logged(FaultyOs):
        def fsync(self, descriptor):
            log.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
            os.fsync(descriptor)

        def rename(self, path, target):
            log.append(("rename", str(target)))
            assert Path(path).is_dir() or ("fsync", str(path)) in log
            os.rename(path, target)

    monkeypatch.setattr(writing, "os", Logged())
    run(source, tmp_path / "out")
    final = log.index(("rename", str(tmp_path / "out")))
    work = next(Path(path).parent for _, path in log if path.endswith("/checkpoint"))
    assert log[final - 1] == ("fsync", str(work / "checkpoint"))
    assert log[final + 1 :] == [("fsync", str(tmp_path))]
    written = {Path(path).name for kind, path in log[:final] if kind == "rename"} - {"progress.json"}
    assert written == {path.name for path in (tmp_path / "out").iterdir()}
    for at, (kind, path) in enumerate(log[:final]):
        if kind == "rename":
            assert log[at + 1] == ("fsync", str(Path(path).parent))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_kill_at_any_call_leaves_the_target_absent_or_whole(
    tmp_path, source, whole, monkeypatch, overwrite, every
):
    options = {"overwrite": overwrite}
    old = tmp_path / "old"
    if overwrite:
        convert(source, old, halve, progress=False)
    earlier = contents(old) if overwrite else None
    count = calls_of(source, tmp_path / "counted", monkeypatch)
    for at in [*range(0, count, every), *range(count - 8, count)]:
        out = tmp_path / f"out{at}"
        if overwrite:
            shutil.copytree(old, out)
        assert in_a_process(killed_run, source, out, at, options) == -signal.SIGKILL
        assert not out.exists() or contents(out) in (whole, earlier)
        if not out.exists() or overwrite:
            run(source, out, **options)
        assert contents(out) == whole, at
        with pytest.raises(RequestError):
            run(source, out)
        assert not list(tmp_path.glob(f"out{at}.*")), at
        shutil.rmtree(out)


def test_sigterm_waits_for_the_end_of_the_shard(tmp_path, source, whole):
    out = tmp_path / "out"
    assert in_a_process(terminated_run, source, out) == -signal.SIGTERM
    (work,) = tmp_path.glob("out.partial-*")
    shards = {path.name for path in (work / "checkpoint").iterdir()}
    assert shards == json.loads((work / "progress.json").read_text())["shards"].keys()
    assert "model-00002-of-00006.safetensors" in shards
    assert len(shards) < 6
    run(source, out)
    assert contents(out) == whole


def stopped(source, out, monkeypatch, *, write=16):
    """A run that fails behind some finished shards; returns its work folder."""
    with monkeypatch.context() as patch:
        patch.setattr(writing, "os", FaultyOs(write, failing(errno.EIO), ("write",)))
        with pytest.raises(OutputError):
            run(source, out)
    (work,) = out.parent.glob(f"{out.name}.partial-*")
    assert len(list((work / "checkpoint").iterdir())) > 0
    return work


def test_finished_shards_are_not_written_again(tmp_path, source, whole, monkeypatch):
    work = stopped(source, tmp_path / "out", monkeypatch, write=33)
    done = {path.name: path.stat().st_ino for path in (work / "checkpoint").iterdir()}
    seen = []

    def counting(weights, shape):
        seen.append(shape.index)
        return halve(weights, shape)

    run(source, tmp_path / "out", counting)
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in done} == done
    assert len(done) == 6
    assert seen == [0]  # to see what comes out
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize("damage", ["byte", "cut", "link", "gone", "progress", "no progress", "extra"])
def test_what_cannot_be_believed_is_done_again(tmp_path, source, whole, monkeypatch, damage):
    work = stopped(source, tmp_path / "out", monkeypatch, write=30)
    shard = sorted((work / "checkpoint").iterdir())[0]
    data = shard.read_bytes()
    if damage == "byte":
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        shard.write_bytes(data[:-1])
    elif damage == "link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    elif damage == "gone":
        shard.unlink()
    elif damage == "progress":
        (work / "progress.json").write_text("{")
    elif damage == "no progress":
        (work / "progress.json").unlink()
    else:
        (work / "checkpoint/stray").mkdir()
        (work / "checkpoint/.x.tmp").write_text("x")
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def test_another_request_starts_again(tmp_path, source, monkeypatch):
    work = stopped(source, tmp_path / "out", monkeypatch)
    convert(
        source, tmp_path / "out", halve, settings={"converter": "other"}, max_shard_size=4000, progress=False
    )
    assert work.exists()  # it may still be gone on with, elsewhere it would be in the way
    assert json.loads((tmp_path / "out/conversion_report.json").read_text())["settings"] == {
        "converter": "other"
    }


def test_a_work_folder_of_a_stranger_is_refused(tmp_path, source, monkeypatch):
    work = stopped(source, tmp_path / "out", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(progress.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(RequestError, match="of this user"):
            run(source, tmp_path / "out")
    work.rename(tmp_path / "moved")
    work.symlink_to(tmp_path / "moved")
    with pytest.raises(RequestError, match="of this user"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize("has_follower", [False, True])
def test_a_run_that_ends_between_open_and_lock_is_no_longer_there(tmp_path, monkeypatch, has_follower):
    """Its file is deleted then, or another run's, which a lock of the deleted file would not keep out."""
    target, honest, followers = tmp_path / "out", writing.fcntl.flock, ExitStack()

    def ends_first(descriptor, operation):
        monkeypatch.setattr(writing.fcntl, "flock", honest)
        Path(f"{target}.lock").unlink()
        if has_follower:
            followers.enter_context(writing.only_one(target))
        honest(descriptor, operation)

    monkeypatch.setattr(writing.fcntl, "flock", ends_first)
    with (
        followers,
        nullcontext() if has_follower else writing.only_one(target),
        pytest.raises(RequestError, match="another run writes there"),
        writing.only_one(target),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_two_conversions_to_one_target_exclude_each_other(tmp_path, source, whole):
    def reentering(weights, shape):
        with pytest.raises(RequestError, match="another run writes there"):
            run(source, tmp_path / "out")
        if shape.index == 1:
            run(source, tmp_path / "other")
        return halve(weights, shape)

    run(source, tmp_path / "out", reentering)
    assert contents(tmp_path / "out") == contents(tmp_path / "other") == whole


def rewrite(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


CHANGES = {
    "rewritten": lambda folder: rewrite(folder / "model-00002-of-00002.safetensors"),
    "cut": lambda folder: os.truncate(folder / "model-00001-of-00002.safetensors", 200),
    "replaced": lambda folder: os.replace(
        shutil.copy2(folder / "tokenizer.json", folder / "x"), folder / "tokenizer.json"
    ),
    "removed": lambda folder: (folder / "tokenizer.json").unlink(),
    "config": lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 7})),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_source_that_changes_meanwhile_is_found_out(tmp_path, source, change, layer):
    def changing(weights, shape):
        if shape.index == layer:
            CHANGES[change](source)
        return halve(weights, shape)

    with pytest.raises(CheckpointError, match=r"changed (while in use|during the conversion)|missing"):
        run(source, tmp_path / "out", changing)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("kind", [ValueError, TypeError, NotImplementedError, "nan", "shape"])
@pytest.mark.parametrize("stopped_before", [False, True])
def test_what_is_refused_in_the_middle_leaves_nothing(tmp_path, source, kind, stopped_before):
    """Also of an earlier run that was stopped, which could not have gone on."""

    def refusing(weights, shape):
        if shape.index < 2:
            return halve(weights, shape)
        if stopped_now:
            raise KeyboardInterrupt
        if isinstance(kind, type):
            raise kind("layer 2")
        made = halve(weights, shape)
        spoilt = made.weights["q_proj.weight"] * torch.nan if kind == "nan" else torch.ones(2, 2)
        return ConvertedLayer(made.weights | {"q_proj.weight": spoilt}, made.config, made.errors)

    if stopped_now := stopped_before:
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out", refusing)
        (work,) = tmp_path.glob("out.partial-*")
        assert list((work / "checkpoint").iterdir())
    stopped_now = False
    with pytest.raises(kind if isinstance(kind, type) else VerificationError) as error:
        run(source, tmp_path / "out", refusing)
    assert not hasattr(error.value, "__notes__")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_shard_that_is_not_what_was_written_is_found_and_written_again(
    tmp_path, source, whole, monkeypatch
):
    last_steps = conversion._write_rest

    def decaying(folder, *rest):
        rewrite(folder / "model-00003-of-00006.safetensors")
        return last_steps(folder, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_write_rest", decaying)
        with pytest.raises(
            VerificationError, match=r"model-00003-of-00006\.safetensors: expected the bytes that were"
        ):
            run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (work,) = tmp_path.glob("out.partial-*")
    assert len(list((work / "checkpoint").glob("*.safetensors"))) == 6
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


def usage(free):
    return lambda folder: shutil._ntuple_diskusage(10**12, 10**12 - free, free)


def test_too_little_room_is_found_before_anything_is_written(tmp_path, source, whole, monkeypatch):
    sizes = [len(data) for name, data in whole.items() if name.endswith(".safetensors")]
    rest = sum(len(data) for name, data in contents(source).items() if not name.endswith(".safetensors"))
    needed = int(1.05 * (sum(sizes) + rest)) + max(sizes)
    with monkeypatch.context() as patch:
        patch.setattr(writing.shutil, "disk_usage", usage(needed - 1))
        with pytest.raises(
            NoSpaceError, match=f"expected {needed:,} bytes free, got {needed - 1:,}"
        ) as error:
            run(source, tmp_path / "out")
        assert error.value.exit_code == 5
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        patch.setattr(writing.shutil, "disk_usage", usage(needed))
        run(source, tmp_path / "out")


def test_a_resumed_run_asks_only_for_what_is_missing(tmp_path, source, whole, monkeypatch):
    sizes = [len(data) for name, data in sorted(whole.items()) if name.endswith(".safetensors")]
    work = stopped(source, tmp_path / "out", monkeypatch, write=24)
    missing = sizes[4:]
    free = int(1.05 * (sum(missing) + 3000) + max(missing))
    assert free < sum(sizes)
    monkeypatch.setattr(writing.shutil, "disk_usage", usage(free))
    with pytest.raises(NoSpaceError, match="bytes free") as error:
        convert(source, tmp_path / "out", halve, max_shard_size=4000, progress=False)
    assert str(work) in error.value.__notes__[0]
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize(("total", "free", "enough"), [(1000, 5, False), (1000, 500, True), (0, 0, True)])
def test_too_few_inodes_are_found_too(tmp_path, source, monkeypatch, total, free, enough):
    monkeypatch.setattr(writing.os, "statvfs", lambda folder: SimpleNamespace(f_files=total, f_favail=free))
    monkeypatch.setattr(writing.shutil, "disk_usage", usage(10**9))  # it asks statvfs, too
    if enough:
        run(source, tmp_path / "out")
        return
    with pytest.raises(NoSpaceError, match=r"free inodes for .* more files, got 5"):
        run(source, tmp_path / "out")
