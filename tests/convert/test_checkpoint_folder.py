"""Folders that are broken or hostile are refused before anything is written, and nothing outside them is
opened.
"""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import CONFIG, llama, write_checkpoint, write_index
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from attnlib.checkpoint_files import folder as folders
from attnlib.checkpoint_files.folder import INDEX, SourceFile, read_folder
from attnlib.checkpoint_files.header import TensorEntry, make_header
from attnlib.convert.checkpoint import CheckpointError, convert, identity


def refused(root, match):
    """Asserts that converting ``root / "in"`` is refused with a message, and that nothing is left behind."""
    names = sorted(path.name for path in root.iterdir())
    with pytest.raises(CheckpointError, match=match) as error:
        convert(root / "in", root / "out", identity, progress=False)
    assert error.value.exit_code == 3
    assert sorted(path.name for path in root.iterdir()) == names


ESCAPES = [
    "../x.safetensors",
    "/abs/x.safetensors",
    "C:\\x.safetensors",
    "C:x.safetensors",
    "\\\\host\\share\\x.safetensors",
    "a/../../b.safetensors",
    "sub/x.safetensors",
    "./model.safetensors",
    "a\\b.safetensors",
    "model\0.safetensors",
    "model.safetensors\0",
    "mo\ndel.safetensors",
    "model.safetensors:stream.safetensors",
    ".safetensors",
    "..safetensors",
    "model.bin",
    "model.safetensors.bin",
    "model.SAFETENSORS",
    "model",
    "",
    ".",
    "..",
    "x" * 300 + ".safetensors",
    7,
    None,
    ["model.safetensors"],
    {"file": "model.safetensors"},
    True,
]


@pytest.mark.parametrize("name", ESCAPES, ids=lambda name: repr(name)[:30])
def test_names_that_are_no_plain_names_are_refused_before_opening(tmp_path, monkeypatch, name):
    source = write_checkpoint(tmp_path / "in", llama(), shards=2)
    (tmp_path / "x.safetensors").write_bytes((source / "model-00001-of-00002.safetensors").read_bytes())
    write_index(source, dict.fromkeys(llama(), name))
    opened = []
    real = folders._open_plain
    monkeypatch.setattr(folders, "_open_plain", lambda path: opened.append(path.name) or real(path))
    refused(tmp_path, "weight_map")
    assert set(opened) == {"config.json", INDEX}


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", INDEX, "tokenizer.json"])
@pytest.mark.parametrize("inside", [False, True])
def test_links_are_refused_wherever_they_lead(tmp_path, name, inside):
    source = write_checkpoint(tmp_path / "in", llama(), shards=2)
    moved = (source if inside else tmp_path) / "moved"
    (source / name).rename(moved)
    (source / name).symlink_to(moved)
    refused(tmp_path, rf"{name}: expected a plain file, got a link")


def cached(root):
    """A snapshot of a download cache: links to blobs."""
    source = write_checkpoint(root / "plain", llama(), shards=2)
    blobs, snapshot = root / "models--x" / "blobs", root / "models--x" / "snapshots" / "0a1b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_a_snapshot_of_a_cache_is_read_through_its_links(tmp_path):
    snapshot = cached(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"config\.json: expected a plain file, got a link; .*convert --follow-links"
    ):
        read_folder(snapshot)
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    for place in (snapshot, link):
        read = read_folder(place, follow_links=True)
        assert {file.name for file in read.files} == {path.name for path in snapshot.iterdir()}
        assert all(file.path.parent.name == "blobs" for file in read.files)
    report = convert(read, tmp_path / "out", identity, progress=False)
    assert set(report["inputs"]) == {path.name for path in snapshot.iterdir()}
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == read.tensors.keys()
    assert all(saved[name].equal(stored.load()) for name, stored in read.tensors.items())


