"""Known models have the parameters that transformers counts, and limits subtract their weights."""

from dataclasses import replace

import pytest
import torch
from size_helpers import make_layer

from attnlib.sizes import MODELS, LatentShape, Model, Setting, chip, largest_batch, model, rows, variants
from attnlib.sizes.text import table

# What a config.json says besides the sizes of attention: vocabulary, MLP and experts.
LLAMA_3 = {"vocab_size": 128_256}
GEMMA_2 = {"vocab_size": 256_000}
GEMMA_3 = {"vocab_size": 262_208}
DEEPSEEK_2 = {"vocab_size": 102_400, "n_shared_experts": 2, "first_k_dense_replace": 1}
OTHER_SIZES = {
    "gpt-2": ("GPT2", {}),
    "falcon-7b": ("Falcon", {"vocab_size": 65_024, "multi_query": True, "bias": False}),
    "llama-2-7b": ("Llama", {"vocab_size": 32_000, "intermediate_size": 11_008}),
    "llama-2-70b": ("Llama", {"vocab_size": 32_000, "intermediate_size": 28_672}),
    "llama-3-8b": ("Llama", LLAMA_3 | {"intermediate_size": 14_336}),
    "llama-3-70b": ("Llama", LLAMA_3 | {"intermediate_size": 28_672}),
    "llama-3.1-405b": ("Llama", LLAMA_3 | {"intermediate_size": 53_248}),
    "mistral-7b": ("Mistral", {"vocab_size": 32_000, "intermediate_size": 14_336}),
    "qwen-2.5-7b": ("Qwen2", {"vocab_size": 152_064, "intermediate_size": 18_944}),
    "qwen-3-8b": ("Qwen3", {"vocab_size": 151_936, "intermediate_size": 12_288}),
    "gemma-2-9b": ("Gemma2", GEMMA_2 | {"intermediate_size": 14_336}),
    "gemma-2-27b": ("Gemma2", GEMMA_2 | {"intermediate_size": 36_864}),
    "gemma-3-12b": ("Gemma3", GEMMA_3 | {"intermediate_size": 15_360}),
    "gemma-3-27b": ("Gemma3", GEMMA_3 | {"intermediate_size": 21_504}),
    "gemma-3n-e2b": ("Gemma3nText", {"num_kv_shared_layers": 10, "intermediate_size": 8192}),
    "gemma-3n-e4b": ("Gemma3nText", {"num_kv_shared_layers": 15, "intermediate_size": 16_384}),
    "gemma-4-e2b": (
        "Gemma4Text",
        {
            "num_kv_shared_layers": 20,
            "intermediate_size": 6144,
            "use_double_wide_mlp": True,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
    ),
    "gemma-4-31b": (
        "Gemma4Text",
        {
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 21_504,
        },
    ),
    "gpt-oss-20b": ("GptOss", {"vocab_size": 201_088, "intermediate_size": 2880, "num_local_experts": 32}),
    "gpt-oss-120b": ("GptOss", {"vocab_size": 201_088, "intermediate_size": 2880, "num_local_experts": 128}),
    "deepseek-v2-lite": (
        "DeepseekV2",
        DEEPSEEK_2 | {"intermediate_size": 10_944, "moe_intermediate_size": 1408, "n_routed_experts": 64},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        DEEPSEEK_2 | {"intermediate_size": 12_288, "moe_intermediate_size": 1536, "n_routed_experts": 160},
    ),
    "deepseek-v3": ("DeepseekV3", {"vocab_size": 129_280, "moe_intermediate_size": 2048}),
}
# The vision tower of Gemma 3, whose parameters count too.
VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
VISION |= {"image_size": 896, "patch_size": 14, "vision_use_head": False}


def config_sizes(known):
    """The sizes of attention, by the names of transformers' configs."""
    shape = known.layers[0]
    sizes = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": len(known.layers),
        "num_attention_heads": shape.num_heads,
    }
    names = ("num_kv_heads", "head_dim")
    if isinstance(shape, LatentShape):
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes["num_key_value_heads"] = shape.num_heads
    return sizes | {
        name.replace("num_kv_heads", "num_key_value_heads"): getattr(shape, name) for name in names
    }


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.name)
def test_parameters_are_those_of_transformers(known):
    transformers = pytest.importorskip("transformers")
    family, other = OTHER_SIZES[known.name]
    sizes = config_sizes(known) | other
    if family == "Falcon":
        del sizes["head_dim"]  # derived from the hidden size
    if family == "Gemma3":
        sizes = {"text_config": sizes, "vision_config": VISION}
    config = getattr(transformers, f"{family}Config")(**sizes)
    head = {"GPT2": "LMHeadModel", "Gemma3": "ForConditionalGeneration"}.get(family, "ForCausalLM")
    with torch.device("meta"):
        theirs = getattr(transformers, family.removesuffix("Text") + head)(config)
    theirs.tie_weights()
    tensors = theirs.state_dict(keep_vars=True).values()  # DeepSeek-V3's router biases are buffers
    assert known.total_parameters == sum({id(x): x.numel() for x in tensors}.values())


