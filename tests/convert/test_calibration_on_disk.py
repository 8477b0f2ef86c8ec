"""Calibrations kept on disk: the same bits as without, gone on with after any stop, and nothing damaged is
used.
"""

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from checkpoint_helpers import contents
from family_models import make
from fault_shim import FaultyOs, failing, killed
from model_helpers import TEXT, save
from stopped_runs import in_a_process

from attnlib.__main__ import main
from attnlib.checkpoint_files.folder import SourceFile, read_folder
from attnlib.convert.checkpoint import writing
from attnlib.convert.checkpoint.errors import (
    CheckpointError,
    DamageError,
    NoSpaceError,
    OutputError,
    RequestError,
)
from attnlib.convert.checkpoint.model import read_model
from attnlib.convert.checkpoint.scan import scan
from attnlib.convert.text import kept as kept_room
from attnlib.convert.text import stored as stored_room
from attnlib.convert.text.kept import CalibrationPath, CalibrationStore
from attnlib.convert.text.layerwise import TextCalibration
from attnlib.convert.text.stored import LayerFolder
from attnlib.convert.text.tokens import tokens_of

LAYERS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama") / "in", "llama")


@pytest.fixture(scope="module")
def tokens(source):
    return tokens_of(source, TEXT, samples=4, length=20)


@pytest.fixture(scope="module")
def whole(source, tokens):
    """The calibrations as they come without a disk."""
    calibrations = TextCalibration(read_model(read_folder(source)), tokens)
    return [calibrations(index) for index in range(LAYERS)]


def kept(source, tokens, folder, **options):
    return CalibrationStore(
        read_model(read_folder(source)), tokens, CalibrationPath(folder / "calibration-", **options)
    )


def folder_of(folder):
    [found] = folder.glob("calibration-*")
    return found


def same(calibrations, whole):
    for index in (2, 0, 1):
        found = calibrations(index)
        assert found.tokens == whole[index].tokens
        assert found.moment.equal(whole[index].moment)
        assert found.sample.equal(whole[index].sample)
    return True


def calls_of(monkeypatch):
    """The layers that are calibrated from now on."""
    seen = []
    honest = TextCalibration._next
    monkeypatch.setattr(
        TextCalibration, "_next", lambda self, index: seen.append(index) or honest(self, index)
    )
    return seen


def files_written(monkeypatch):
    """The names of files of tensors that are written from now on."""
    seen, honest = [], writing.new_file
    monkeypatch.setattr(
        stored_room, "new_file", lambda folder, name: seen.append(name) or honest(folder, name)
    )
    return seen


def test_the_first_call_makes_all_and_the_end_removes_them(source, tokens, tmp_path, whole):
    with kept(source, tokens, tmp_path) as calibrations:
        assert not list(tmp_path.iterdir())
        calibrations(0)
        assert {path.name for path in folder_of(tmp_path).iterdir()} == {
            "calibration.json",
            *(f"layer-{index:05}.safetensors" for index in range(LAYERS)),
        }
        assert same(calibrations, whole)
    assert not list(tmp_path.iterdir())


def test_what_is_kept_is_taken_again(source, tokens, tmp_path, whole, monkeypatch):
    with kept(source, tokens, tmp_path, is_kept=True) as calibrations:
        assert same(calibrations, whole)
    before, seen = contents(tmp_path), calls_of(monkeypatch)
    with kept(source, tokens, tmp_path, is_kept=True) as calibrations:
        assert same(calibrations, whole)
    assert seen == []
    assert contents(tmp_path) == before