@pytest.mark.parametrize(
    "to", ["../../blobs/../secret", "../../../secret", "secret", "../../other/x", "/secret", ".."]
)
def test_links_that_leave_the_cache_are_refused(tmp_path, to):
    snapshot = cached(tmp_path)
    blob = (snapshot / "config.json").resolve()
    for place in ("secret", "models--x/secret", "models--x/snapshots/0a1b/secret", "models--x/other/x"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_bytes(blob.read_bytes())
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(to)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a "):
        read_folder(snapshot, follow_links=True)


@pytest.mark.parametrize("fault", ["linked blob", "linked blobs", "no snapshot", "missing", "changed"])
def test_a_cache_that_is_none_is_refused(tmp_path, fault):
    snapshot = cached(tmp_path)
    blob = (snapshot / "tokenizer.json").resolve()
    if fault == "linked blob":
        blob.rename(tmp_path / "moved")
        blob.symlink_to(tmp_path / "moved")
    elif fault == "linked blobs":
        blob.parent.rename(tmp_path / "moved")
        blob.parent.symlink_to(tmp_path / "moved")
    elif fault == "no snapshot":
        snapshot.parent.rename(snapshot.parent.with_name("versions"))
        snapshot = tmp_path / "models--x" / "versions" / "0a1b"
    elif fault == "missing":
        blob.unlink()
    else:
        read = read_folder(snapshot, follow_links=True)
        blob.write_text("{}")
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: changed while in use"):
            convert(read, tmp_path / "out", identity, progress=False)
        return
    with pytest.raises(CheckpointError, match=": expected "):
        read_folder(snapshot, follow_links=True)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "vocab.json"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, name, kind):
    source = write_checkpoint(tmp_path / "in", llama())
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name) if kind == "pipe" else (source / name).mkdir()
    refused(tmp_path, f"{name}: expected a plain file, got something else")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json"])
def test_a_missing_file_is_named(tmp_path, name):
    (write_checkpoint(tmp_path / "in", llama(), shards=2) / name).unlink()
    refused(tmp_path, f"{name}: expected in .*missing")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_opened(tmp_path, name):
    source = write_checkpoint(tmp_path / "in", llama())
    (source / "model.safetensors").rename(source / name)
    refused(tmp_path, f"{name} may run code .* convert it to safetensors elsewhere")


def test_no_folder_and_no_weights_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="got no folder"):
        read_folder(tmp_path / "absent")
    (tmp_path / "in").mkdir()
    refused(tmp_path, "got neither$")


def test_two_sets_of_weights_are_refused(tmp_path):
    source = write_checkpoint(tmp_path / "in", llama(), shards=2)
    save_file(llama(), source / "model.safetensors")
    refused(tmp_path, "got both")


BROKEN_JSON = {
    "no json": b"weights",
    "array": b"[1]",
    "number": b"7",
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "nan": b'{"weight_map": NaN}',
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "no utf-8": b'{"a": "\xff"}',
    "half a pair": b'{"\\ud800": 1}',
    "long number": b'{"a": ' + b"9" * 5000 + b"}",
    "cut": b'{"a": ',
    "empty": b"",
}


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("text", BROKEN_JSON.values(), ids=BROKEN_JSON)
def test_json_that_is_no_plain_object_is_refused(tmp_path, name, text):
    (write_checkpoint(tmp_path / "in", llama(), shards=2) / name).write_bytes(text)
    refused(tmp_path, f"{name}: expected")


@pytest.mark.parametrize(
    ("name", "limit"), [("config.json", 2**20), (INDEX, 2**26), ("tokenizer.json", 2**28)]
)
def test_files_have_size_limits(tmp_path, name, limit):
    source = write_checkpoint(tmp_path / "in", llama(), shards=2)
    os.truncate(source / name, 2**30)  # a hole: it takes no room
    refused(tmp_path, f"{name}: expected at most {limit} bytes, got {2**30}")


@pytest.mark.parametrize("weight_map", [None, {}, [], "model.safetensors"])
def test_an_index_needs_a_weight_map(tmp_path, weight_map):
    write_index(write_checkpoint(tmp_path / "in", llama(), shards=2), weight_map)
    refused(tmp_path, "weight_map: expected the file name of each tensor")


@pytest.mark.parametrize("fault", ["absent", "unlisted", "elsewhere", "both"])
def test_index_and_shards_must_agree(tmp_path, fault):
    source, name = write_checkpoint(tmp_path / "in", llama(), shards=2), "model.norm.weight"
    weight_map = json.loads((source / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(weight_map.values())) if file != weight_map[name])
    if fault == "absent":
        weight_map["extra"] = other
    elif fault == "unlisted":
        del weight_map[name]
    elif fault == "elsewhere":
        weight_map[name] = other
    else:
        held = {tensor: x for tensor, x in llama().items() if weight_map[tensor] == other}
        save_file(held | {name: torch.ones(16)}, source / other)
    write_index(source, weight_map)
    refused(tmp_path, "'extra'" if fault == "absent" else f"'{name}'")


def test_a_shard_outside_the_index_is_left_behind(tmp_path):
    source = write_checkpoint(tmp_path / "in", llama(), shards=2)
    save_file(llama(), source / "consolidated.safetensors")
    assert read_folder(source).left_behind == ("consolidated.safetensors",)


