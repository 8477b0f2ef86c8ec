"""What vLLM and llama.cpp require of a folder: fields of config.json, and tensors by name and shape. Facts
alone.

Each rule names the file that it was read from in November 2026. vLLM's are in ``vllm`` and
``vllm/model_executor`` of release 0.33.0, llama.cpp's in its ``conversion``, ``gguf-py`` (0.19) and ``src``.
Where the packages are installed, ``test_llama_cpp.py`` and ``test_vllm.py`` run them: what has nothing wrong
says what transformers says, and what breaks one of the rules tried there is refused or says something else.

Both are given a config as a dict and the shapes of all tensors by their names on disk, and return what is
wrong with them.
"""

import math
from collections.abc import Mapping

Shapes = dict[str, tuple[int, ...]]

# Both read these of every family here. vLLM: models/llama.py, LlamaAttention and LlamaDecoderLayer, and their
# likes in gemma.py, gemma2.py, gemma3.py, qwen2.py, qwen3.py;
# transformers_utils/model_arch_config_convertor.py. llama.cpp: conversion/base.py,
# TextModel.set_gguf_parameters; conversion/llama.py, LlamaModel.set_gguf_parameters.
FIELDS = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)
# vLLM: models/deepseek_v2.py, DeepseekV2DecoderLayer and DeepseekV2MLAAttention; llama.cpp:
# conversion/deepseek.py, DeepseekV2Model.set_gguf_parameters and modify_tensors.
LATENT_FIELDS = (
    *FIELDS,
    "first_k_dense_replace",
    "hidden_act",
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
YARN_FIELDS = ("factor", "original_max_position_embeddings")
YARN_TEMPERATURES = ("attention_factor", "mscale", "mscale_all_dim")
YARN_TURNS = {"beta_fast": 32.0, "beta_slow": 1.0}
# vLLM alone, of families' own files: models/llama.py, qwen2.py, qwen3.py, gemma.py, gemma2.py, gemma3.py.
OF_GEMMA_3 = ("attention_bias", "head_dim", "hidden_activation", "layer_types", "query_pre_attn_scalar")
OWN_FIELDS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), ("hidden_act",)) | {
    "gemma2": (*OF_GEMMA_3, "attn_logit_softcapping"),
    "gemma3_text": OF_GEMMA_3,
}
# Architectures that llama.cpp's converter registers: conversion/llama.py, qwen.py, gemma.py, deepseek.py;
# vLLM's are those of models/registry.py.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
FOUR_NORMS = ("gemma2", "gemma3_text")
HEAD_NORMS = ("qwen3", "gemma3_text")
FREE_ACTIVATIONS = ("gemma", "gemma3_text")  # vLLM: of which they know several
MLA_HEAD_SIZES = (
    320,
    512,
    576,
)  # vLLM: layers/attention/mla_attention.py, MLACommonBackend.get_supported_head_sizes
# vLLM: v1/attention/backends/mla/prefill/flash_attn.py, supports_mla_dimensions: unrotated, rotated, of
# values.
MLA_HEADS = ((128, 64, 128), (192, 64, 256), (64, 64, 128), (256, 0, 256))
LITE_LAYERS = (26, 27)  # llama.cpp: src/models/deepseek2.cpp, load_arch_hparams
# llama.cpp: src/models/gemma2.cpp, gemma3.cpp, load_arch_hparams: the layers of 27B, and every how many has
# no window.
LARGE_LAYERS = {"gemma2": 46, "gemma3_text": 62}
FULL_LAYERS = {"gemma2": 2, "gemma3_text": 6}


