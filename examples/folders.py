"""Save a Decoder as a Hugging Face checkpoint folder (Llama or DeepSeek-V3), and load one from a Llama's.

Weights are safetensors only, so loading a folder never runs code from it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from decoder import Decoder
from safetensors.torch import save
from text import byte_tokens
from torch import Tensor

from attnlib import CAUSAL, GroupedQueryAttention
from attnlib.checkpoint_files.folder import CONFIG, WEIGHTS, Checkpoint, read_folder
from attnlib.checkpoint_files.plain_json import dump
from attnlib.convert.checkpoint.layer import LayerShape
from attnlib.convert.checkpoint.model import edit_config, read_model
from attnlib.convert.checkpoint.source_rope import rope_of
from attnlib.convert.checkpoint.writing import write_file
from attnlib.convert.latent.deepseek import deepseek_config
from attnlib.convert.text.tokens import tokenizer_of

# Hugging Face's names for the modules of a Decoder: inside a block, and outside. Other names are the same.
IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
}
OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
TOKENIZERS = {"tokenizer.json", "tokenizer.model", "vocab.json"}  # any one of these files is enough
# For these keys of config.json, a Decoder supports only the value given here; a key may be missing.
FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
}


def their_name(name: str) -> str:
    """Return the checkpoint name of a parameter, e.g. ``model.layers.0.self_attn.q_proj.weight``."""
    first, rest = name.split(".", 1)
    if first != "blocks":
        return f"{OUTSIDE[first]}.{rest}"
    index, part, rest = rest.split(".", 2)
    return f"model.layers.{index}.{IN_BLOCK.get(part, part)}.{rest}"


def load_llama(folder: Path) -> tuple[Decoder, Checkpoint]:
    """Load a Llama folder (config.json and safetensors) as an fp32 Decoder on the CPU.

    Returns the model and the validated folder.

    Raises:
        ValueError: the folder is not a Llama checkpoint, is unsafe to open, or needs a feature that a Decoder
        lacks.
    """
    checkpoint = read_folder(folder)
    config = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6} | checkpoint.config
    for name, expected in FIXED.items():
        got = config.get(name, expected)
        if got != expected:
            raise ValueError(f"{CONFIG}: {name}: expected {expected!r} for a Decoder, got {got!r}")
    for name in ("vocab_size", "intermediate_size"):
        if type(config.get(name)) is not int or config[name] < 1:
            raise ValueError(f"{CONFIG}: {name}: expected a positive int, got {config.get(name)!r}")
    shape, rope = read_model(checkpoint).shape, rope_of(config)
    options = {
        "num_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "bias": bool(config.get("attention_bias")),
    }
    with torch.device("meta"):  # avoids allocating a large model twice
        model = Decoder(
            config["vocab_size"],
            shape.width,
            config["num_hidden_layers"],
            attention=lambda i: GroupedQueryAttention(
                shape.width, shape.heads, mask=CAUSAL, rope=rope, **options
            ),
            mlp_size=config["intermediate_size"],
            tie_embeddings=config["tie_word_embeddings"],
            norm_eps=config["rms_norm_eps"],
        )
    _fill(model, checkpoint)
    return model.eval(), checkpoint


def _fill(model: Decoder, checkpoint: Checkpoint) -> None:
    """Load every parameter; raise ValueError if the folder's names or shapes differ from the model's."""
    named = {their_name(name): (name, value) for name, value in model.named_parameters()}
    # Older checkpoints also store the rotary frequencies and a tied output projection. We do not load them.
    spare = {name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")}
    spare |= {"lm_head.weight"} - named.keys()
    shapes = {name: tuple(value.shape) for name, (_, value) in named.items()}
    found = {
        name: tuple(stored.entry.shape) for name, stored in checkpoint.tensors.items() if name not in spare
    }
    for name in sorted({*shapes, *found}):
        expected, got = shapes.get(name, "none"), found.get(name, "none")
        if expected != got:
            raise ValueError(
                f"{name}: expected {expected}, as {CONFIG} says, got {got}; the weights do not fit the config"
            )
    weights = {name: checkpoint.tensors[theirs].load().float() for theirs, (name, _) in named.items()}
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = weights["embed.weight"]
    model.load_state_dict(weights, assign=True)
    if "lm_head.weight" not in named:
        model.lm_head.weight = model.embed.weight


def save_folder(model: Decoder, folder: Path, config: Mapping[str, object]) -> None:
    """Write the model with the parameter names of Llama or DeepSeek-V3; each file is written atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {their_name(name): value.detach() for name, value in model.named_parameters()}
    write_file(folder, WEIGHTS, save(weights, {"format": "pt"}))
    write_file(folder, CONFIG, dump(config))


def llama_config(
    model: Decoder, *, context: int, source: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return the config.json of an fp32 Decoder with grouped-query layers.

    If ``source`` is given, its other keys are retained.
    """
    layer, mlp = model.blocks[0].attention, model.blocks[0].mlp
    rope = {"rope_theta": layer.rope.theta}
    own = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": model.embed.num_embeddings,
        "hidden_size": layer.hidden_size,
        "intermediate_size": mlp.gate_proj.out_features,
        "num_hidden_layers": len(model.blocks),
        "num_attention_heads": layer.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.lm_head.weight is model.embed.weight,
        "attention_bias": layer.q_proj.bias is not None,
        **rope,  # transformers 4 reads the rope from these keys
        "rope_parameters": {"rope_type": "default", **rope},
        "bos_token_id": None,  # bytes have no tokens for begin and end
        "eos_token_id": None,
    }
    fields = {"num_key_value_heads": layer.num_kv_heads, "dtype": "float32", "torch_dtype": "float32"}
    return edit_config(source or own, fields, _shape(layer))


def tokens_by(source: Checkpoint) -> Callable[[bytes], Tensor]:
    """Return a function that encodes text with the tokenizer of a folder, or as bytes if it has none.

    The function returns tokens ``[t]`` and raises ValueError if one is outside the model's vocabulary.

    Raises:
        ValueError: the source's tokenizer cannot be used.
    """
    encode, size = byte_tokens, source.config["vocab_size"]
    if {file.name for file in source.copied} & TOKENIZERS:
        tokenizer = tokenizer_of(source)

        def encode(data: bytes) -> Tensor:
            found = tokenizer(data.decode(errors="replace"), add_special_tokens=False, verbose=False)
            return torch.tensor(found.input_ids, dtype=torch.int32)

    def checked(data: bytes) -> Tensor:
        tokens = encode(data)
        if len(tokens) and int(tokens.max()) >= size:
            raise ValueError(
                f"text: expected tokens below vocab_size={size}, got {tokens.max()}; the tokenizer "
                "belongs to another model"
            )
        return tokens

    return checked


def copy_tokenizer(source: Checkpoint, folder: Path) -> None:
    """Copy a source's tokenizer and licence files into the folder of a converted model."""
    for file in source.copied:
        write_file(folder, file.name, file.read())


def latent_config(
    model: Decoder, llama: Mapping[str, object], layer: GroupedQueryAttention
) -> dict[str, object]:
    """Return the config.json of a Decoder with MLA layers in DeepSeek's form, converted from a Llama.

    ``llama`` is the config of that Llama, and ``layer`` one of its attention layers.
    """
    made = model.blocks[0].attention
    return deepseek_config(llama, made.state_dict(), made.rope, _shape(layer))


def _shape(layer: GroupedQueryAttention) -> LayerShape:
    return LayerShape(0, layer.hidden_size, layer.num_heads, layer.num_kv_heads, layer.head_dim)
