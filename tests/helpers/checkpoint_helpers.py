"""Small checkpoints on disk, a converter for them, and everything that a folder holds."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from attnlib.convert.checkpoint.layer import ConvertedLayer, LayerShape

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
}


def llama(config: dict = CONFIG, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of a small Llama: two per layer beside the attention's four, an embedding and a norm."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", width // heads)
    rows = {"q_proj": heads * head_dim, "k_proj": config["num_key_value_heads"] * head_dim}
    tensors = {"model.embed_tokens.weight": torch.randn(40, width), "model.norm.weight": torch.randn(width)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, count in (rows | {"v_proj": rows["k_proj"]}).items():
            tensors[f"{prefix}self_attn.{name}.weight"] = torch.randn(count, width)
        tensors[f"{prefix}self_attn.o_proj.weight"] = torch.randn(width, rows["q_proj"])
        tensors[f"{prefix}mlp.up_proj.weight"] = torch.randn(24, width)
        tensors[f"{prefix}input_layernorm.weight"] = torch.randn(width)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_checkpoint(
    folder: Path, tensors: dict[str, Tensor], config: dict = CONFIG, *, shards: int = 1
) -> Path:
    """A source folder; with ``shards`` above 1, neighbouring tensors go into different ones."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file(
            {tensor: value for tensor, value in tensors.items() if weight_map[tensor] == name}, folder / name
        )
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    """Replace a folder's index."""
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def halve(weights: dict[str, Tensor], shape: LayerShape) -> ConvertedLayer:
    """Half as many KV heads, each the mean of two."""
    new = dict(weights)
    for name in new:
        if name.startswith(("k_proj", "v_proj")):
            pairs = new[name].unflatten(0, (shape.kv_heads // 2, 2, shape.head_dim))
            new[name] = pairs.float().mean(1).flatten(0, 1).to(pairs.dtype)
    first, second = weights["k_proj.weight"].unflatten(0, (-1, 2, shape.head_dim)).unbind(1)
    return ConvertedLayer(
        new, {"num_key_value_heads": shape.kv_heads // 2}, {"k": float((first - second).norm())}
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
