"""The walk over transformers: every class made small, run in every way on ``eager`` and on attnlib's
attention.

``python tests/helpers/walking.py >tests/integrations/walked.txt`` walks all of them anew, in half an
hour on two cores, and tells on stderr why a way is refused or wrong.
"""

import inspect
import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType

import torch
import transformers
from families import CACHE, lively
from small_configs import small_config
from torch import Tensor, nn
from transformers import PreTrainedConfig

import attnlib
from attnlib import packing
from attnlib.integrations import transformers as hf

NAMES = tuple(
    name
    for name in dir(transformers)
    if name.endswith(("ForCausalLM", "ForConditionalGeneration")) and not name.startswith("Auto")
)
TOO_LARGE = 6_000_000  # weights
Results = list[Tensor]


def made(name: str) -> tuple[nn.Module, nn.Module | Exception]:
    """A small model of the class on ``eager``, and on attnlib, or why not.

    Raises:
        LookupError: the class was not made small.
    """
    kind, reasons = getattr(transformers, name), []
    for level in (1, 2, 3):
        try:
            with torch.device("meta"):
                size = sum(
                    x.numel() for x in kind._from_config(small_config(kind.config_class, level)).parameters()
                )
            if size > TOO_LARGE:
                raise LookupError(f"{size} weights")
            eager = of(kind, level, "eager")
        except Exception as error:  # whatever a class says of a config that is not one of its own
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        try:
            return eager, of(kind, level, "attnlib")
        except Exception as error:
            return eager, error
    raise LookupError(reasons[0])