def stopped(source, tokens, folder, monkeypatch, at, **options):
    """A run that is interrupted when it comes to layer ``at``; the notes of its error."""
    honest = TextCalibration._next

    def interrupting(self, index):
        if index == at:
            raise KeyboardInterrupt
        return honest(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(TextCalibration, "_next", interrupting)
        calibrations = kept(source, tokens, folder, **options)
        with pytest.raises(KeyboardInterrupt) as error, calibrations:
            calibrations(0)
    return getattr(error.value, "__notes__", [])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_stopped_run_goes_on_at_its_layer(source, tokens, tmp_path, whole, monkeypatch, at):
    [note] = stopped(source, tokens, tmp_path, monkeypatch, at)
    advice = "finished calibrations are kept: run the same command again to resume"
    assert note == f"{folder_of(tmp_path)}: {advice}"
    states = [path.name for path in folder_of(tmp_path).glob("states-*")]
    assert states == ([] if at == 0 else [f"states-{at:05}.safetensors"])
    seen = calls_of(monkeypatch)
    with kept(source, tokens, tmp_path) as calibrations:
        assert same(calibrations, whole)
    assert seen == list(range(at, LAYERS))


@pytest.mark.parametrize(("kind", "layers", "at"), [("lfm2_moe", (0, 2), 1), ("lfm2", (1, 2), 2)])
def test_a_hybrid_goes_on_behind_its_last_layer_with_attention(tmp_path, monkeypatch, kind, layers, at):
    """Two of three layers have attention; the folder counts no others."""
    source, tokens = tmp_path / "in", torch.arange(3, 43).view(2, 20)
    make(kind).save_pretrained(source)
    whole = TextCalibration(read_model(read_folder(source)), tokens)
    expected = {index: whole(index).moment for index in layers}
    stopped(source, tokens, tmp_path, monkeypatch, at)
    seen = calls_of(monkeypatch)
    with kept(source, tokens, tmp_path) as calibrations:
        assert all(calibrations(index).moment.equal(x) for index, x in expected.items())
        assert len([*folder_of(tmp_path).glob("layer-*")]) == 2
    assert seen == list(range(at, 3))


@pytest.mark.parametrize("kept_behind", [0, 1])
def test_hidden_states_that_were_not_worth_writing_are_made_again(
    source, tokens, tmp_path, whole, monkeypatch, kept_behind
):
    """Layers run again from the last ones that were, and no file of a layer is written twice."""
    honest = LayerFolder.reach
    monkeypatch.setattr(kept_room, "PACE", 1e-3 if kept_behind == 0 else kept_room.PACE)
    monkeypatch.setattr(
        LayerFolder, "reach", lambda self, states: honest(self, states) if len(self.layers) == 1 else None
    )
    stopped(source, tokens, tmp_path, monkeypatch, 2)
    assert len([*folder_of(tmp_path).glob("layer-*")]) == 2
    assert len([*folder_of(tmp_path).glob("states-*")]) == kept_behind
    written, seen = files_written(monkeypatch), calls_of(monkeypatch)
    with kept(source, tokens, tmp_path) as calibrations:
        assert same(calibrations, whole)
    assert seen == list(range(kept_behind, LAYERS))
    assert written == ["layer-00002.safetensors"]


def test_a_stopped_run_can_leave_nothing(source, tokens, tmp_path, monkeypatch):
    assert stopped(source, tokens, tmp_path, monkeypatch, 2, is_left=False) == []
    assert not list(tmp_path.iterdir())


def test_what_is_refused_leaves_nothing_but_what_is_to_be_kept(source, tokens, tmp_path):
    for is_kept in (False, True):
        calibrations = kept(source, tokens, tmp_path, is_kept=is_kept)
        with pytest.raises(ValueError, match="refused"), calibrations:
            refused(calibrations(0))
        assert bool(list(tmp_path.iterdir())) == is_kept


def refused(_):
    raise ValueError("refused")


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def misname(path):
    path.write_text(path.read_text().replace('"layers"', '"layer5"'))


@pytest.mark.parametrize("damage", [cut, flip, link, os.unlink])
@pytest.mark.parametrize(
    ("name", "run"), [("layer-00000", [0, 2]), ("layer-00001", [0, 1, 2]), ("states-00002", [0, 1, 2])]
)
def test_what_cannot_be_believed_is_made_again(
    source, tokens, tmp_path, whole, monkeypatch, damage, name, run
):
    """And what is behind a damaged layer is not, for the hidden states behind all of them are there."""
    stopped(source, tokens, tmp_path, monkeypatch, 2)
    damage(folder_of(tmp_path) / f"{name}.safetensors")
    seen = calls_of(monkeypatch)
    with kept(source, tokens, tmp_path) as calibrations:
        assert same(calibrations, whole)
    assert seen == run


@pytest.mark.parametrize("lost", [[0], [1], [0, 1], [2]])
def test_of_a_finished_calibration_damaged_files_are_made_again(
    source, tokens, tmp_path, whole, monkeypatch, lost
):
    with kept(source, tokens, tmp_path, is_kept=True) as calibrations:
        calibrations(0)
    before = contents(tmp_path)
    for index in lost:
        flip(folder_of(tmp_path) / f"layer-{index:05}.safetensors")
    written, seen = files_written(monkeypatch), calls_of(monkeypatch)
    with kept(source, tokens, tmp_path, is_kept=True) as calibrations:
        assert same(calibrations, whole)
    assert seen == list(range(lost[-1] + 1))
    assert written == [f"layer-{index:05}.safetensors" for index in lost]
    assert contents(tmp_path) == before


def test_a_run_that_stops_while_it_makes_files_again_is_gone_on_with(
    source, tokens, tmp_path, whole, monkeypatch
):
    stopped(source, tokens, tmp_path, monkeypatch, 2)
    for index in (0, 1):
        flip(folder_of(tmp_path) / f"layer-{index:05}.safetensors")
    stopped(source, tokens, tmp_path, monkeypatch, 1)
    seen = calls_of(monkeypatch)
    with kept(source, tokens, tmp_path) as calibrations:
        assert same(calibrations, whole)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("damage", [cut, misname, link, os.unlink])
def test_a_damaged_list_is_made_again(source, tokens, tmp_path, whole, monkeypatch, damage):
    stopped(source, tokens, tmp_path, monkeypatch, 2)
    damage(folder_of(tmp_path) / "calibration.json")
    with kept(source, tokens, tmp_path) as calibrations:
        assert same(calibrations, whole)


def test_a_list_of_something_else_is_not_believed(source, tokens, tmp_path, whole, monkeypatch):
    """Its folder has the right name."""
    stopped(source, tokens, tmp_path, monkeypatch, 2)
    path = folder_of(tmp_path) / "calibration.json"
    listed = json.loads(path.read_text())
    listed["identity"]["tokens"] = 64 * "0"
    path.write_text(json.dumps(listed))
    seen = calls_of(monkeypatch)
    with kept(source, tokens, tmp_path) as calibrations:
        assert same(calibrations, whole)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("what", ["source", "tokens", "shape", "version", "transformers"])
def test_another_identity_has_another_folder(source, tokens, tmp_path, monkeypatch, what):
    with kept(source, tokens, tmp_path, is_kept=True) as calibrations:
        calibrations(0)
    if what == "source":
        shutil.copytree(source, tmp_path / "other")
        flip(sorted((tmp_path / "other").glob("*.safetensors"))[0])
        source = tmp_path / "other"
    elif what == "version":
        monkeypatch.setattr(kept_room, "VERSION", kept_room.VERSION + 1)
    elif what == "transformers":
        monkeypatch.setattr(kept_room.stock(), "__version__", "9.9")
    else:
        tokens = tokens.flip(0) if what == "tokens" else tokens.view(2, 40)
    seen = calls_of(monkeypatch)
    with kept(source, tokens, tmp_path, is_kept=True) as calibrations:
        calibrations(0)
    assert seen == [0, 1, 2]
    assert len(list(tmp_path.glob("calibration-*"))) == 2


def test_what_a_scan_has_read_is_not_read_again(source, tokens, tmp_path, monkeypatch):
    """But a file that changed since then is found."""
    shutil.copytree(source, tmp_path / "in")
    first, second = (kept(folder, tokens, tmp_path) for folder in (source, tmp_path / "in"))
    scan(second.model.checkpoint, lambda _: None)
    wanted = first._identity()
    with monkeypatch.context() as patch:
        patch.setattr(SourceFile, "chunks", lambda *_: pytest.fail("read again"))
        assert second._identity() == wanted
    flip(sorted((tmp_path / "in").glob("*.safetensors"))[0])
    with pytest.raises(CheckpointError, match="changed while in use"):
        second._identity()


def test_a_copy_of_the_source_is_the_same_source(source, tokens, tmp_path, monkeypatch):
    with kept(source, tokens, tmp_path, is_kept=True) as calibrations:
        calibrations(0)
    shutil.copytree(source, tmp_path / "copy")
    seen = calls_of(monkeypatch)
    with kept(tmp_path / "copy", tokens, tmp_path, is_kept=True) as calibrations:
        calibrations(0)
    assert seen == []


def test_a_file_that_is_damaged_later_is_found(source, tokens, tmp_path):
    calibrations = kept(source, tokens, tmp_path)
    calibrations(0)
    flip(folder_of(tmp_path) / "layer-00001.safetensors")
    with (
        pytest.raises(DamageError, match=r"layer-00001\.safetensors: expected the bytes that were written"),
        calibrations,
    ):
        calibrations(1)
    assert folder_of(tmp_path).exists()  # of which the next run makes that one again


def test_a_folder_of_a_stranger_is_refused(source, tokens, tmp_path, monkeypatch):
    stopped(source, tokens, tmp_path, monkeypatch, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(RequestError, match="of this user"):
            kept(source, tokens, tmp_path)(0)
    folder = folder_of(tmp_path)
    folder.rename(tmp_path / "moved")
    folder.symlink_to("moved")
    with pytest.raises(RequestError, match="of this user"):
        kept(source, tokens, tmp_path)(0)


def test_one_run_at_a_time(source, tokens, tmp_path, monkeypatch):
    honest = TextCalibration._next

    def reentering(self, index):
        monkeypatch.setattr(TextCalibration, "_next", honest)
        with pytest.raises(RequestError, match="another run writes there"):
            kept(source, tokens, tmp_path)(0)
        return honest(self, index)

    monkeypatch.setattr(TextCalibration, "_next", reentering)
    kept(source, tokens, tmp_path)(0)


def test_room_is_asked_for_before_anything_runs(source, tokens, tmp_path, monkeypatch):
    needed = LAYERS * (8 * 25**2 + 4 * 24 * 80) + 4 * 24 * 80
    free = int(1.05 * needed) + 4 * 24 * 80 + 8 * 25**2
    with kept(source, tokens, tmp_path, is_kept=True) as calibrations:
        calibrations(0)
    made = sum(path.stat().st_size for path in folder_of(tmp_path).glob("layer-*"))
    assert needed - 4 * 24 * 80 <= made < needed
    shutil.rmtree(folder_of(tmp_path))
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, free - 1))
    monkeypatch.setattr(TextCalibration, "_next", lambda *_: pytest.fail("a layer was run"))
    with pytest.raises(NoSpaceError, match=f"expected {free:,} bytes free"):
        kept(source, tokens, tmp_path)(0)


