"""The pages about conversion: the reference has every option of the parsers, and the guide's steps run."""

import argparse
import json
import re
import shlex
from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attnlib.__main__ import main
from attnlib.convert import command as convert
from attnlib.convert.checkpoint import errors
from attnlib.convert.heads.recipe import recipe
from attnlib.convert.score import command as score
from attnlib.convert.sweep import command as sweep
from attnlib.convert.targets import require_own_options
from attnlib.finetune import command as finetune
from attnlib.models.families import SEEING, STORED

GUIDE, REFERENCE, THEORY = (
    (Path(__file__).parents[2] / page).read_text()
    for page in ("docs/conversion.md", "docs/conversion_commands.md", "docs/conversion_theory.md")
)
COMMANDS = {"convert": convert, "sweep": sweep, "score": score, "finetune": finetune}
ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \| .+ \|$", re.MULTILINE)
# Options that make the guide's commands short on a small model.
SHORT = {
    "convert": "--samples 16 --length 32 --quiet",
    "finetune": "--steps 2 --context 32 --windows 4 --device cpu --quiet",
}
TEXT = "".join(f"{n} green bottles, standing on the wall\n" for n in range(400))


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name)
    COMMANDS[name].add_arguments(parser)
    return parser


def section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one of the same level."""
    level = heading.split()[0]
    return page.partition(f"\n{heading}\n")[2].partition(f"\n{level} ")[0]


def usage(action: argparse.Action) -> str:
    """An option as the reference writes it: every spelling, and its values."""
    if not action.option_strings:
        return f"`{action.metavar}`"
    values = action.metavar or ("{" + ",".join(action.choices) + "}" if action.choices else "")
    values = f" {values} [{values} ...]" if action.nargs == "+" else f" {values}" if values else ""
    return ", ".join(f"`{name}{values}`" for name in action.option_strings)


def default(action: argparse.Action) -> str:
    """The default that the help states."""
    if action.required or "(required)" in action.help:
        return "required"
    if stated := re.search(r"default: ([^)]*)", action.help):
        return stated[1]
    return "off" if action.nargs == 0 else "none"


def documented(text: str) -> list[tuple[str, str]]:
    """The options and defaults in the tables of a page, without its other tables."""
    tables = re.findall(r"^\| option \| default \| meaning \|\n(?:\|.*\n)+", text, re.MULTILINE)
    return [(name, cell.replace("`", "")) for table in tables for name, cell in ROW.findall(table)]


def differences(text: str, parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """The rows that a page lacks, has twice, or has without a reason."""
    expected = [(usage(x), default(x)) for x in parser._actions if x.dest != "help"]
    found = documented(text)
    twice = [row for row in found if found.count(row) > 1]
    return [*({*expected} ^ {*found}), *twice]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_has_every_option_once_with_its_default(name):
    assert not differences(section(REFERENCE, f"## {name}"), parser_of(name))


def test_the_help_states_every_default_of_a_merge():
    [stated] = [default(x) for x in parser_of("convert")._actions if x.dest == "merge"]
    for calibrated, maps_keys, maps_values, align in product(*[(False, True)] * 3, (None, "values")):
        if align is not None and not maps_values:
            continue  # refused
        chosen = recipe(
            align=align, calibrated=calibrated, maps_keys=maps_keys, maps_values=maps_values
        ).merge
        last = stated.split("; else ")[calibrated and maps_values and align is None]
        assert chosen in re.findall(r"[a-z-]+", last), (stated, chosen)


def test_a_planted_error_of_the_reference_is_found():
    text, parser = section(REFERENCE, "## convert"), parser_of("convert")
    row = "| `--reach N` | 2048 |"
    assert row in text
    for wrong in (
        row.replace("2048", "4096"),
        row.replace("reach", "each"),
        "| `--gone` | off | x |\n" + row,
    ):
        assert differences(text.replace(row, wrong), parser)
    whole = next(line for line in text.splitlines() if line.startswith(row))
    assert differences(text.replace(whole, f"{whole}\n{whole}"), parser)


def commands(page: str) -> list[list[str]]:
    """The words of each attnlib command in a page's code blocks, from the name of the command on."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [re.search(r"-m attnlib ((?:convert|sweep|score|finetune) .*)", line) for line in lines]
    return [shlex.split(x[1], comments=True) for x in found if x]


@pytest.mark.parametrize("page", [GUIDE, REFERENCE], ids=["guide", "reference"])
def test_the_commands_of_a_page_are_accepted(page):
    assert len(commands(page)) >= 5
    for name, *words in commands(page):
        arguments = parser_of(name).parse_args(words)
        if name == "convert":
            require_own_options(arguments)


def test_options_in_sentences_exist():
    known = {name for command in COMMANDS for x in parser_of(command)._actions for name in x.option_strings}
    others = (
        "--local-dir --override-kv --yarn-beta-fast --yarn-beta-slow --attention-backend"  # of other programs
    )
    known |= {*others.split(), "--source", "--out", "--model", "--nproc-per-node"}
    for page in (GUIDE, REFERENCE, THEORY):
        assert {*re.findall(r"--[a-z][a-z-]*", page)} - known == set()


def test_the_exit_codes_are_those_of_the_commands():
    codes = {int(x) for x in re.findall(r"^\| (\d+) \|", section(REFERENCE, "### Exit codes"), re.MULTILINE)}
    stated = [
        {int(x) for x in re.findall(r"(?:^ *|[:;] )(\d+) ", x.EPILOG, re.MULTILINE)}
        for x in COMMANDS.values()
    ]
    raised = {x.exit_code for x in vars(errors).values() if isinstance(x, type) and issubclass(x, Exception)}
    assert stated == [codes - {141}] * len(COMMANDS)
    assert raised <= codes


def test_every_family_is_named():
    table = section(REFERENCE, "### Models that are accepted")
    named = {*re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))}
    within = {text for text in SEEING.values() if text.endswith("_text") and text != "gemma3_text"}
    assert named - {"model_type"} == {*STORED, *SEEING} - within


def test_the_steps_of_the_guide_run(tmp_path, monkeypatch):
    """On a small Llama with as many heads: the first commands, their reports, and then the code blocks."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 32}
    config = LlamaConfig(vocab_size=128, max_position_embeddings=64, head_dim=4, **sizes)
    LlamaForCausalLM(config).save_pretrained("llama-2-7b")
    letters = Tokenizer(models.WordLevel({chr(n): n for n in range(128)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?").save_pretrained("llama-2-7b")
    Path("my.txt").write_text(TEXT)
    for name, *words in commands(GUIDE)[:2]:
        assert main([name, *words, *SHORT[name].split()]) == 0
    for folder, report in (("gqa", "conversion_report.json"), ("healed", "finetune_report.json")):
        fields = json.loads((tmp_path / f"llama-2-7b-{folder}" / report).read_text())
        fields |= fields.get("measures", {}) | fields.get("layers", [{}])[0]
        assert not [name for name in {*fields} - {"layer"} if f"`{name}`" not in REFERENCE]
    known = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "conversion.md", "exec"), known)
