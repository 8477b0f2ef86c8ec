"""Convert a trained MHA language model to GQA and MLA, and distil each back to the quality of the original.

Trains the MHA model first, or loads a Llama from ``--source``. Prints the bits per byte of held-out text
before and after each conversion is trained; for comparison, it also trains the original for as many more
steps. Draws the recovery curves, and writes the models as Hugging Face folders. To resume after an
interruption, run the same command again.
"""

import argparse
import hashlib
import os
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
import variants
from decoder import Decoder
from folders import copy_tokenizer, latent_config, llama_config, load_llama, save_folder, tokens_by
from recovery import Result, better, close, decode_rate, table
from resumable import claim
from students import ALIGNED, LATENT, MEAN, PLAIN, PRINCIPAL, WHITENED, seen_by_layers, student, ways
from text import Corpus, load
from training import held_out_bits
from variants import Preset

from attnlib.checkpoint_files.folder import Checkpoint
from attnlib.convert.checkpoint.scan import scan
from attnlib.convert.checkpoint.writing import only_one
from attnlib.finetune.distillation import Speaker
from attnlib.finetune.picture import draw
from attnlib.finetune.ranks import WorkerGroup
from attnlib.finetune.recipe import FINAL_RATE, Recipe
from attnlib.finetune.state import Curve
from attnlib.finetune.training import TrainingRun, train

#                        hidden layers heads dim kv rank rope context batch steps rate; sizes() replaces zeros
PRESETS = {
    "tiny": Preset(128, 3, 8, 16, 0, 0, 0, 128, 4, 2_500, 2e-3),
    "small": Preset(512, 8, 8, 64, 0, 0, 0, 512, 32, 2_000, 1e-3),
}
STEPS = 1000  # training steps after the conversion
SHARE = 0.75  # by default, students train at this fraction of the original's peak learning rate
SOURCE_RATE = 5e-5  # peak learning rate to assume for a model from --source, whose real one is unknown
# For comparison, the original model is trained further, too, at this fraction of the students' learning rate:
# converted weights tolerate larger steps than unchanged ones. Results by peak learning rate (tiny preset):
#
#   bits per byte               3e-4   1e-3   1.5e-3  2e-3
#   original, trained further   2.172  2.166          2.189
#   its GQA conversion                 1.914  1.910
#
# Runs with fewer than STEPS steps use a proportionally smaller rate, but never less than the rate at which
# the original's training ended. Results by peak learning rate, for an original that starts at 1.946:
#
#   bits per byte               1e-4   1e-3
#   after 20 steps              1.945  2.056
#   after 200 steps             1.935  1.960
YARDSTICK_RATE = 2 / 3
DECAY = 0.1  # weight decay
POINTS = 8  # a run is scored and saved this many times
WINDOWS = 256  # every model is scored on the same 256 windows of held-out text
CALIBRATION_BATCHES = 64
# At first, only the attention layers train, for this fraction of the steps. It is small because the rest of
# the model learns nothing meanwhile: after 800 steps at 1e-3 (tiny preset), a fraction of 0.08 reaches 1.908
# bits per byte, and 0.2 reaches 1.914.
ATTENTION_FIRST = 0.05
# Only these conversions are trained; each is written to the folder given here.
FOLDERS = {
    MEAN: "gqa-mean",
    ALIGNED: "gqa-aligned",
    PRINCIPAL: "gqa",
    LATENT: "mla",
}


