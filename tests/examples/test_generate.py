"""Generation: speculation changes no token, answers share pages, and sampling keeps to its limits."""

import re

import generate
import pytest
import recital
import speculation
import torch
import variants
from decoding import greedy, paged_cache, prefill, stream
from generate import Sampler, check_fork, fork_answers
from speculation import look_up, speculate

PROMPT = torch.arange(21) % 7
LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [9.0, 0.0, 0.0, 8.0]])


def plain_greedy(model, steps: int) -> list[int]:
    cache = paged_cache(model, sequences=1, length=len(PROMPT) + steps)
    handles, logits = prefill(model, cache, [PROMPT])
    return torch.cat(list(stream(model, cache, handles, logits, choose=greedy, steps=steps))).tolist()


def flat(bursts) -> list[int]:
    return [token for burst in bursts for token in burst.tokens]


@pytest.mark.parametrize("draft", [1, 5])
def test_speculation_changes_no_token(model, draft):
    expected = plain_greedy(model, 40)
    cache = paged_cache(model, sequences=1, length=len(PROMPT) + 40, page_size=4)
    bursts = list(speculate(model, cache, PROMPT, draft=draft, steps=40))
    assert flat(bursts) == expected
    assert all(len(burst.tokens) <= 1 + burst.guessed <= 1 + draft for burst in bursts)


def test_right_guesses_are_taken_and_wrong_ones_rolled_back(model, monkeypatch):
    expected = plain_greedy(model, 10)
    text = bytes([*PROMPT.tolist(), *expected])

    def oracle(so_far, count):
        """The true next tokens, the third of them wrong."""
        right = list(text[len(so_far) : len(so_far) + count])
        return bytes(token ^ 1 if i == 2 else token for i, token in enumerate(right))

    monkeypatch.setattr(speculation, "look_up", oracle)
    cache = paged_cache(model, sequences=1, length=len(PROMPT) + 10)
    bursts = list(speculate(model, cache, PROMPT, draft=4, steps=10))
    assert flat(bursts) == expected
    assert [(len(burst.tokens), burst.guessed) for burst in bursts] == [(1, 0), (3, 4), (3, 4), (3, 2)]


def test_look_up_prefers_the_longest_and_latest_ending():
    assert look_up(b"abX abY-ab", 2) == b"Y-"
    assert look_up(b"abcX bcY abc", 3) == b"X b"
    assert look_up(b"abc", 3) == b""
    assert look_up(b"-ababab", 5) == b"ababa"
    assert look_up(b"a", 2) == b""
    assert look_up(b"abcab", 0) == b""


def test_answers_share_the_pages_of_their_prompt(model):
    used = {}
    for answers in (1, 4):
        cache = paged_cache(model, sequences=4, length=40, page_size=4)
        tokens = list(fork_answers(model, cache, PROMPT, answers, choose=greedy, steps=2))
        assert all(len(set(row.tolist())) == 1 for row in tokens)  # greedy answers agree
        used[answers] = cache.used_bytes
    assert used[4] == used[1] * (5 + 4) // 6  # 21 tokens fill five pages; the sixth is each answer's own


def test_forked_answers_are_what_each_would_be_alone(model):
    class Scripted:
        """Gives answer ``i`` its own first token, and is greedy after it."""

        first = True

        def __call__(self, logits):
            chosen = torch.arange(len(logits)) if self.first else greedy(logits)
            self.first = False
            return chosen

    cache = paged_cache(model, sequences=3, length=40, page_size=16)
    forked = torch.stack(list(fork_answers(model, cache, PROMPT, 3, choose=Scripted(), steps=6)), 1)
    for answer in range(3):
        cache = paged_cache(model, sequences=1, length=40)
        prompt = torch.cat((PROMPT, torch.tensor([answer])))
        handles, logits = prefill(model, cache, [prompt])
        alone = torch.cat(list(stream(model, cache, handles, logits, choose=greedy, steps=5)))
        assert forked[answer].tolist() == [answer, *alone.tolist()]


def test_forked_answers_are_held_against_answers_that_share_nothing(model):
    cache, logits = paged_cache(model, sequences=3, length=40), []
    choose = lambda x: logits.append(x) or greedy(x)  # noqa: E731
    tokens = torch.stack(list(fork_answers(model, cache, PROMPT, 3, choose=choose, steps=6)))
    alone = check_fork(model, PROMPT, tokens, torch.stack(logits))
    assert alone.used_bytes * 4 == cache.used_bytes * 6  # two pages each; the first of them shared
    with pytest.raises(SystemExit, match="with and without sharing differ"):
        check_fork(model, PROMPT, tokens, torch.stack(logits) + 1)


