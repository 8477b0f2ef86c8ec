"""A catalogue of public models and chips by name, each with the source of its numbers."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..internal.signatures import kind
from .attention import GroupedShape, LatentShape, Shape
from .models import Model


@kind
@dataclass(frozen=True, slots=True)
class Chip:
    """A chip's memory in bytes, bandwidth in bytes per second, and dense 16-bit tensor FLOPs per second.

    A GB in a data sheet is read as 10**9 bytes, the smaller of its two meanings.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    source: str

    @property
    def ridge(self) -> float:
        """The FLOPs per byte read above which a kernel is compute-bound (Williams et al., 2009)."""
        return self.flops / self.bandwidth


# B200 is missing, since its published memory and bandwidth differ between boards.
CHIPS = (
    Chip(
        "h200", 141 * 10**9, 4.8e12, 989e12, "NVIDIA H200 data sheet, SXM; half of the figure with sparsity"
    ),
    Chip(
        "h100", 80 * 10**9, 3.35e12, 989e12, "NVIDIA H100 data sheet, SXM; half of the figure with sparsity"
    ),
    Chip("a100-80gb", 80 * 10**9, 2.039e12, 312e12, "NVIDIA A100 data sheet, SXM 80 GB"),
    Chip("l40s", 48 * 10**9, 864e9, 362.05e12, "NVIDIA L40S data sheet"),
    Chip("rtx-4090", 24 * 10**9, 1008e9, 165.2e12, "NVIDIA Ada architecture white paper; fp32 accumulation"),
    Chip("mi300x", 192 * 10**9, 5.3e12, 1307.4e12, "AMD Instinct MI300X data sheet"),
)


@kind
def chip(name: str) -> Chip:
    """Return the chip of that name.

    Raises:
        ValueError: the name is unknown; the message lists the known names.
    """
    return _named(name, CHIPS, "chip")


@kind
def model(name: str) -> Model:
    """Return the public model of that name.

    >>> model("llama-3-8b").kind
    'GQA-8'

    Raises:
        ValueError: the name is unknown; the message lists the known names.
    """
    return _named(name, MODELS, "model")


def _named(name: str, among: Iterable, what: str):
    known = {entry.name: entry for entry in among}
    if name in known:
        return known[name]
    text = str(name).lower()
    begun = [other for other in known if text and other.startswith(text)]
    close = begun or difflib.get_close_matches(text, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"{what}: expected one of {', '.join(known)}; got {name!r}{hint}")