def vllm(config: Mapping, shapes: Shapes) -> list[str]:
    """What vLLM refuses, or passes over in silence."""
    kind = config.get("model_type")
    latent = kind == "deepseek_v3"
    if wrong := _lacking(config, LATENT_FIELDS if latent else (*FIELDS, *OWN_FIELDS.get(kind, ()))):
        return wrong
    wanted = _model(config, _latent(config) if latent else _grouped(config, _biased(config)))
    # model_loader/default_loader.py, track_weights_loading: parameters that no file has are an error;
    # models/utils.py, AutoWeightsLoader: a tensor without a parameter is one too, but a bias without a
    # parameter is skipped in silence.
    wrong = _differences(wanted, shapes) + _refused(config)
    if not latent:
        return wrong
    kind = config["rope_parameters"].get("rope_type")
    if kind not in ("default", "yarn"):  # DeepseekV2MLAAttention: what is not default is YaRN
        wrong.append(f"rope_type: taken for YaRN: {kind}")
    # model_arch_config_convertor.py, get_head_size; v1/attention/backend.py, validate_configuration
    size = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    if size not in MLA_HEAD_SIZES:
        wrong.append(f"kv_lora_rank + qk_rope_head_dim: expected one of {MLA_HEAD_SIZES}, got {size}")
    heads = tuple(config[field] for field in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if heads not in MLA_HEADS:
        wrong.append(f"channels of a head: expected one of {MLA_HEADS}, got {heads}")
    return wrong + _yarn(config["rope_parameters"]) + _dense(config)


def _refused(config: Mapping) -> list[str]:
    """vLLM: what a family's own file does not know, as the classes named beside each say."""
    kind, wrong = config["model_type"], []
    # LlamaMLP, Qwen2MLP, DeepseekV2MLP; Gemma2MLP
    field, known = ("hidden_activation", "gelu_pytorch_tanh") if kind == "gemma2" else ("hidden_act", "silu")
    if kind not in FREE_ACTIVATIONS and config[field] != known:
        wrong.append(f"{field}: only {known}, got {config[field]}")
    kinds = {*(config.get("layer_types") or ())}
    all_windows = config.get("max_window_layers") == config["num_hidden_layers"]
    if kind in ("qwen2", "qwen3") and len(kinds) > 1 and not all_windows:  # Qwen2Model
        wrong.append("layer_types: windows in some layers alone")
    if kind == "gemma3_text" and not kinds <= config["rope_parameters"].keys():  # Gemma3Attention
        wrong.append(f"rope_parameters: expected those of {sorted(kinds)}")
    if kind == "gemma2" and not config["tie_word_embeddings"]:  # Gemma2ForCausalLM
        wrong.append("tie_word_embeddings: there is no head")
    return wrong


def llama_cpp(config: Mapping, shapes: Shapes) -> list[str]:
    """What llama.cpp's converter refuses, or its loader of what the converter made."""
    latent = config.get("model_type") == "deepseek_v3"
    if wrong := _lacking(config, LATENT_FIELDS if latent else FIELDS):
        return wrong
    # src/llama-model.cpp, create_tensor_qkv: those of q, k and v are loaded of every kind;
    # src/models/llama.cpp: of o
    output = ("o_proj",) if config["model_type"] in ("llama", "mistral") else ()
    biased = ("q_proj", "k_proj", "v_proj", *output) if config.get("attention_bias") else _biased(config)
    wanted = _model(config, _latent(config) if latent else _grouped(config, biased))
    # conversion/base.py, map_tensor_name: an unknown name is an error, and a bias is mapped as its weight;
    # src/llama-model-loader.cpp, done_getting_tensors: so is a tensor that the architecture does not create.
    rope, wrong = config["rope_parameters"], _differences(wanted, shapes)
    wrong += _yarn(rope)
    if not latent:
        heads = config["num_key_value_heads"]
        if (
            config["model_type"] in ("llama", "mistral") and _head_dim(config) % 2
        ):  # conversion/llama.py, permute
            wrong.append(f"head_dim: expected pairs of channels, got {_head_dim(config)}")
        wrong += [f"num_key_value_heads: no divisor: {heads}"] * bool(config["num_attention_heads"] % heads)
        return wrong + _misread(config) + _yarn_of_llama_cpp(rope, latent=False)
    # conversion/deepseek.py, modify_tensors: kv_b_proj is split by this number of heads
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        wrong.append("num_key_value_heads: expected as many as heads")
    # src/models/deepseek2.cpp, load_arch_hparams: q_lora_rank is required, but of models with these numbers
    # of layers
    lite = config["num_hidden_layers"] in LITE_LAYERS
    lite = lite or (config["num_hidden_layers"] == 48 and config["vocab_size"] == 128256)
    if not lite and config["q_lora_rank"] is None:
        wrong.append("q_lora_rank: required")
    if config["qk_nope_head_dim"] < 1:  # load_arch_tensors
        wrong.append("qk_nope_head_dim: expected at least 1")
    if (
        config.get("n_group", 0) >= config["n_routed_experts"]
    ):  # src/llama-model.cpp, load_hparams, which aborts
        wrong.append("n_routed_experts: expected more than n_group")
    # conversion/deepseek.py, generate_extra_tensors: has none, which Llama 3's scaling needs;
    # build_arch_graph in src/models/deepseek2.cpp: any other scaling changes the scale of scores, as YaRN's
    # does
    if (kind := rope.get("rope_type")) not in ("default", "yarn"):
        wrong.append(f"rope_type: not turned as it says: {kind}")
    return wrong + _yarn_of_llama_cpp(rope, latent=True) + _dense(config)


def _yarn(rope: Mapping) -> list[str]:
    """What YaRN has to be for llama.cpp, and DeepSeek's for vLLM.

    vLLM: layers/rotary_embedding/__init__.py, deepseek_scaling_rope.py, and common.py,
    yarn_find_correction_range; llama.cpp: conversion/base.py, set_gguf_parameters, and ggml/src/ggml.c,
    ggml_rope_yarn_corr_dims.
    """
    if rope.get("rope_type") != "yarn":
        return []
    wrong = [f"{field}: missing" for field in YARN_FIELDS if field not in rope]
    return wrong + ["truncate: not read: the ramp's ends are rounded to whole pairs"] * (
        not rope.get("truncate", True)
    )


def _yarn_of_llama_cpp(rope: Mapping, *, latent: bool) -> list[str]:
    """What llama.cpp takes for something else of YaRN, in silence.

    src/models/deepseek2.cpp, llama.cpp, qwen2.cpp and their likes, load_arch_hparams, read no turns of the
    file, which src/llama-hparams.h makes YaRN's own, and but for mscale_all_dim of latents no temperature;
    src/llama-context.cpp takes mscale for mscale_all_dim.
    """
    if rope.get("rope_type") != "yarn":
        return []
    wrong = [f"{x}: passed over, taken for {own}" for x, own in YARN_TURNS.items() if rope.get(x, own) != own]
    if not latent:
        return wrong + [f"{x}: passed over" for x in YARN_TEMPERATURES if rope.get(x) is not None]
    if (all_dim := rope.get("mscale_all_dim")) and rope.get("mscale", 1.0) != all_dim:
        wrong.append(f"mscale: taken for mscale_all_dim, {all_dim}")
    return wrong


def _misread(config: Mapping) -> list[str]:
    """llama.cpp: what it takes for something else in silence, of any model of a kind."""
    kind, wrong = config["model_type"], []
    windows = (config.get("sliding_window") or math.inf) < config["max_position_embeddings"]
    if kind not in LARGE_LAYERS:  # conversion/llama.py, qwen.py: windows are not written
        used = windows and (kind not in ("qwen2", "qwen3") or config.get("use_sliding_window"))
        return ["sliding_window: passed over"] * bool(used)
    large = config["num_hidden_layers"] == LARGE_LAYERS[kind]  # load_arch_hparams, f_attention_scale
    scale = config["hidden_size"] // config["num_attention_heads"] if large else _head_dim(config)
    if config.get("query_pre_attn_scalar", scale) != scale:
        wrong.append(f"query_pre_attn_scalar: taken for {scale}, got {config['query_pre_attn_scalar']}")
    every, layers = FULL_LAYERS[kind], config.get("layer_types") or ()  # load_arch_hparams, load_swa_pattern
    if any((layer == "full_attention") != (n % every == 0) for n, layer in enumerate(layers, 1)):
        wrong.append(f"layer_types: every {every}th layer is taken to have no window")
    return wrong


def _lacking(config: Mapping, fields: tuple[str, ...]) -> list[str]:
    wrong = [f"{field}: missing" for field in fields if field not in config]
    if not wrong and config["architectures"] != [ARCHITECTURES[config["model_type"]]]:
        wrong.append(f"architectures: unknown: {config['architectures']}")
    return wrong


def _dense(config: Mapping) -> list[str]:
    """vLLM: DeepseekV2DecoderLayer, is_moe_layer; llama.cpp: load_arch_tensors, n_layer_dense_lead."""
    dense = config["first_k_dense_replace"] >= config["num_hidden_layers"]
    return [] if dense else ["first_k_dense_replace: layers behind it are experts"]


def _differences(wanted: Shapes, shapes: Shapes) -> list[str]:
    wrong = [f"{name}: missing" for name in wanted if name not in shapes]
    for name, shape in shapes.items():
        if name not in wanted:
            wrong.append(
                f"{name}: {'dropped in silence, or one too many' if name.endswith('bias') else 'unknown'}"
            )
        elif shape != wanted[name]:
            wrong.append(f"{name}: expected {wanted[name]}, got {shape}")
    return wrong


def _model(config: Mapping, attention: Shapes) -> Shapes:
    """All tensors of a dense model with this attention in each layer.

    vLLM: models/llama.py; llama.cpp: gguf-py/gguf/constants.py, MODEL_TENSORS, and tensor_mapping.py (gguf
    0.19).
    """
    width, inner = config["hidden_size"], config["intermediate_size"]
    layer = {f"self_attn.{name}": shape for name, shape in attention.items()}
    layer |= {"mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width)}
    layer |= {"mlp.down_proj.weight": (width, inner)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] in FOUR_NORMS:  # vLLM: models/gemma2.py, gemma3.py
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    layer |= {f"{norm}.weight": (width,) for norm in norms}
    whole = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        whole["lm_head.weight"] = (config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        whole |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return whole


def _head_dim(config: Mapping) -> int:
    """Of Qwen 2 the width over the heads, whatever head_dim says.

    vLLM: models/qwen2.py, Qwen2Attention; llama.cpp: src/models/qwen2.cpp, load_arch_tensors.
    """
    dim = None if config["model_type"] == "qwen2" else config.get("head_dim")
    return dim or config["hidden_size"] // config["num_attention_heads"]


def _grouped(config: Mapping, biased: tuple[str, ...]) -> Shapes:
    """vLLM: QKVParallelLinear takes all heads of queries and the KV heads that num_key_value_heads says."""
    kind, width, dim = config["model_type"], config["hidden_size"], _head_dim(config)
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"q_proj.weight": (q, width), "k_proj.weight": (kv, width), "v_proj.weight": (kv, width)}
    shapes |= {"o_proj.weight": (width, q)}
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    norms = ("q_norm", "k_norm") if kind in HEAD_NORMS else ()
    return shapes | {f"{name}.weight": (dim,) for name in norms}


def _biased(config: Mapping) -> tuple[str, ...]:
    """vLLM: models/qwen2.py always has biases, but none of o; gemma.py never; the others where attention_bias
    says so.

    Of o models/qwen3.py has none even then.
    """
    kind = config["model_type"]
    if kind == "gemma" or (kind != "qwen2" and not config.get("attention_bias")):
        return ()
    return (
        ("q_proj", "k_proj", "v_proj")
        if kind in ("qwen2", "qwen3")
        else ("q_proj", "k_proj", "v_proj", "o_proj")
    )


def _latent(config: Mapping) -> Shapes:
    """vLLM: models/deepseek_v2.py, DeepseekV2MLAAttention; llama.cpp: src/models/deepseek2.cpp,
    load_arch_tensors.

    No projection has a bias in either.
    """
    heads, width, rank = config["num_attention_heads"], config["hidden_size"], config["kv_lora_rank"]
    nope, rope, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes = {
        "kv_a_proj_with_mqa.weight": (rank + rope, width),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + values), rank),
        "o_proj.weight": (width, heads * values),
    }
    if (q_rank := config["q_lora_rank"]) is None:
        return shapes | {"q_proj.weight": (heads * (nope + rope), width)}
    shapes |= {"q_a_proj.weight": (q_rank, width), "q_a_layernorm.weight": (q_rank,)}
    return shapes | {"q_b_proj.weight": (heads * (nope + rope), q_rank)}
