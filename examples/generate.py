"""Generate text with a model that compose_lm.py trained: batched, forked from one prompt, or speculatively.

    python examples/generate.py batch 'def main(' 'import os' --top-p 0.9
    python examples/generate.py fork --answers 4 --temperature 1.2
    python examples/generate.py speculate --tokens 1000

Text streams to the terminal; several texts are printed line by line. If the folder --out has no weights, a
small model is trained first. Without a prompt, fork and speculate continue a real text: the beginning of a
module of Python's standard library, which a small model memorizes first (recital.py).
"""

import argparse
import codecs
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import recital
import torch
import variants
from decoder import Decoder
from decoding import TIE, check_same, greedy, paged_cache, prefill, stream
from speculation import speculate
from text import encode, load
from torch import Tensor
from training import train
from variants import PRESETS, VARIANTS

from attnlib import KVCache


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples tokens ``[n]`` from logits ``[n, vocab]``; pass it as ``choose`` to :func:`decoding.stream`.

    Only the ``top_k`` most likely tokens are candidates. Among these, the least likely ones are dropped as
    long as the rest keeps ``top_p`` of their probability. Temperature 0 is greedy.

    Raises:
        ValueError: a setting is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}; 0 is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k: expected at least 1, got {self.top_k}; leave it out to allow every token"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and at most 1, got {self.top_p}; 1 allows every token")

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return greedy(logits)
        p, order = (logits.float() / self.temperature).softmax(-1).sort(-1, descending=True)
        if self.top_k is not None:
            p[:, self.top_k :] = 0
            p /= p.sum(-1, keepdim=True)
        if self.top_p < 1:
            p[p.cumsum(-1) - p >= self.top_p] = 0
        return order.gather(-1, torch.multinomial(p, 1, generator=self.generator)).squeeze(-1)


def fork_answers(
    model: Decoder, cache: KVCache, prompt: Tensor, answers: int, *, choose: Sampler, steps: int
) -> Iterator[Tensor]:
    """Generate several answers to one prompt, which is stored once; yield the next token of each answer."""
    [handle], logits = prefill(model, cache, [prompt])
    handles = [handle, *cache.fork(handle, answers - 1)]
    yield from stream(model, cache, handles, logits.expand(answers, -1), choose=choose, steps=steps)


def check_fork(model: Decoder, prompt: Tensor, tokens: Tensor, logits: Tensor) -> KVCache:
    """Decode ``tokens`` ``[steps, n]`` again, with a copy of the prompt per answer; return the cache used.

    Raises:
        SystemExit: the logits differ from ``logits`` ``[steps, n, vocab]`` by more than rounding explains.
    """
    cache = paged_cache(model, sequences=tokens.shape[1], length=len(prompt) + len(tokens))
    handles, first = prefill(model, cache, [prompt] * tokens.shape[1])
    seen, script = [], iter(tokens)
    for _ in stream(
        model, cache, handles, first, choose=lambda x: seen.append(x) or next(script), steps=len(tokens)
    ):
        pass
    apart, tie = (torch.stack(seen) - logits).abs().max().item(), TIE * logits.abs().max().item()
    if not apart <= tie:
        raise SystemExit(
            f"answers with and without sharing differ: logits by {apart:.2e}, rounding is at most {tie:.2e}"
        )
    return cache