class Study(NamedTuple):
    """The settings of a comparison; ``after`` is the preset for training after the conversion."""

    corpus: Corpus
    preset: Preset
    after: Preset
    seed: int
    out: Path

    def score(self, model: Decoder) -> float:
        """Return the bits per byte of held-out text."""
        return held_out_bits(model, self.corpus, self.preset, limit=WINDOWS)

    def train(
        self, model: Decoder, preset: Preset, *, name: str, seed: int, teacher: Speaker | None = None
    ) -> Curve:
        """Train a model on the text, and if there is a teacher, on the teacher's outputs.

        Resumes an interrupted run; a finished one is only loaded.
        """
        device = model.embed.weight.device
        sizes = {"batch": preset.batch, "context": preset.context}
        every = -(-preset.steps // POINTS)
        recipe = Recipe(
            preset.steps,
            rate=preset.learning_rate,
            every=every,
            layerwise=0 if teacher is None else ATTENTION_FIRST,
            objective="text",
            decay=DECAY,
            half=device.type == "cuda",
            **sizes,
        )
        batches = self.corpus.batches(count=preset.steps, seed=seed, **sizes)
        run = TrainingRun(self.out / "state" / f"{name}.safetensors", name, WorkerGroup(device))
        with speaker(model) as learner:
            return train(learner, teacher, batches, recipe, lambda: (self.score(model),), run)

    def recover(self, model: Decoder, original: Decoder, *, name: str) -> Curve:
        """Distil a student from ``original``, training its attention layers first."""
        with speaker(original) as teacher:
            return self.train(model, self.after, name=name, seed=self.seed + 1, teacher=teacher)

    def measure(self, name: str, model: Decoder, curve: Curve) -> Result:
        """Return the measurements of a model: training curve, cache bytes per token, and decoding speed."""
        stored = sum(layout.token_bytes for layout in model.kv_layouts())
        rate = decode_rate(model, self.corpus, self.preset.context) if len(curve) > 1 else None
        return Result(name, curve, stored, rate)


def speaker(model: Decoder) -> Speaker:
    """Wrap a Decoder as a Speaker, the form of a model that attnlib's distillation needs."""
    return Speaker(model, [block.attention for block in model.blocks], model)


def compare(study: Study, original: Decoder) -> tuple[dict[str, Result], dict[str, Decoder]]:
    """Apply every conversion to the original, and train those in FOLDERS; return results and models by name.

    For comparison, a copy of the original (the yardstick) is trained for as many steps on the same batches,
    with the usual language-model loss. It shows what these steps gain without a conversion.
    """
    models = {"MHA, trained on": deepcopy(original)}
    [yardstick] = models
    rate = YARDSTICK_RATE * study.after.learning_rate * min(1, study.after.steps / STEPS)
    slower = study.after._replace(learning_rate=max(rate, FINAL_RATE * study.preset.learning_rate))
    curve = study.train(models[yardstick], slower, name="mha-on", seed=study.seed + 1)
    results = {yardstick: study.measure(yardstick, models[yardstick], curve)}
    sizes = {"batch": study.preset.batch, "context": study.preset.context}
    batches = study.corpus.batches(count=CALIBRATION_BATCHES, seed=study.seed + 2, **sizes)
    device = original.embed.weight.device
    seen = seen_by_layers(original, [tokens[:, :-1].to(device) for tokens in batches])
    for name, convert in ways(study.preset).items():
        model = student(original, convert, seen)
        if name in FOLDERS:
            curve = study.recover(model, original, name=FOLDERS[name])
            models[name] = model
        else:
            curve = [(0, study.score(model))]
        results[name] = study.measure(name, model, curve)
    return results, models


def export(
    study: Study, original: Decoder, models: dict[str, Decoder], source: Checkpoint | None
) -> list[Path]:
    """Write the original and the students as Hugging Face folders; return the folders.

    If there is a ``source``, its tokenizer is copied into each folder.
    """
    options = {"context": study.preset.context, "source": source and source.config}
    layer, llama = original.blocks[0].attention, llama_config(original, **options)
    written = {study.out / "mha": (original, llama)}
    for name in FOLDERS:
        model = models[name]
        config = latent_config(model, llama, layer) if name == LATENT else llama_config(model, **options)
        written[study.out / FOLDERS[name]] = (model, config)
    for folder, (model, config) in written.items():
        save_folder(model, folder, config)
        if source is not None:
            copy_tokenizer(source, folder)
    return list(written)


def sizes(options: argparse.Namespace, source: Decoder | None) -> Preset:
    """Return the chosen preset, but with the sizes of the source model if one is given.

    By default, the GQA models have half the KV heads, and the MLA models cache a quarter of the values.
    """
    preset = PRESETS[options.preset]
    held = preset.heads
    if source is not None:
        layer, held = source.blocks[0].attention, source.blocks[0].attention.num_kv_heads
        own = {
            "hidden_size": layer.hidden_size,
            "layers": len(source.blocks),
            "steps": 0,
            "learning_rate": SOURCE_RATE,
        }
        preset = preset._replace(heads=layer.num_heads, head_dim=layer.head_dim, **own)
    kv_heads, rope_dim = options.kv_heads or max(1, held // 2), options.rope_dim or min(64, preset.head_dim)
    rank = options.rank or max(2, held * preset.head_dim // 2 - rope_dim)
    return preset._replace(kv_heads=kv_heads, kv_lora_rank=rank, rope_dim=rope_dim)


def settings(study: Study, source: Checkpoint | None, device: torch.device) -> dict[str, object]:
    """Return all settings that determine the result; only a run with the same ones can be resumed."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world != 1:
        raise ValueError(
            f"WORLD_SIZE: expected 1, got {world}; this example trains in one process; start it without a "
            "launcher"
        )
    after = study.after
    batches = study.corpus.batches(count=1, batch=after.batch, context=after.context, seed=study.seed + 1)
    files = (
        None
        if source is None
        else {name: file["sha256"] for name, file in scan(source, lambda _: None)[0].items()}
    )
    return {
        "text": study.corpus.name,
        "text_sha256": study.corpus.sha256,
        "first_batch_sha256": hashlib.sha256(
            bytes(next(batches).view(torch.uint8).flatten().tolist())
        ).hexdigest(),
        "source_sha256": files,
        "sizes": study.preset._asdict(),
        "steps_after": after.steps,
        "rate_after": after.learning_rate,
        "seed": study.seed,
        "device": device.type,
        "world_size": world,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, help="a text file to learn (default: Python's own standard library)"
    )
    parser.add_argument(
        "--source", type=Path, help="a folder with a Llama to start from (default: train one)"
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="tiny", help="model and training sizes (default: tiny)"
    )
    parser.add_argument("--kv-heads", type=int, help="KV heads of the GQA models (default: half)")
    parser.add_argument(
        "--rope-dim",
        type=int,
        help="rotary channels of the MLA models (default: the head dimension, at most 64)",
    )
    parser.add_argument(
        "--rank", type=int, help="latent rank of the MLA models (default: they cache a quarter of the values)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"training steps after the conversion (default: {STEPS})"
    )
    parser.add_argument(
        "--rate", type=float, help=f"peak learning rate of these steps (default: {SHARE} of the original's)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of the order of the text (default: 0)"
    )
    parser.add_argument("--device", help="where to run (default: a GPU if there is one)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/finetune_gqa"), help="output folder (default: out/finetune_gqa)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line.

    Raises:
        SystemExit: a text, a source, a size or a folder cannot be used; the message says which and why.
    """
    options = parse(arguments)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with only_one(options.out):
            run(options)
    except (OSError, ValueError, NotImplementedError) as error:
        raise SystemExit(str(error)) from error


def run(options: argparse.Namespace) -> None:
    """Run the comparison; raises the errors that :func:`main` turns into SystemExit."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    original, source = (None, None) if options.source is None else load_llama(options.source)
    corpus = load(options.text, **({} if source is None else {"tokens_of": tokens_by(source)}))
    preset = sizes(options, original)
    after = preset._replace(steps=options.steps, learning_rate=options.rate or SHARE * preset.learning_rate)
    study = Study(corpus, preset, after, options.seed, options.out)
    claim(options.out, settings(study, source, device))
    (options.out / "state").mkdir(exist_ok=True)
    if original is None:
        torch.manual_seed(options.seed)
        original = variants.make_model("mha", preset).to(device)
        study.train(original, preset, name="mha", seed=options.seed)
    original = original.to(device).eval()
    results, models = compare(study, original)
    written = export(study, original, models, source)
    trained = [results[name] for name in models]
    picture = options.out / "recovery.png"
    labels = {f"{result.name}, {result.bytes_per_token:,} B/token": result.curve for result in trained}
    untrained = ("the original", results["MHA, trained on"].start)
    draw(labels, untrained, f"Recovery on {corpus.name}", "bits per byte", picture)
    print(f"{corpus.name}: {corpus.size:,} tokens, a tenth held out")
    print(
        f"each model trains for {after.steps} steps of {after.batch} x {after.context} tokens after the "
        "conversion\n"
    )
    print(table(list(results.values())), "\n")
    print(better(results[ALIGNED], results[MEAN]))
    print(better(results[PRINCIPAL], results[ALIGNED]))
    print(better(results[WHITENED], results[PLAIN]))
    print(close(results[PRINCIPAL], trained[0]))
    print(f"\nwrote {picture} and {', '.join(folder.name for folder in written)} next to it")


if __name__ == "__main__":
    main()
