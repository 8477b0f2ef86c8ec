"""What ``python -m attnlib doctor`` says of a machine."""

import os

import pytest
from probing import forgotten

from attnlib import __main__, doctor
from attnlib.backends._torch import fused


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Caches in folders of this user's own."""
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    tmp_path.chmod(0o700)
    return tmp_path


def test_it_names_versions_backends_and_folders(folders, capsys):
    (folders / "triton_cache_dir").mkdir(mode=0o700)
    assert __main__.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in ("attnlib 0.1.0", "triton", "training, GQA", "decoding, MLA of 512 + 64", "runs on: torch"):
        assert words in out
    assert "triton_cache_dir: safe" in out
    assert "torchinductor_cache_dir: does not exist yet" in out


def test_it_names_what_is_slower_than_it_could_be(folders, capsys, monkeypatch):
    def missing():
        raise AttributeError("torch has no such name")

    monkeypatch.setattr(fused, "_look_up", missing)
    with forgotten():
        assert __main__.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert (
        "fast path off: torch's fused CPU attention: AttributeError: torch has no such name; attention on"
        in out
    )
    assert "to do: update attnlib, or install versions" in out
    assert "warning" not in out  # which is for GPUs


def test_it_warns_on_a_hopper_gpu_without_fast_paths(folders, capsys, monkeypatch):
    def on_a_hopper_gpu(device):
        for name, explanation in explanations(device):
            failures = ("dedicated Hopper kernels: this Triton lacks some",)
            yield name, explanation._replace(spec=explanation.spec._replace(arch=90), failures=failures)

    explanations = doctor._explanations
    monkeypatch.setattr(doctor, "_explanations", on_a_hopper_gpu)
    assert __main__.main(["doctor"]) == 0
    assert (
        "warning: this GPU could be faster; fast paths that are off (see above): 1" in capsys.readouterr().out
    )


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_into_is_unsafe(folders, capsys, mode):
    folder = folders / "triton_cache_dir"
    folder.mkdir()
    folder.chmod(mode)
    assert __main__.main(["doctor"]) == 1
    assert f"unsafe: others may write into {folder}; chmod go-w {folder}" in capsys.readouterr().out


def test_a_folder_that_others_may_replace_is_unsafe(folders):
    path = folders / "open" / "cache"
    path.mkdir(parents=True, mode=0o700)
    assert doctor.unsafe(path) == ""
    path.parent.chmod(0o1777)  # as /tmp, where nobody renames what is another's
    assert doctor.unsafe(path) == ""
    path.parent.chmod(0o777)
    assert doctor.unsafe(path) == f"unsafe: others may write into {path.parent}; chmod go-w {path.parent}"


def test_a_link_is_as_safe_as_what_it_leads_to(folders):
    real = folders / "open" / "cache"
    real.mkdir(parents=True)
    (folders / "link").symlink_to(real)
    assert doctor.unsafe(folders / "link") == ""
    real.parent.chmod(0o777)
    assert f"others may write into {real.parent}" in doctor.unsafe(folders / "link")


def test_what_belongs_to_another_user_is_unsafe(folders, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if os.geteuid() == 0:  # whom everybody trusts
        os.chown(folders, 54321, 54321)
    assert doctor.unsafe(folders).startswith(
        f"unsafe: {folders} belongs to another user; set the environment variable to a folder"
    )