def _grouped(hidden_size: int, heads: int, kv_heads: int, head_dim: int = 128) -> GroupedShape:
    return GroupedShape(hidden_size=hidden_size, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def _deepseek(hidden_size: int, heads: int, q_lora_rank: int | None) -> LatentShape:
    """Return the shape of a DeepSeek layer, which stores 512 + 64 values per token and has heads of 128."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return LatentShape(hidden_size=hidden_size, num_heads=heads, q_lora_rank=q_lora_rank, **sizes)


def _mixed(count: int, shape: Shape, window: int, *, every: int) -> tuple[Shape, ...]:
    """Return ``count`` layers with a sliding window, except that every ``every``-th layer has none."""
    return tuple(shape if (i + 1) % every == 0 else replace(shape, window=window) for i in range(count))


def _sharing(layers: tuple[GroupedShape, ...], readers: int) -> tuple[GroupedShape, ...]:
    """Return the layers, the last ``readers`` of which read the keys of earlier ones."""
    owners = len(layers) - readers
    return layers[:owners] + tuple(replace(shape, own_keys=False) for shape in layers[owners:])


_GEMMA_3N = replace(_grouped(2048, 8, 2, 256), qk_norm=True)
_GEMMA_4_E2B = replace(_grouped(1536, 8, 1, 256), qk_norm=True, window=512)
_GEMMA_4_31B = replace(_grouped(5376, 32, 16, 256), qk_norm=True, window=1024)
_GPT_OSS = replace(_grouped(2880, 64, 8, 64), bias=True, output_bias=True, sinks=True)


def _published(name: str, parameters: int, layers: tuple[Shape, ...], source: str) -> Model:
    """Return a model with ``parameters`` parameters in total, attention included."""
    return Model(name, layers, source, parameters - Model(name, layers).parameters)


# The parameter counts are those of transformers' model of each config.json, tied weights counted once; a test
# repeats the count. They include Gemma 3's vision tower, but not the towers of Gemma 3n and 4, and not
# DeepSeek-V3's multi-token prediction module.
MODELS = (
    _published(
        "gpt-2",
        124_439_808,
        (replace(_grouped(768, 12, 12, 64), bias=True, output_bias=True),) * 12,
        "openai-community/gpt2 config.json; Radford et al., 2019",
    ),
    _published(
        "falcon-7b",
        6_921_720_704,
        (_grouped(4544, 71, 1, 64),) * 32,
        "tiiuae/falcon-7b config.json; arXiv 2311.16867",
    ),
    _published(
        "llama-2-7b",
        6_738_415_616,
        (_grouped(4096, 32, 32),) * 32,
        "meta-llama/Llama-2-7b-hf config.json; arXiv 2307.09288",
    ),
    _published(
        "llama-2-70b",
        68_976_648_192,
        (_grouped(8192, 64, 8),) * 80,
        "meta-llama/Llama-2-70b-hf config.json; arXiv 2307.09288",
    ),
    _published(
        "llama-3-8b",
        8_030_261_248,
        (_grouped(4096, 32, 8),) * 32,
        "meta-llama/Meta-Llama-3-8B config.json; arXiv 2407.21783",
    ),
    _published(
        "llama-3-70b",
        70_553_706_496,
        (_grouped(8192, 64, 8),) * 80,
        "meta-llama/Meta-Llama-3-70B config.json; arXiv 2407.21783",
    ),
    _published(
        "llama-3.1-405b",
        405_853_388_800,
        (_grouped(16384, 128, 8),) * 126,
        "meta-llama/Llama-3.1-405B config.json; arXiv 2407.21783",
    ),
    _published(
        "mistral-7b",
        7_241_732_096,
        (replace(_grouped(4096, 32, 8), window=4096),) * 32,
        "mistralai/Mistral-7B-v0.1 config.json; arXiv 2310.06825",
    ),
    _published(
        "qwen-2.5-7b",
        7_615_616_512,
        (replace(_grouped(3584, 28, 4), bias=True),) * 28,
        "Qwen/Qwen2.5-7B config.json; arXiv 2412.15115",
    ),
    _published(
        "qwen-3-8b",
        8_190_735_360,
        (replace(_grouped(4096, 32, 8), qk_norm=True),) * 36,
        "Qwen/Qwen3-8B config.json; arXiv 2505.09388",
    ),
    _published(
        "gemma-2-9b",
        9_241_705_984,
        _mixed(42, _grouped(3584, 16, 8, 256), 4096, every=2),
        "google/gemma-2-9b config.json; arXiv 2408.00118",
    ),
    _published(
        "gemma-2-27b",
        27_227_128_320,
        _mixed(46, _grouped(4608, 32, 16), 4096, every=2),
        "google/gemma-2-27b config.json; arXiv 2408.00118",
    ),
    _published(
        "gemma-3-12b",
        12_187_325_040,
        _mixed(48, replace(_grouped(3840, 16, 8, 256), qk_norm=True), 1024, every=6),
        "google/gemma-3-12b-it config.json; arXiv 2503.19786",
    ),
    _published(
        "gemma-3-27b",
        27_432_406_640,
        _mixed(62, replace(_grouped(5376, 32, 16), qk_norm=True), 1024, every=6),
        "google/gemma-3-27b-it config.json; arXiv 2503.19786",
    ),
    _published(
        "gemma-3n-e2b",
        4_435_182_688,
        _sharing(_mixed(30, _GEMMA_3N, 512, every=5), 10),
        "google/gemma-3n-E2B-it config.json, text model",
    ),
    _published(
        "gemma-3n-e4b",
        6_835_235_568,
        _sharing(_mixed(35, _GEMMA_3N, 512, every=5), 15),
        "google/gemma-3n-E4B-it config.json, text model",
    ),
    _published(
        "gemma-4-e2b",
        4_628_569_379,
        _sharing(((_GEMMA_4_E2B,) * 4 + (replace(_GEMMA_4_E2B, head_dim=512, window=None),)) * 7, 20),
        "google/gemma-4-E2B-it config.json, text model",
    ),
    _published(
        "gemma-4-31b",
        30_697_345_340,
        (
            *(_GEMMA_4_31B,) * 5,
            replace(_GEMMA_4_31B, num_kv_heads=4, head_dim=512, window=None, values="keys"),
        )
        * 10,
        "google/gemma-4-31B-it config.json, text model",
    ),
    _published(
        "gpt-oss-20b",
        20_914_757_184,
        _mixed(24, _GPT_OSS, 128, every=2),
        "openai/gpt-oss-20b config.json; arXiv 2508.10925",
    ),
    _published(
        "gpt-oss-120b",
        116_829_156_672,
        _mixed(36, _GPT_OSS, 128, every=2),
        "openai/gpt-oss-120b config.json; arXiv 2508.10925",
    ),
    _published(
        "deepseek-v2-lite",
        15_706_484_224,
        (_deepseek(2048, 16, None),) * 27,
        "deepseek-ai/DeepSeek-V2-Lite config.json; arXiv 2405.04434",
    ),
    _published(
        "deepseek-v2",
        235_741_434_880,
        (_deepseek(5120, 128, 1536),) * 60,
        "deepseek-ai/DeepSeek-V2 config.json; arXiv 2405.04434",
    ),
    _published(
        "deepseek-v3",
        671_026_419_200,
        (_deepseek(7168, 128, 1536),) * 61,
        "deepseek-ai/DeepSeek-V3 config.json; arXiv 2412.19437",
    ),
)