def file_of(header: object, data: bytes = b"") -> bytes:
    """The bytes of a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), start=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


GOOD = save({"a": torch.ones(2), "b": torch.ones(3)})
BROKEN_FILES = {
    "empty": b"",
    "seven bytes": b"1234567",
    "no header": bytes(8),
    "cut by one": GOOD[:-1],
    "one too many": GOOD + b"x",
    "header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "header of 2^63": struct.pack("<Q", 2**63) + b"{}",
    "header of 200 MB": struct.pack("<Q", 200_000_000) + b"{}",
    "array": file_of([1]),
    "spaces first": file_of(b'  {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', bytes(8)),
    "overlap": file_of({"a": entry(), "b": entry(start=4, end=12)}, bytes(12)),
    "same bytes": file_of({"a": entry(), "b": entry()}, bytes(8)),
    "hole": file_of({"a": entry(), "b": entry(start=12, end=20)}, bytes(20)),
    "hole first": file_of({"a": entry(start=4, end=12)}, bytes(12)),
    "twice": file_of(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "wrong size": file_of({"a": entry(end=12)}, bytes(12)),
    "wrong width": file_of({"a": entry("F64")}, bytes(8)),
    "backwards": file_of({"a": entry(start=8, end=0)}, bytes(8)),
    "negative": file_of({"a": entry(start=-8, end=0)}, bytes(8)),
    "negative shape": file_of({"a": entry(shape=(-1, -2))}, bytes(8)),
    "fraction": file_of({"a": entry(shape=(2.0,))}, bytes(8)),
    "yes": file_of({"a": entry("F32", (True,), 0, 4)}, bytes(4)),
    "overflow": file_of({"a": entry(shape=(2**62, 2**62))}, bytes(8)),
    "three ends": file_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, bytes(8)),
    "no ends": file_of({"a": {"dtype": "F32", "shape": [0], "data_offsets": []}}),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)),
    "unknown dtype": file_of({"a": entry("F33")}, bytes(8)),
    "packed": file_of({"a": entry("F4", (16,), 0, 8)}, bytes(8)),
    "dtype is a list": file_of({"a": entry(["F32"])}, bytes(8)),
    "entry is a list": file_of({"a": [1]}, bytes(8)),
    "metadata": file_of({"__metadata__": {"format": 1}, "a": entry()}, bytes(8)),
    "metadata is a list": file_of({"__metadata__": ["pt"], "a": entry()}, bytes(8)),
    "pickle": b"\x80\x02}q\x00." + bytes(20),
}


def ours(path):
    """What this package reads of a file's header."""
    return folders._header(SourceFile.at(path))


@pytest.mark.parametrize("data", BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_broken_files_are_refused(tmp_path, data):
    (write_checkpoint(tmp_path / "in", llama()) / "model.safetensors").write_bytes(data)
    refused(tmp_path, "model.safetensors: ")


def test_a_header_above_the_limit_is_refused_unread(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "in", llama())
    (source / "model.safetensors").write_bytes(struct.pack("<Q", 150_000_000) + b"{")
    os.truncate(source / "model.safetensors", 2**28)
    refused(tmp_path, "model.safetensors: expected a header of 2 to 100000000 bytes")


BASE = {"a": entry(), "b": entry("BF16", (3,), 8, 14), "c": entry("I8", (0, 4), 14, 14)}
VALUES = st.one_of(st.integers(-2, 20), st.none(), st.booleans(), st.floats(0, 9), st.text(max_size=3))


@given(data=st.data())
def test_what_safetensors_refuses_is_refused(tmp_path_factory, data):
    """Changed headers, and changed bytes of files: this package may be stricter, never more trusting."""
    header = json.loads(json.dumps(BASE))
    for _ in range(data.draw(st.integers(0, 2))):
        field = header[data.draw(st.sampled_from("abc"))]
        place = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]))
        if place == "dtype":
            field[place] = data.draw(st.sampled_from(["F32", "F64", "U16", "f32", "BF16", 3]))
        elif place == "extra":
            field[data.draw(st.sampled_from(["x", "shape"]))] = data.draw(VALUES)
        elif isinstance(field[place], list):
            field[place] = (
                data.draw(st.lists(VALUES, max_size=3)) if data.draw(st.booleans()) else field[place][::-1]
            )
    raw = bytearray(file_of(header, bytes(data.draw(st.sampled_from([14, 14, 13, 15])))))
    if data.draw(st.booleans()):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = Path(tmp_path_factory.getbasetemp()) / f"fuzz-{os.getpid()}.safetensors"
    path.write_bytes(raw)
    try:
        found = ours(path)
    except CheckpointError:
        return
    try:
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(found)
            for name, held in found.items():
                assert file.get_slice(name).get_shape() == list(held.shape)
    except SafetensorError as error:
        raise AssertionError(f"safetensors refuses {bytes(raw)!r}: {error}") from error