def limits(known, **setting):
    return rows([known], Setting(**{"contexts": (131_072,), "batches": (1,)} | setting))[0]


def test_llama_3_70b_needs_two_h100s_for_its_weights():
    made = {variant.kind: limits(variant, chip=chip("h100")) for variant in variants(model("llama-3-70b"))}
    assert made["GQA-8"].weight_bytes == 141_107_412_992  # total_size in model.safetensors.index.json
    more = 80 * 2 * 8192 * 128 * (64 - 8)  # a key and a value projection per head and layer
    assert made["MHA"].weight_bytes == made["GQA-8"].weight_bytes + 2 * more
    for row in made.values():
        assert (row.longest_context, row.largest_batch) == (0, 0)
    assert {kind: row.least_ranks for kind, row in made.items()} == {
        "MHA": 4,  # two ranks have space for the weights, but not for a page
        "GQA-8": 2,
        "MQA": 2,
        "MLA 512+64": 2,
        "MLA 512": 2,
    }


@pytest.mark.parametrize("name", ["llama-3.1-405b", "gemma-3-27b", "deepseek-v3"])
@pytest.mark.parametrize("ranks", [1, 16])
def test_limits_are_those_of_the_memory_beside_the_weights(name, ranks):
    for variant in variants(model(name)):
        rank = variant.shard(ranks)
        parameters = {
            shape: sum(x.numel() for x in make_layer(shape).parameters()) for shape in set(rank.layers)
        }
        attention = sum(parameters[shape] for shape in rank.layers)
        weights = 2 * (attention - (-variant.other_parameters // ranks))
        row = limits(variant, ranks=ranks)
        assert row.weight_bytes == weights
        left = max(0, Setting().chip.memory - weights)
        expected = limits(variant, ranks=ranks, weights=0, memory=left)
        assert row == replace(expected, weight_bytes=weights, least_ranks=row.least_ranks)


@pytest.mark.parametrize("known", MODELS, ids=lambda known: known.name)
def test_the_least_ranks_fit_and_fewer_do_not(known):
    least = limits(known, chip=chip("rtx-4090")).least_ranks
    for ranks in range(1, known.layers[0].num_heads + 1):
        try:
            layouts = known.shard(ranks).layouts(dtype=torch.bfloat16)
        except ValueError:
            continue
        left = 24 * 10**9 - Setting(ranks=ranks).weight_bytes(known)
        fits = largest_batch(layouts, left, context=1, page_size=64) > 0
        if fits or ranks == least:
            assert ranks == least
            return
    assert least is None


def test_weights_that_are_given_replace_those_of_the_model():
    known = model("llama-3-8b")
    assert limits(known).weight_bytes == 2 * 8_030_261_248
    assert limits(known, dtype=torch.float32).weight_bytes == 4 * 8_030_261_248
    assert limits(known, weights=17, ranks=8).weight_bytes == 17
    assert limits(known, weights=17).least_ranks is None
    unknown = Model("unknown", known.layers)
    assert limits(unknown).weight_bytes == 0
    assert limits(unknown) == replace(limits(known, weights=0), least_ranks=1)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (
            {},
            "131.3 GiB - 14.96 GiB (8.03 billion weights, bfloat16) = 116.4 GiB for the cache",
        ),
        ({"weights": 2**30}, "131.3 GiB - 1 GiB (weights, as given) = 130.3 GiB for the cache"),
        ({"weights": 0}, "131.3 GiB for the cache, weights not counted"),
        (
            {"memory": 2**30},
            "1 GiB, less than the weights: 14.96 GiB (8.03 billion weights, bfloat16)",
        ),
    ],
)
def test_the_table_says_how_weights_are_counted(setting, line):
    setting, known = Setting(**setting), model("llama-3-8b")
    assert f"\nmemory: {line}\n" in table(known, rows(variants(known), setting), setting)


def test_the_table_says_if_the_weights_are_unknown():
    setting, unknown = Setting(), replace(model("llama-3-8b"), other_parameters=None)
    text = table(unknown, rows(variants(unknown), setting), setting)
    assert "the weights are unknown" in text
    assert "model weights" not in text


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ({"memory": 10 * 2**30}, "use --tensor-parallel 2 or a bigger chip"),
        ({"memory": 2**20}, "use a bigger chip"),
        ({"memory": 2**30, "weights": 2**34}, "use more ranks or a bigger chip"),
    ],
)
def test_weights_that_do_not_fit_get_a_remedy_in_place_of_numbers(setting, remedy):
    setting, known = Setting(**setting), model("llama-3-8b")
    *_, limits = table(known, rows(variants(known), setting), setting).split("\n\n")
    assert limits.splitlines()[1] == "variant"
    assert all(line.endswith(remedy) for line in limits.splitlines()[2:])
    assert "weights alone take" in limits


def test_a_rank_has_its_share_of_the_other_parameters():
    layers = model("gpt-2").layers
    assert Model("toy", layers, other_parameters=7).shard(4).other_parameters == 2
    with pytest.raises(ValueError, match="other_parameters: expected at least 0, got -1"):
        Model("toy", layers, other_parameters=-1)
