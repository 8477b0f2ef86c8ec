"""Text that calibrates nothing, and the sentence on what was lost of it."""

import json
import shutil

import pytest
from model_helpers import TEXT, save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attnlib.convert.check.by_text import lines_by_text
from attnlib.convert.check.lost import lost
from attnlib.convert.check.stock_check import StockCheck
from attnlib.convert.checkpoint.errors import VerificationError
from attnlib.convert.text.held_out import BEHIND, FEWEST, SAMPLE, held_out
from attnlib.convert.text.mixture import Text
from attnlib.convert.text.sample import sample_texts
from attnlib.convert.text.tokens import tokens_of

ONE = [Text("a", TEXT)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("held_out") / "in", "llama")


def ids(text):
    """What the tokenizer of ``source`` makes of a text."""
    return [0 if letter == "?" else ord(letter) for letter in text]


def resized(source, to, positions):
    shutil.copytree(source, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return to


@pytest.mark.parametrize("used", [0, 64, 65, 1000, 1400])
def test_it_begins_behind_what_calibrated(source, used):
    """Tokens of the text are its letters, the tokenizer puts a 0 before, and the model has 128 positions."""
    tokens, text, names = held_out(source, ONE, used=[used])
    assert (text, names) == (BEHIND, ())
    assert (tokens[:, 0] == 0).all()
    assert tokens.shape[1] == (128 if used < 1400 else 96)
    assert len(tokens) == min(8, (1500 - used) // (tokens.shape[1] - 1))
    letters = ids(TEXT[used : used + tokens[:, 1:].numel()])
    assert tokens[:, 1:].flatten().tolist() == letters
    calibrated = tokens_of(source, TEXT, samples=max(used, 1), length=1).flatten().tolist()
    assert calibrated[:used] + letters == ids(TEXT[: used + len(letters)])


@pytest.mark.parametrize("used", [1490, 1500, 10**6])
def test_a_text_that_is_used_up_gives_way_to_the_sample(source, used):
    tokens, text, names = held_out(source, ONE, used=[used])
    assert text == SAMPLE
    assert tokens.equal(held_out(source).tokens)
    assert names == held_out(source).names


def test_each_kind_of_the_sample_is_scored_by_default(source):
    tokens, text, names = held_out(source)
    assert (tokens.shape, text) == ((8, 128), SAMPLE)
    assert names == tuple(kind.name for kind in sample_texts())
    for row, kind in zip(tokens, sample_texts(), strict=True):
        assert row[1:].equal(tokens_of(source, kind.held_out, samples=127, length=1)[:, 0])


@pytest.mark.parametrize("windows", [1, 3, 8, 17])
def test_all_texts_are_scored_in_equal_shares(source, windows):
    """With fewer windows than texts, each window is shorter."""
    tokens, _, names = held_out(source, windows=windows)
    assert {names.count(kind.name) for kind in sample_texts()} == {max(1, windows // 8)}
    assert tokens.shape[1] == min(128, windows * 128 // 8)


def test_a_text_with_few_tokens_left_is_not_scored(source):
    """It would make all windows as short."""
    texts = [Text("a", TEXT), Text("b", TEXT), Text("c", TEXT[: 100 + FEWEST])]
    assert held_out(source, texts, used=[0, 0, 101]).names == ("a",) * 4 + ("b",) * 4
    tokens, _, names = held_out(source, texts, used=[0, 0, 100])
    assert set(names) == {"a", "b", "c"}
    assert tokens.shape[1] == 64


def test_windows_are_no_longer_than_512_or_the_positions(source, tmp_path):
    assert held_out(resized(source, tmp_path / "many", 10**6)).tokens.shape == (8, 512)
    whole = held_out(tmp_path / "many", ONE, used=[0]).tokens
    assert held_out(tmp_path / "many", ONE, used=[0], windows=1).tokens.equal(whole[:1])
    assert held_out(resized(source, tmp_path / "odd", 50)).tokens.shape == (8, 48)
    assert held_out(resized(source, tmp_path / "few", 15)) is None


def test_no_tokenizer_or_that_of_another_model(source, tmp_path):
    shutil.copytree(source, tmp_path / "none")
    for path in (tmp_path / "none").glob("token*"):
        path.unlink()
    assert held_out(tmp_path / "none") is None
    shutil.copytree(source, tmp_path / "other")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    assert held_out(tmp_path / "other") is None


def test_a_tokenizer_that_puts_nothing_before_a_text(source, tmp_path):
    """Also one that knows none of its letters."""
    for name, known in (("plain", {chr(n): n for n in range(33, 127)} | {"?": 0}), ("unknown", {"?": 0})):
        shutil.copytree(source, tmp_path / name)
        tokenizer = Tokenizer(models.WordLevel(known, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / name)
        tokens = held_out(tmp_path / name, ONE, used=[0]).tokens
        assert tokens[0].tolist() == (ids(TEXT[:128]) if len(known) > 1 else [0] * 128)


def test_perplexities_are_measured_where_a_text_is_named(source, tmp_path):
    tokens, text, _ = held_out(source, ONE, used=[1000])
    measures = StockCheck(source, logits=True, tokens=tokens, text=text)(source, {})
    assert measures["perplexity_before"] == measures["perplexity_after"] > 1
    assert (measures["text"], measures["tokens"]) == (BEHIND, tokens.numel())
    for unnamed in (tokens, tokens[0], None):
        measures = StockCheck(source, logits=True, tokens=unnamed)(source, {})
        assert not [name for name in measures if "perplexity" in name or name == "text"]
        assert measures["kl_nats"] == 0
    assert not {"tokens", "kl_nats", "logits"} & StockCheck(source, logits=False)(source, {}).keys()


def test_measures_of_each_text_are_those_of_its_windows_alone(source, tmp_path):
    """The text with the largest divergence comes first."""
    other = save(tmp_path / "other", "llama", rms_norm_eps=0.5)
    tokens, text, _ = held_out(source, ONE, used=[1000])
    names = ["a", "b", "a"]
    measures = StockCheck(source, logits=True, tokens=tokens[:3], text=text, names=names)(other, {})
    rows = {row["name"]: row for row in measures["by_text"]}
    for name, windows in (("a", tokens[[0, 2]]), ("b", tokens[[1]])):
        alone = StockCheck(source, logits=True, tokens=windows, text=text)(other, {})
        assert rows[name] == {"name": name} | {key: alone[key] for key in rows[name] if key != "name"}
    found = [row["kl_nats"] for row in measures["by_text"]]
    assert found[0] > found[1] > 0
    assert 3 * measures["kl_nats"] == pytest.approx(2 * rows["a"]["kl_nats"] + rows["b"]["kl_nats"])


def test_a_table_has_a_line_for_each_text():
    rows = [
        {"name": "a", "kl_nats": 2.0, "perplexity_before": 10.0, "perplexity_after": None},
        {
            "name": "a long name of a text",
            "kl_nats": 0.5,
            "perplexity_before": 9.99,
            "perplexity_after": 1234.5,
        },
    ]
    assert [line.split() for line in lines_by_text({"by_text": rows})] == [
        ["by", "text,", "worst", "first:", "KL,", "nats", "perplexity", "before", "after"],
        ["a", "2.000", "10", "too", "large"],
        ["a", "long", "name", "of", "a", "text", "0.500", "9.99", "1,234"],
    ]
    assert lines_by_text({"kl_nats": 1.0}) == []


def test_a_difference_is_an_error_only_where_nothing_was_lost(source, tmp_path):
    other = save(tmp_path / "other", "llama", rms_norm_eps=0.5)
    check = StockCheck(source, logits=True)
    assert check(other, {"0": {"key_error": 0.1}})["kl_nats"] > 0
    with pytest.raises(VerificationError, match="as the layer errors are those of a lossless conversion"):
        check(other, {"0": {"key_error": 0.0}})


SAID = {
    "text": "a text",
    "tokens": 4096,
    "perplexity_before": 27.94,
    "perplexity_after": 130.2,
    "kl_nats": 1e-4,
}


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        (
            {},
            "perplexity 27.9 before, 130 after on 4,096 tokens of a text; fine-tuning usually recovers most "
            "of the loss",
        ),
        ({"perplexity_after": 15017.3}, "perplexity 27.9 before, 15,017 after on"),
        (
            {"perplexity_after": None},
            "too large to compute after on 4,096 tokens of a text; fine-tuning usually",
        ),
        ({"perplexity_after": 27.95}, "27.9 after on 4,096 tokens of a text: no loss to recover"),
        ({"perplexity_after": 20.0}, "20 after on 4,096 tokens of a text: no loss to recover"),
        (
            {"perplexity_after": 20.0, "kl_nats": 0.5},
            "20 after on 4,096 tokens of a text, but a KL divergence of 0.5 nats from the source; fine-",
        ),
        ({"kl_nats": 1.5}, "130 after on 4,096 tokens of a text; fine-tuning usually"),
        (
            {"perplexity_before": None, "perplexity_after": None},
            "too large to compute before, too large to compute after",
        ),
    ],
)
def test_what_was_lost_in_a_sentence(changed, wanted):
    said = lost(SAID | changed, source="in", out="out")
    assert wanted in said
    assert ("python -m attnlib finetune out out-healed --teacher in --text FILE" in said) == (
        "no loss to recover" not in said
    )


def test_nothing_is_said_of_what_was_not_measured():
    assert lost({"loaded_by": "transformers"}) is None
    assert lost({"kl_nats": 0.5, "tokens": 64}) is None