def test_a_failing_disk_says_what_to_do(source, tokens, tmp_path, monkeypatch, whole):
    calibrations = kept(source, tokens, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "os", FaultyOs(20, failing(errno.EIO), ("write",)))
        with pytest.raises(OutputError) as error, calibrations:
            calibrations(0)
    [note] = error.value.__notes__
    assert note.startswith(f"{folder_of(tmp_path)}: finished calibrations are kept: run the same command")
    with kept(source, tokens, tmp_path) as calibrations:
        assert same(calibrations, whole)


def test_what_cannot_be_calibrated_says_how_to_do_without(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"got 130; --no-calibration converts without a text"):
        kept(source, torch.full((1, 9), 130), tmp_path)(0)
    assert {path.name for path in folder_of(tmp_path).iterdir()} <= {"calibration.json"}


def killed_run(source, tokens, folder, at):
    """A run that is killed at one call, for a process of its own."""
    torch.set_num_threads(1)
    writing.os = FaultyOs(at, killed)
    kept(source, tokens, folder)(0)


def count_of(source, tokens, folder, monkeypatch):
    counting = FaultyOs()
    with monkeypatch.context() as patch:
        patch.setattr(writing, "os", counting)
        kept(source, tokens, folder)(0)
    return counting.count


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 31])
def test_a_kill_at_any_call_is_gone_on_with(source, tokens, tmp_path, whole, monkeypatch, every):
    (tmp_path / "counted").mkdir()
    for at in range(0, count_of(source, tokens, tmp_path / "counted", monkeypatch), every):
        folder = tmp_path / str(at)
        folder.mkdir()
        assert in_a_process(killed_run, source, tokens, folder, at) == -signal.SIGKILL
        with kept(source, tokens, folder) as calibrations:
            assert same(calibrations, whole)
        assert not list(folder.iterdir()), at


def test_conversions_from_one_calibration_are_the_same(source, tmp_path, monkeypatch):
    (tmp_path / "text").write_text(TEXT)
    text = ("--text", tmp_path / "text", "--samples", 4, "--length", 20, "--quiet")
    keep, seen = ("--keep-calibration", tmp_path / "kept"), calls_of(monkeypatch)
    for out, options in (("a", keep), ("b", keep), ("c", ())):
        command = ("convert", source, tmp_path / out, "--to", "gqa", "--kv-heads", 2, *text, *options)
        assert main([str(x) for x in command]) == 0
    assert seen == [0, 1, 2, 0, 1, 2]
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "kept", "text"]