def of(kind: type, level: int, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = small_config(kind.config_class, level)
    return lively(kind._from_config(config, attn_implementation=implementation, dtype=torch.float32)).eval()


def walked(name: str) -> dict[str, str]:
    """Run the class in each way: "agrees", or "refused", "not tried" or "wrong" and why.

    Gradients also agree if they are at most twice as far from eager as those of torch's fused attention, and
    trees if they are at most twice as far as their sequences one by one.
    """
    try:
        eager, ours = made(name)
    except LookupError as error:
        return dict.fromkeys(WAYS, f"not tried: {error}")
    found, state = {}, {key: x.clone() for key, x in eager.state_dict().items()}
    for way, run in WAYS.items():
        try:
            expected = once(run, eager, state)
        except Exception as error:  # it cannot run so, or the walk does not know how
            found[way] = f"not tried: {type(error).__name__}: {error}"
            continue
        try:
            if isinstance(ours, Exception):
                raise ours
            mine = once(OURS.get(way, run), ours, state)
            found[way] = compared(mine, expected)
            if way in ("gradients", "tree") and found[way].startswith("wrong: off"):
                theirs = by_another_way(way, run, eager, ours, state)
                if off(mine, expected) < 2 * off(theirs, expected):  # nothing but rounding
                    found[way] = "agrees"
        except Exception as error:
            found[way] = (
                f"{'refused' if is_refusal(error, way) else 'wrong'}: {type(error).__name__}: {error}"
            )
    return found


def by_another_way(way: str, run, eager: nn.Module, ours: nn.Module, state: dict) -> Results:
    """Return gradients by torch's fused attention, or the sequences of a tree by attnlib one by one."""
    if way == "tree":
        return once(run, ours, state)
    eager.set_attn_implementation("sdpa")
    results = once(run, eager, state)
    eager.set_attn_implementation("eager")
    return results


def once(run, model: nn.Module, state: dict) -> Results:
    torch.manual_seed(0)
    model.load_state_dict(state)
    return run(model)


def is_refusal(error: Exception, way: str) -> bool:
    """True if attnlib itself raised to refuse; over pages, also to report a step that went wrong."""
    place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    package = Path(attnlib.__file__).parent
    if way == "pages":
        return isinstance(error, NotImplementedError | RuntimeError | ValueError) and package in place.parents
    return isinstance(error, NotImplementedError) and package / "integrations" in place.parents


def compared(mine: Results, theirs: Results) -> str:
    if [x.shape for x in mine] != [x.shape for x in theirs]:
        return f"wrong: shapes {[tuple(x.shape) for x in mine]}, not {[tuple(x.shape) for x in theirs]}"
    if not any(x.nan_to_num(0, 0, 0).any() for x in theirs):
        return "not tried: nothing but zeros or NaN"
    error = off(mine, theirs)
    return "agrees" if error < 1e-3 else f"wrong: off by {error:.1e}"


def off(mine: Results, theirs: Results) -> float:
    """The largest error of a result, relative to its largest number, or to a hundredth of all: a gradient may
    be zero but for rounding.
    """
    sizes, error = [x.nan_to_num(0, 0, 0).abs().max().item() for x in theirs], 0.0
    for x, y, size in zip(mine, theirs, sizes, strict=True):
        differs = (x - y).abs()[y.isfinite()].nan_to_num(torch.inf)  # what theirs knows
        error = max(error, differs.max().item() / max(size, 0.01 * max(sizes)) if differs.numel() else 0.0)
    return error


# The ways to run a model


def ids(b: int, s: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 100, (b, s), generator=torch.Generator().manual_seed(seed))


def inputs(model: nn.Module, s: int = 23) -> dict[str, Tensor]:
    """Return what the model reads: tokens, or numbers for sounds or pictures."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    given = beside(model, takes, s)
    if not given.keys().isdisjoint(("input_ids", "inputs_embeds")):
        return given
    if "input_ids" in takes and model.main_input_name == "input_ids":
        return {"input_ids": ids(2, s)} | given
    if "flattened_patches" in takes:  # each behind its row and column
        places = torch.cartesian_prod(torch.arange(1.0, 5), torch.arange(1.0, 5)).expand(2, -1, -1)
        return {"flattened_patches": torch.cat([places, torch.randn(2, 16, 768)], -1)} | given
    if "pixel_values" in takes:
        return seen(config, takes, ids(2, s)) | given
    if "input_features" in takes:
        bins = next(
            (x for n in ("num_mel_bins", "input_feat_per_channel") if (x := getattr(config, n, None))), 80
        )
        frames = 2 * getattr(config, "max_source_positions", 64)
        sizes = (bins, frames) if config.model_type == "whisper" else (frames, bins)
        return {"input_features": torch.randn(2, *sizes)} | given
    if "input_values" in takes:
        return {"input_values": torch.randn(2, 4000)} | given
    raise LookupError(f"inputs: {model.main_input_name}")


def beside(model: nn.Module, takes: Collection[str], s: int) -> dict[str, Tensor]:
    """Return what models read beside one row of tokens, and tokens that are not of that form."""
    config, given = model.config, {}
    if "decoder_input_ids" in takes and not getattr(config, "use_decoder_only_language_model", False):
        given["decoder_input_ids"] = ids(2, s - 4, 2)
    if "bbox" in takes:
        given["bbox"] = torch.rand(2, s, 4)
    if "generation_steps" in takes:
        given["generation_steps"] = 1
    if "thinker_reply_part" in takes:
        given["thinker_reply_part"] = torch.randn(2, 1, config.embedding_size)
    if "user_audio_codes" in takes:
        codes = {f"{who}_audio_codes": ids(2, config.num_codebooks * s) % 30 for who in ("moshi", "user")}
        given = {name: x.view(2, -1, s) for name, x in codes.items()}
    if type(model).__name__.endswith(
        ("TextToUnitForConditionalGeneration", "MoeTalkerForConditionalGeneration")
    ):
        given["inputs_embeds"] = torch.randn(2, s, config.get_text_config().hidden_size)
    if config.model_type in ("musicgen", "musicgen_melody"):  # each codebook in a row of its own
        given["decoder_input_ids"] = ids(2 * config.decoder.num_codebooks, s - 4, 2)
    if config.model_type == "dia":
        channels = config.decoder_config.num_channels
        given["decoder_input_ids"] = ids(2, (s - 4) * channels, 2).view(2, -1, channels) % 30
    if config.model_type == "kyutai_speech_to_text":  # a token of text, and one of each codebook
        given["input_ids"] = ids(2, s * (1 + config.num_codebooks)).view(2, s, -1) % 30
    if config.model_type == "molmo2":
        given["mm_token_type_ids"] = torch.zeros(2, s, dtype=torch.long)
    if config.model_type == "voxtral_realtime":
        frames = 2 * config.downsample_factor * s
        given["input_features"] = torch.randn(2, config.audio_config.num_mel_bins, frames)
    return given


def seen(config: PreTrainedConfig, takes: Collection[str], tokens: Tensor) -> dict[str, Tensor]:
    """Return a picture for each row, and the tokens behind those that it replaces."""
    size, video = getattr(config, "vision_config", config).image_size, "Video" in type(config).__name__
    given = {"pixel_values": torch.randn(2, *[4] * video, 3, size, size)}
    count = getattr(config, "latent_query_num", getattr(config, "num_query_tokens", 0)) * (4 if video else 1)
    if "image_embeds_position_mask" in takes:
        given["image_embeds_position_mask"] = torch.zeros_like(tokens)
        given["image_embeds_position_mask"][:, 1 : 1 + count] = 1
    elif count:
        tokens[:, 1 : 1 + count] = getattr(config, "video_token_index" if video else "image_token_index")
    if "qformer_input_ids" in takes:
        given["qformer_input_ids"] = ids(2, 5)
    return given | ({"input_ids": tokens} if "input_ids" in takes else {})


def logits(model: nn.Module, **given) -> Tensor:
    out = model(**inputs(model), **given)
    return out[0] if getattr(out, "logits", None) is None else out.logits


@torch.no_grad()
def plain(model: nn.Module) -> Results:
    return [logits(model)]


def padded(*rows: slice):
    """With padding in the first rows, which is not compared."""

    @torch.no_grad()
    def run(model: nn.Module) -> Results:
        given = inputs(model)
        mask = torch.ones_like(given["input_ids"])
        for n, row in enumerate(rows):
            mask[n, row] = 0
        out = logits(model, attention_mask=mask)
        return [out if "decoder_input_ids" in given else out[mask.bool()]]

    return run


@torch.no_grad()
def packed(model: nn.Module) -> Results:
    if (
        "decoder_input_ids" in inputs(model)
        or "position_ids" not in inspect.signature(model.forward).parameters
    ):
        raise LookupError("it takes no position_ids")
    positions = torch.cat([torch.arange(9), torch.arange(14)]).repeat(2, 1)
    return [logits(model, position_ids=positions, use_cache=False)]


@torch.no_grad()
def of_equal_lengths(model: nn.Module) -> Results:
    """Attend across to as many tokens as there are, where lengths do not tell cross-attention from the
    model's own.
    """
    given = inputs(model)
    decoded, read = given.get("decoder_input_ids"), given.get("input_ids", ids(1, 1))
    if decoded is not None and decoded.shape == read[:, 4:].shape:
        given["decoder_input_ids"] = ids(*read.shape, 2)
    elif getattr(model.config, "add_cross_attention", False):
        given["encoder_hidden_states"] = torch.randn(*read.shape, model.config.hidden_size)
    else:
        raise LookupError("it attends to no other tokens, or not to as many")
    return [model(**given).logits]


def generated(**cache):
    def run(model: nn.Module) -> Results:
        given = inputs(model, 12)
        given.pop("decoder_input_ids", None)
        if "input_ids" in given:
            given["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
            given["attention_mask"][0, :4] = 0
        asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        asked |= {
            "use_cache": True,
            "output_logits": True,
            "return_dict_in_generate": True,
            "disable_compile": True,
        }
        return [torch.stack(model.generate(**given, **asked, **cache).logits)]

    return run


def in_tensors(model: nn.Module) -> Results:
    """Generate in transformers' own cache, given as pages are: some models generate otherwise with a cache
    given.
    """
    if not model.config.is_encoder_decoder:
        return generated()(model)
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    return generated(**{CACHE: cache})(model)


def in_pages(model: nn.Module) -> Results:
    cache = hf.PagedCache(model, pages=96, page_size=4, max_sequences=8)
    if model.config.is_encoder_decoder:
        cache = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
    return generated(**{CACHE: cache})(model)


def trained(model: nn.Module) -> Results:
    """Logits and the gradients of all weights; what drops at random has no chance to."""
    for module in model.train().modules():
        for name in [name for name, x in vars(module).items() if isinstance(x, float) and "drop" in name]:
            setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    out = logits(
        model, **{"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    learnt = [x for x in model.parameters() if x.requires_grad]
    grads = torch.autograd.grad((out * weights).sum(), learnt, allow_unused=True)
    model.eval()
    return [
        out.detach(),
        *(torch.zeros_like(w) if x is None else x for x, w in zip(grads, learnt, strict=True)),
    ]


@torch.no_grad()
def counted(model: nn.Module) -> Results:
    """As a Trainer that accumulates gradients: the loss is divided by a tensor."""
    given = inputs(model)
    labels = given.get("decoder_input_ids", given.get("input_ids"))
    loss = model(**given, labels=labels, num_items_in_batch=torch.tensor(labels.numel())).loss
    if loss is None:
        raise LookupError("it has no loss for such labels")
    return [loss]


def branches(model: nn.Module) -> list[Tensor]:
    """Sequences that share prefixes."""
    if "decoder_input_ids" in inputs(model) or inputs(model).keys() != {"input_ids"}:
        raise LookupError("it reads more than one row of tokens")
    a, b, c = ids(3, 7, 4)
    return [torch.cat((a, b)), torch.cat((a, b[:3], c)), torch.cat((a, c[:5]))]


@torch.no_grad()
def one_by_one(model: nn.Module) -> Results:
    return [model(row[None], use_cache=False).logits[0] for row in branches(model)]


@torch.no_grad()
def in_a_tree(model: nn.Module) -> Results:
    tree = packing.tree(branches(model))
    out = model(**hf.tree_inputs(tree)).logits[0]
    return [out[rows] for rows in tree.rows]


WAYS = MappingProxyType(
    {
        "plain": plain,
        "padded on the left": padded(slice(0, 5), slice(0, 11)),
        "padded on the right": padded(slice(-5, None)),
        "holes": padded(slice(3, 7)),
        "packed": packed,
        "equal lengths": of_equal_lengths,
        "generate": generated(),
        "static cache": generated(cache_implementation="static"),
        "pages": in_tensors,
        "gradients": trained,
        "loss": counted,
        "tree": one_by_one,
    }
)
OURS = MappingProxyType({"pages": in_pages, "tree": in_a_tree})  # what attnlib does otherwise than eager
LETTERS = MappingProxyType({"agrees": "A", "refused": "r", "not tried": "-", "wrong": "W"})


def main() -> None:
    """Print a line for each class: its name, and a letter for each way to run it."""
    print(f"# transformers {transformers.__version__}; letters as test_walk.py explains them")
    with multiprocessing.get_context("spawn").Pool(2, quietly) as pool:
        for name, found in zip(NAMES, pool.imap(walked, NAMES), strict=True):
            print(name, "".join(LETTERS[what.partition(":")[0]] for what in found.values()), flush=True)
            for way, what in found.items():
                print(f"{name}, {way}: {what}"[:300], file=sys.stderr)


def quietly() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    hf.register()


if __name__ == "__main__":
    main()
