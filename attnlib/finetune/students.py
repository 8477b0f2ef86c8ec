"""Select the weights that a student trains: attention or everything, directly or through LoRA adapters."""

from math import prod

import torch
from torch import nn

from ..checkpoint_files.folder import read_folder
from ..convert.checkpoint.errors import CheckpointError
from .folders import ATTENTION, attention_layers, stored_dtype
from .settings import Settings

# A converted MLA layer must not normalize its latents: a large constant channel and equally large norm
# weights cancel the norm. Such weights are not trained, because Adam steps would hardly change them.
IDENTITY, LARGE = ("_a_layernorm.weight", "_a_proj_with_mqa.bias", "q_a_proj.bias"), 2**10
SCALE = 2.0  # LoRA multiplies an adapter's output by this factor: alpha / rank


def prepare(model: nn.Module, settings: Settings) -> None:
    """Select the parameters of ``model`` that train, or add adapters, in place.

    Raises:
        ImportError: adapters are requested and peft is not installed.
        CheckpointError: the model has no linear layers to adapt.
    """
    if settings.lora is not None:
        _adapt(model, settings)
        return
    inside = {id(x) for layer in attention_layers(model) for x in layer.parameters()}
    for name, parameter in model.named_parameters():
        constant = name.endswith(IDENTITY) and float(parameter.detach().abs().max()) >= LARGE
        parameter.requires_grad_((settings.train == "all" or id(parameter) in inside) and not constant)


def bytes_written(settings: Settings) -> tuple[int, int]:
    """Return upper bounds on the bytes of a training state and of the result.

    A state has the trained weights and their two Adam moments in fp32. All weights of a trained part count,
    and an adapter for each of them with ``lora``.
    """
    tensors, width = read_folder(settings.source).tensors, stored_dtype(settings.source).itemsize
    shapes = {name: stored.entry.shape for name, stored in tensors.items()}
    within = [x for name, x in shapes.items() if settings.train == "all" or {*name.split(".")} & {*ATTENTION}]
    trained = sum(prod(x) if settings.lora is None else settings.lora * sum(x) for x in within)
    return 3 * torch.float32.itemsize * trained, width * sum(map(prod, shapes.values()))


def require_adapters() -> None:
    """Raise ImportError unless peft is installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ImportError("--lora needs peft: pip install peft") from error


def merge(model: nn.Module) -> None:
    """Merge the adapters of ``model`` into its weights and remove them, in place."""
    from peft.tuners.lora import LoraLayer

    for name, module in [x for x in model.named_modules() if isinstance(x[1], LoraLayer)]:
        module.merge(safe_merge=True)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module.get_base_layer())


def _adapt(model: nn.Module, settings: Settings) -> None:
    """Add LoRA adapters to the linear layers of a model, and train only the adapters."""
    require_adapters()
    from peft import LoraConfig, inject_adapter_in_model

    inside = {id(x) for layer in attention_layers(model) for x in layer.modules()}
    head = model.get_output_embeddings()
    names = [
        name
        for name, x in model.named_modules()
        if isinstance(x, nn.Linear)
        and not any(x.children())  # projections that normalize heads: the layers of their heads get adapters
        and x is not head
        and (settings.train == "all" or id(x) in inside)
    ]
    if not names:
        raise CheckpointError(
            f"--lora: expected linear layers in {type(model).__name__}, got none; train without --lora"
        )
    rank = settings.lora
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=names), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