def test_a_header_is_what_safetensors_reads(tmp_path):
    entries = {
        "b": TensorEntry(torch.float64, (3,), 0),
        "a": TensorEntry(torch.bfloat16, (1, 5), 0),
        "x": TensorEntry(torch.int8, (0, 7), 0),
        "é": TensorEntry(torch.bool, (), 0),
    }
    header, placed = make_header(entries)
    assert len(header) % 8 == 0
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes(35))
    assert ours(path) == placed
    with safe_open(path, "pt") as file:
        held = {
            name: (file.get_tensor(name).dtype, tuple(file.get_slice(name).get_shape())) for name in entries
        }
        assert file.metadata() == {"format": "pt"}
    assert held == {name: (entry.dtype, entry.shape) for name, entry in entries.items()}


CONFIG_LIES = [
    (
        {"num_attention_heads": 8},
        r"k_proj\.weight: expected \[8, 16\].*got \[16, 16\]",
    ),
    ({"head_dim": 8}, r"layers\.0\.self_attn\.q_proj\.weight: expected \[32, 16\].*got \[16, 16\]"),
    ({"num_key_value_heads": 2}, r"k_proj\.weight: expected \[8, 16\].*got \[16, 16\]"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 4 heads, got 3"),
    ({"num_key_value_heads": 8}, "num_key_value_heads: expected a divisor of 4 heads, got 8"),
    ({"hidden_size": 32}, r"q_proj\.weight: expected \[32, 32\]"),
    ({"num_hidden_layers": 2}, "num_hidden_layers: expected 3 as stored, got 2"),
    ({"num_hidden_layers": 4}, "num_hidden_layers: expected 3 as stored, got 4"),
    ({"num_attention_heads": 0}, "num_attention_heads: expected a count"),
    ({"num_attention_heads": -4}, "num_attention_heads: expected a count"),
    ({"num_attention_heads": 4.0}, "num_attention_heads: expected a count"),
    ({"num_attention_heads": True}, "num_attention_heads: expected a count"),
    ({"num_attention_heads": 10**9}, "num_attention_heads: expected a count"),
    ({"num_attention_heads": None}, "num_attention_heads: expected a count"),
    ({"hidden_size": "16"}, "hidden_size: expected a count"),
    ({"model_type": "mamba"}, "model_type: expected a type that docs.* llama, got 'mamba'"),
    ({"model_type": None}, "model_type: expected a type that docs"),
    ({"model_type": ["llama"]}, "model_type: expected a type that docs"),
    (
        {"quantization_config": {"bits": 4}},
        "quantization_config: expected plain weights, got weights packed, which",
    ),
    (
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config: .* packed by 'gptq', which cannot",
    ),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "packed by 'bitsandbytes'"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "packed by 'compressed-tensors'"),
    (
        {"model_type": "llava", "text_config": {"quantization_config": {"quant_method": "awq"}}},
        "packed by 'awq'",
    ),
]


@pytest.mark.parametrize(("lie", "message"), CONFIG_LIES, ids=lambda value: str(value)[:40])
def test_a_config_that_lies_is_refused(tmp_path, lie, message):
    write_checkpoint(tmp_path / "in", llama(), CONFIG | lie)
    refused(tmp_path, message)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
@pytest.mark.parametrize("fault", ["missing", "wrong bias", "packed", "scale", "other prefix"])
def test_a_layer_is_whole_and_unpacked(tmp_path, name, fault):
    stem, tensors = f"model.layers.1.self_attn.{name}", llama()
    if fault == "missing":
        del tensors[f"{stem}.weight"]
    elif fault == "wrong bias":
        tensors[f"{stem}.bias"] = torch.ones(15)
    elif fault == "packed":
        tensors[f"{stem}.weight"] = tensors[f"{stem}.weight"].to(torch.int8)
    elif fault == "scale":
        tensors[f"{stem}.weight_scale"] = torch.ones(1)
    else:
        tensors[f"layers.1.self_attn.{name}.weight"] = tensors[f"{stem}.weight"].clone()
    write_checkpoint(tmp_path / "in", tensors)
    refused(tmp_path, "layers.1.self_attn")