class Terminal:
    """Prints texts while they are generated: one text token by token, several texts as numbered lines."""

    def __init__(self, prompts: Sequence[str]):
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
        self._lines = list(prompts)
        if len(prompts) == 1:
            self._write(prompts[0])

    def show(self, number: int, tokens: Sequence[int]) -> None:
        """Append tokens to text ``number``; print a single text at once, and several texts line by line."""
        more = self._decoders[number].decode(bytes(tokens))
        more = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in more)
        if len(self._lines) == 1:
            self._write(more)
            return
        *whole, self._lines[number] = (self._lines[number] + more).split("\n")
        for line in whole:
            self._write(f"[{number}] {line}\n")

    def close(self) -> None:
        """Print the lines that are not finished yet."""
        for number, line in enumerate(self._lines):
            self._write("\n" if len(self._lines) == 1 else f"[{number}] {line}\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def run_batch(model: Decoder, options: argparse.Namespace) -> None:
    """Continue several prompts at once; prompts of different lengths are stored in one packed step."""
    prompts = [encode(prompt).to(options.device) for prompt in options.prompts]
    cache = paged_cache(model, sequences=len(prompts), length=max(map(len, prompts)) + options.tokens)
    handles, logits = prefill(model, cache, prompts)
    _show_all(
        options.prompts, stream(model, cache, handles, logits, choose=_sampler(options), steps=options.tokens)
    )


def run_fork(model: Decoder, options: argparse.Namespace) -> None:
    """Generate several answers to one prompt, which the cache stores once.

    Every step reads a long shared prompt only once.

    Raises:
        SystemExit: the answers differ from those computed without sharing.
    """
    prompt, count = encode(options.prompt).to(options.device), options.answers
    cache = paged_cache(model, sequences=count, length=len(prompt) + options.tokens, shared_prefixes=1)
    choose, logits, tokens = _sampler(options), [], []
    answers = fork_answers(
        model, cache, prompt, count, choose=lambda x: logits.append(x) or choose(x), steps=options.tokens
    )
    _show_all([options.shown] * count, (tokens.append(step) or step for step in answers))
    alone = check_fork(model, prompt, torch.stack(tokens), torch.stack(logits))
    size = cache.page_size
    page = size * sum(layout.token_bytes for layout in cache.layouts)
    shared = len(prompt) // size
    held = [
        f"{x.used_bytes // page:,} pages of {size} tokens, {x.used_bytes:,} bytes" for x in (cache, alone)
    ]
    print(f"{count} answers share the {shared:,} pages that a prompt of {len(prompt):,} tokens fills")
    print(f"with sharing, the cache holds    {held[0]}\nwithout sharing, it would hold   {held[1]}")
    print("measured in two caches; the logits of all answers are the same in both, up to rounding")
    if not shared:
        print("a longer prompt would share pages; without a prompt, fork uses a real text")


def run_speculate(model: Decoder, options: argparse.Namespace) -> None:
    """Decode greedily with speculation and without it, and compare the texts and the speed.

    Raises:
        SystemExit: the two texts differ by more than ties.
    """
    prompt = encode(options.prompt).to(options.device)
    length, terminal = len(prompt) + options.tokens, Terminal([options.shown])
    for warm in (False, True):  # the first round warms up and prints nothing
        start, bursts = time.perf_counter(), []
        cache = paged_cache(model, sequences=1, length=length)
        for burst in speculate(model, cache, prompt, draft=options.draft, steps=options.tokens):
            bursts.append(burst)
            if warm:
                terminal.show(0, burst.tokens)
        middle = time.perf_counter()
        cache = paged_cache(model, sequences=1, length=length)
        handles, logits = prefill(model, cache, [prompt])
        plain = torch.cat(list(stream(model, cache, handles, logits, choose=greedy, steps=options.tokens)))
        end = time.perf_counter()
    terminal.close()
    guided = [token for burst in bursts for token in burst.tokens]
    with torch.no_grad():
        logits = model(torch.cat((prompt, plain))[None, :-1])[:, len(prompt) - 1 :]
    note = check_same(torch.tensor([guided]), plain[None].cpu(), logits.cpu())
    print(note or "the same text as plain greedy decoding, token by token")
    if options.expected is not None:
        right = sum(a == b for a, b in zip(guided, options.expected.tolist(), strict=False))
        print(f"{right:,} of {len(guided):,} tokens match the real text")
    guessed, accepted = sum(burst.guessed for burst in bursts), len(guided) - len(bursts)
    print(f"{guessed:,} tokens were guessed from the text so far, and {accepted:,} of them were right")
    print(
        f"{len(bursts):,} steps instead of {len(guided):,}: {len(guided) / len(bursts):.1f} tokens a step, ",
        end="",
    )
    print(f"{(end - middle) / (middle - start):.1f} times the speed")


def real_text(options: argparse.Namespace) -> Decoder:
    """Return a model that has memorized a real text, and make the beginning of that text the prompt.

    Only the last line of the prompt is printed.
    """
    text = recital.load_text()
    options.prompt, options.expected = bytes(text[: recital.PROMPT].tolist()).decode(), text[recital.PROMPT :]
    options.shown = options.prompt.rpartition("\n")[2]
    model = recital.load_or_learn(options.variant, text, options.out, options.device)
    print(f"the prompt is the first {recital.PROMPT:,} bytes of Python's bisect.py; it ends with:")
    return model


def load_or_train(options: argparse.Namespace) -> Decoder:
    """Load the model from ``options.out``; if it is missing, train a small one and save it there first."""
    path = options.out / f"{options.variant}.safetensors"
    if not path.exists():
        preset = PRESETS["tiny"]._replace(steps=options.train_steps)
        print(
            f"no weights in {path}: training a small {options.variant} model first (`make demo` trains "
            "better ones)"
        )
        options.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        model = variants.make_model(options.variant, preset).to(options.device)
        train(model, load(), preset, label=options.variant.upper())
        variants.save(model, options.variant, preset, path)
    return variants.load(path, device=options.device)[0]


def _show_all(prompts: Sequence[str], steps: Iterator[Tensor]) -> None:
    terminal, start, count = Terminal(prompts), time.perf_counter(), 0
    for tokens in steps:
        for number, token in enumerate(tokens.tolist()):
            terminal.show(number, [token])
        count += len(tokens)
    terminal.close()
    print(f"{count / (time.perf_counter() - start):,.0f} tokens/s")


def _sampler(options: argparse.Namespace) -> Sampler:
    generator = torch.Generator(options.device).manual_seed(options.seed)
    return Sampler(options.temperature, options.top_k, options.top_p, generator)


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _prompt(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected at least one character, got an empty prompt")
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--out", type=Path, default=Path("out"), help="folder of the weights (default: out)")
    common.add_argument(
        "--variant", choices=VARIANTS, default="gqa", help="attention variant of the model (default: gqa)"
    )
    common.add_argument(
        "--tokens", type=_at_least_one, default=200, help="new tokens per text (default: 200)"
    )
    common.add_argument(
        "--train-steps",
        type=_at_least_one,
        default=200,
        help="training steps if there are no weights (default: 200)",
    )
    common.add_argument("--device", help="where to run (default: a GPU if there is one)")
    sampling = argparse.ArgumentParser(add_help=False)
    sampling.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    sampling.add_argument("--top-k", type=int, help="sample only from the k most likely tokens")
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample only from the most likely tokens that reach this probability",
    )
    sampling.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same text (default: 0)"
    )

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="{batch,fork,speculate}")
    batch = commands.add_parser(
        "batch", parents=[common, sampling], help="continue prompts of any lengths at once"
    )
    batch.add_argument("prompts", nargs="+", type=_prompt, metavar="PROMPT")
    batch.set_defaults(run=run_batch)
    fork = commands.add_parser(
        "fork", parents=[common, sampling], help="generate several answers that share a stored prompt"
    )
    fork.add_argument(
        "prompt", nargs="?", type=_prompt, metavar="PROMPT", help="default: the beginning of a real text"
    )
    fork.add_argument("--answers", type=_at_least_one, default=4, help="number of answers (default: 4)")
    fork.set_defaults(run=run_fork)
    guess = commands.add_parser("speculate", parents=[common], help="decode greedily, sped up by guesses")
    guess.add_argument(
        "prompt", nargs="?", type=_prompt, metavar="PROMPT", help="default: the beginning of a real text"
    )
    guess.add_argument("--draft", type=_at_least_one, default=8, help="guesses per step (default: 8)")
    guess.set_defaults(run=run_speculate)
    options = parser.parse_args(arguments)
    options.device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate text as the command line says."""
    options = parse(arguments)
    if getattr(options, "prompt", "") is None:
        model = real_text(options)
    else:
        options.shown, options.expected = getattr(options, "prompt", ""), None
        model = load_or_train(options)
    options.run(model, options)


if __name__ == "__main__":
    main()
