"""Four gigabytes through a conversion: its time against a copy, and its memory. A kill at any time. Minutes;
slow.
"""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import CONFIG, contents, halve, llama, write_checkpoint
from model_helpers import SIZES, add_tokenizer
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from attnlib.__main__ import main
from attnlib.convert.checkpoint import convert

pytestmark = pytest.mark.slow
GIB = 2**30
BIG = CONFIG | {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 16,
}

DECODER = {
    "hidden_size": 1024,
    "intermediate_size": 49_152,
    "num_hidden_layers": 14,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}


def write_big(folder: Path) -> Path:
    """4 GiB of bf16 in eight shards of two layers: 128 MiB of attention and as much again beside it in each
    layer.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BIG))
    weight_map = {}
    for shard in range(8):
        name, tensors = f"model-{shard + 1:05d}-of-00008.safetensors", {}
        for layer in (2 * shard, 2 * shard + 1):
            for projection in "qkvo":
                key = f"model.layers.{layer}.self_attn.{projection}_proj.weight"
                tensors[key] = torch.randn(4096, 4096, dtype=torch.bfloat16)
            tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.randn(
                16384, 4096, dtype=torch.bfloat16
            )
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(source: Path, target: Path) -> None:
    """What anybody would do at least: copy, sync, and compare by hashes."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())
        assert sha256(path) == sha256(target / path.name)


def peak_memory() -> int:
    """Bytes. (What getrusage says counts the process from which this one was started, too.)"""
    return 1024 * int(re.search(r"VmHWM:\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1])


def measured_conversion(source: str, out: str) -> None:
    """Convert and print the seconds it took and the peak of this process's memory in bytes; for its own
    process.
    """
    start = time.perf_counter()
    convert(source, out, halve, max_shard_size=GIB)
    print(time.perf_counter() - start, peak_memory())


def in_python(code: str, **options):
    """Start Python on ``code`` with this folder's modules at hand."""
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, **options)


def test_four_gigabytes_take_three_copies_at_most_and_little_memory(tmp_path):
    source = write_big(tmp_path / "in")
    assert sum(path.stat().st_size for path in source.iterdir()) >= 4 * GIB
    os.sync()
    start = time.perf_counter()
    copy(source, tmp_path / "copy")
    copying = time.perf_counter() - start
    shutil.rmtree(tmp_path / "copy")
    code = (
        "from tests.convert import test_checkpoint_large as t; "
        f"t.measured_conversion({str(source)!r}, {str(tmp_path / 'out')!r})"
    )
    run = in_python(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    printed, bar = run.communicate()
    assert run.returncode == 0, bar
    converting, peak = map(float, printed.split())
    print(f"copy {copying:.1f} s, conversion {converting:.1f} s, peak {peak / GIB:.2f} GiB")
    assert "100%" in bar
    assert "verifying" in bar
    assert peak < 1.5 * GIB
    assert converting < 3 * copying
    shutil.rmtree(tmp_path)


def write_decoder(folder: Path) -> Path:
    """4 GiB of bf16 in seven shards of two layers, with a tokenizer: all that it takes to be run over
    text.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES | DECODER))
    model.config.save_pretrained(folder)
    add_tokenizer(folder)
    shards, weight_map = {}, {}
    for name, x in model.state_dict().items():
        layer = re.search(r"layers\.([0-9]+)\.", name)
        shards.setdefault(int(layer[1]) // 2 if layer else 0, {})[name] = x
    for number, shapes in shards.items():
        shard = f"model-{number + 1:05d}-of-00007.safetensors"
        tensors = {
            name: torch.randn(x.shape, dtype=torch.bfloat16) * x.shape[-1] ** -0.5
            for name, x in shapes.items()
        }
        save_file(tensors, folder / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def measured_command(*given: str) -> None:
    """Run the command and print the peak of this process's memory in bytes; for its own process."""
    assert main(["convert", *given, "--samples", "8", "--length", "64", "--quiet"]) == 0
    print(peak_memory())


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = write_decoder(tmp_path_factory.mktemp("decoder") / "in")
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "options",
    [
        ("--to", "gqa", "--kv-heads", "4", "--check-logits"),
        ("--to", "mla", "--rank", "192", "--q-rank", "513", "--no-check-logits"),
        ("--to", "attnlib", "--rank", "192", "--no-check-logits"),
    ],
    ids=" ".join,
)
def test_four_gigabytes_over_text_take_little_memory(decoder, tmp_path, options):
    """Of a layer in fp32, 0.6 GiB, and the package; some are compared, too."""
    assert sum(path.stat().st_size for path in decoder.iterdir()) >= 4 * GIB
    given = (str(decoder), str(tmp_path / "out"), *options)
    start = time.perf_counter()
    run = in_python(
        f"from tests.convert import test_checkpoint_large as t; t.measured_command(*{given})",
        stdout=subprocess.PIPE,
    )
    printed, _ = run.communicate()
    assert run.returncode == 0
    print(f"{time.perf_counter() - start:.0f} s, peak {float(printed) / GIB:.2f} GiB")
    assert float(printed) < 1.75 * GIB
    shutil.rmtree(tmp_path)


def test_kills_at_random_times_change_no_byte(tmp_path):
    config = CONFIG | {"num_hidden_layers": 30, "hidden_size": 256}
    source = write_checkpoint(tmp_path / "in", llama(config), config, shards=4)
    options = {"max_shard_size": 2_000_000, "settings": {"converter": "halve"}, "progress": False}
    start = time.perf_counter()
    convert(source, tmp_path / "whole", halve, **options)
    seconds, expected = time.perf_counter() - start, contents(tmp_path / "whole")
    before, chance, killed = contents(source), random.Random(0), 0
    code = f"""if True:
        from checkpoint_helpers import halve
        from attnlib.convert.checkpoint import convert
        import huggingface_hub
        print("ready", flush=True)
        convert({str(source)!r}, {str(tmp_path / "out")!r}, halve, **{options!r})
    """
    for _ in range(20):
        with in_python(code, stdout=subprocess.PIPE) as run:
            run.stdout.readline()
            time.sleep(chance.uniform(0, 1.2 * seconds))
            run.kill()
        killed += run.returncode < 0
        assert contents(source) == before
        if (tmp_path / "out").exists():
            assert contents(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
    convert(source, tmp_path / "out", halve, **options)
    assert contents(tmp_path / "out") == expected
    assert killed > 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "whole"]