@pytest.mark.parametrize(
    ("sampler", "allowed"),
    [
        (Sampler(5.0, top_k=1), [{1}, {0}]),
        (Sampler(5.0, top_k=2), [{1, 3}, {0, 3}]),
        (Sampler(5.0, top_k=9), [{0, 1, 2, 3}, {0, 1, 2, 3}]),
        (Sampler(1.0, top_p=0.6), [{1}, {0}]),  # 0.64 and 0.73 are the largest shares
        (Sampler(1.0, top_p=0.7), [{1, 3}, {0}]),
        (Sampler(5.0, top_k=2, top_p=0.54), [{1}, {0}]),  # 0.55 of what top_k left; 0.33 and 0.47 of all
        (Sampler(5.0, top_p=0.54), [{1, 3}, {0, 3}]),
        (Sampler(0.0), [{1}, {0}]),
    ],
)
def test_sampling_keeps_to_its_limits(sampler, allowed):
    drawn = torch.stack([sampler(LOGITS) for _ in range(300)], 1)
    assert [set(row.tolist()) for row in drawn] == allowed


def test_sampling_follows_the_probabilities_and_its_seed():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(20_000, -1)
    draw = Sampler(generator=torch.Generator().manual_seed(3))(logits)
    shares = torch.bincount(draw) / len(draw)
    torch.testing.assert_close(
        shares, torch.tensor([0.5, 0.3, 0.2]), atol=0.015, rtol=0
    )  # four standard deviations
    assert torch.equal(draw, Sampler(generator=torch.Generator().manual_seed(3))(logits))


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampler_refuses(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name}: expected .*, got {value}; "):
        Sampler(**wrong)


def command(*arguments) -> None:
    generate.main([str(arguments[0]), "--device", "cpu", "--tokens", "12", *map(str, arguments[1:])])


@pytest.fixture
def out(tmp_path, small_preset):
    variants.save(variants.make_model("mla", small_preset), "mla", small_preset, tmp_path / "mla.safetensors")
    return tmp_path


def test_batch_command(out, capsys):
    command(
        "batch", "def f(", "x", "import", "--out", out, "--variant", "mla", "--top-k", "5", "--top-p", "0.9"
    )
    shown = capsys.readouterr().out
    assert all(f"[{i}] {prompt}" in shown for i, prompt in enumerate(("def f(", "x", "import")))
    assert "tokens/s" in shown


def test_fork_command(out, capsys):
    prompt = "The prompt is long enough to fill pages. " * 2
    command("fork", prompt, "--answers", "3", "--out", out, "--variant", "mla")
    shown = capsys.readouterr().out
    assert shown.count(prompt) == 3
    assert "3 answers share the 5 pages that a prompt of 82 tokens fills" in shown
    assert (
        "the cache holds    8 pages of 16 tokens" in shown
    )  # 82 + 11 tokens: the sixth page is each one's own
    assert "it would hold   18 pages of 16 tokens" in shown


def test_a_prompt_that_fills_no_page_says_so(out, capsys):
    command("fork", "short", "--answers", "2", "--out", out, "--variant", "mla")
    assert "share the 0 pages" in (shown := capsys.readouterr().out)
    assert "without a prompt, fork uses a real text" in shown


@pytest.fixture
def short_text(small_preset, monkeypatch):
    """A real text so short that it is learned in seconds."""
    monkeypatch.setattr(recital, "LENGTH", 240)
    monkeypatch.setattr(recital, "PROMPT", 160)
    monkeypatch.setattr(recital, "LEARNING", {"steps": 250, "learning_rate": 1e-2, "batch": 1})


def test_a_real_text_is_learned_by_heart_forked_and_speculated_on(short_text, tmp_path, capsys):
    command("fork", "--out", tmp_path)
    shown = capsys.readouterr().out
    assert "4 answers share the 10 pages that a prompt of 160 tokens fills" in shown
    assert "the prompt is the first 160 bytes" in shown
    command("speculate", "--out", tmp_path, "--tokens", "60")
    shown = capsys.readouterr().out
    assert "memorizes" not in shown  # the model was saved
    assert "60 of 60 tokens match the real text" in shown
    steps, right = (
        int(re.search(pattern, shown)[1]) for pattern in (r"(\d+) steps instead", r"(\d+) of them were right")
    )
    assert steps + right == 60
    assert right > 5


def test_a_text_may_be_too_short(tmp_path):
    (tmp_path / "short.py").write_text("x = 1")
    with pytest.raises(ValueError, match="expected more than 1024 bytes, got 5"):
        recital.load_text(tmp_path / "short.py")


def test_speculate_command(out, capsys):
    command("speculate", "abcabc", "--out", out, "--variant", "mla")
    shown = capsys.readouterr().out
    assert shown.startswith("abcabc")
    assert "the same text as plain greedy decoding, token by token" in shown
    assert "tokens were guessed from the text so far" in shown


def test_a_missing_model_is_trained_and_kept(tmp_path, capsys, small_preset):
    command("batch", "x", "--out", tmp_path / "new", "--train-steps", "2")
    assert "no weights in" in capsys.readouterr().out
    command("batch", "x", "--out", tmp_path / "new")
    assert "no weights in" not in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["batch"], ["batch", ""], ["fork", "x", "--answers", "0"], []])
def test_wrong_command_lines_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as error:
        generate.main(wrong)
    assert error.value.code == 2
    assert "usage:" in capsys.readouterr().err
