"""A drop-in replacement for torch's ``nn.MultiheadAttention``, also inside ``nn.Transformer``."""

from copy import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..call.call import Call, Dropout
from ..dispatch.run import attend
from ..internal.checks import are_checks_on, bind, came, is_strided, refuse_tensor
from ..internal.signatures import kind, leading_to
from ..layers.inspected import TakenStatistic, refusing_gradients
from ..layers.padding import bounds_or_mask, is_readable
from ..masks.band import CAUSAL, FULL, AnyMask
from ..masks.ready_made import mask_tensor
from ..scores import Score, bias_tensor


@leading_to("make one by from_torch(module)")
class MultiheadAttention(nn.MultiheadAttention):
    """An ``nn.MultiheadAttention`` that computes with attnlib; :func:`from_torch` makes one.

    Attributes and state dict are those of torch's module, except ``backend`` and the private
    ``_qkv_same_embed_dim``, which is False: nn.TransformerEncoderLayer then calls this module in evaluation
    too, and does not run its fast path on the weights.
    """

    backend: str | None = None

    def __init__(self, module: nn.MultiheadAttention, *, backend: str | None = None):
        if type(module) is not nn.MultiheadAttention:
            raise TypeError(
                f"module: expected an nn.MultiheadAttention, got {type(module).__name__}; a subclass may "
                "compute something else"
            )
        # Copied dicts share parameters, submodules and hooks, but not what is registered later.
        state = vars(module).items()
        vars(self).update({name: copy(x) if isinstance(x, dict | set) else x for name, x in state})
        self._qkv_same_embed_dim, self.backend = False, backend

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and attention weights or None; the arguments are those of torch's module.

        The attention of a query that sees no key is 0, as in torch with ``need_weights=False``, and so are
        its weights. The dropout pattern differs from torch's.

        Args:
            query: ``[s, b, m]``, or ``[b, s, m]`` with ``batch_first``, or ``[s, m]``.
            key: the same with ``t`` tokens of width ``kdim``.
            value: the same with ``t`` tokens of width ``vdim``.
            key_padding_mask: ``[b, t]``, or ``[t]`` with a query ``[s, m]``. A bool mask is True for padding;
                a float mask is added to the scores.
            need_weights: return the attention weights too, recomputed after the output: ``[b, s, t]``, or
                ``[s, t]`` with a query ``[s, m]``. They are those before dropout. A gradient that arrives at
                them raises NotImplementedError; compiled code takes them as constants.
            attn_mask: ``[s, t]`` or ``[b * h, s, t]``. A bool mask is True for hidden pairs; a float mask is
                added to the scores. Float masks may require gradients.
            average_attn_weights: return the mean of the weights over heads. If False, they are
                ``[b, h, s, t]``, or ``[h, s, t]``.
            is_causal: promises that ``attn_mask``, which is required, is causal: it hides key ``j`` from
                query ``i`` if ``j > i``. Its values are then read only with ``ATTNLIB_CHECK=1``.

        Raises:
            NotImplementedError: ``is_causal`` with ``add_bias_kv`` or ``add_zero_attn``, for which torch
                hides the added key.
            ValueError: a shape does not fit, or ``is_causal`` comes without ``attn_mask``.
            TypeError: an input is not a strided tensor, or a mask has integers.
        """
        b, s, t = self._sizes(query, key, value)
        q, k, v = (self._batched(x, query.dim()) for x in self._projected(query, key, value))
        padding, hidden = _shaped(key_padding_mask, attn_mask, (b, self.num_heads, s, t), query.dim())
        mask, hidden = (self._causal(hidden, s, t), None) if is_causal else (FULL, hidden)
        if self.bias_k is not None:  # every query sees the added key
            k, v = (torch.cat((x, y.expand(b, 1, -1)), 1) for x, y in ((k, self.bias_k), (v, self.bias_v)))
            padding, hidden = (x if x is None else F.pad(x, (0, 1)) for x in (padding, hidden))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in (q, k, v))
        mask, bias, (starts, ends) = _visible(mask, padding, hidden)
        # torch's key of zeros has the score 0 and the value 0, like a sink logit of 0.
        sinks = q.new_zeros(self.num_heads) if self.add_zero_attn else None
        score = Score(sinks=sinks, function=None if bias is None else bias_tensor(bias))
        dropout = Dropout(self.dropout if self.training else 0.0)
        call = Call(q, mask, score, k, v, key_starts=starts, key_ends=ends, dropout=dropout)
        taken = TakenStatistic(self.backend)
        out, lse = attend(call, taken if need_weights else self.backend)
        weights = None
        if need_weights:
            weights = self._weights(taken.result, lse.detach(), average_attn_weights).to(out.dtype)
            weights = refusing_gradients(weights.squeeze(0) if query.dim() == 2 else weights, out)
        out = out.flatten(-2)
        return self.out_proj(out.squeeze(0) if query.dim() == 2 else self._batched(out, 3)), weights

    def _weights(self, weights: Tensor, lse: Tensor, average: bool) -> Tensor:
        """Return weights ``[b, h, s, t]`` as torch has them: with its key of zeros, or as mean over heads."""
        if self.add_zero_attn:
            weights = torch.cat((weights, torch.exp(-lse)[..., None]), -1)
        return weights.mean(1) if average else weights

    def extra_repr(self) -> str:
        """Return the sizes and the options that are set, for the printed form of the module."""
        options = {
            name: getattr(self, name) for name in ("dropout", "add_zero_attn", "batch_first", "backend")
        }
        options |= {name: x for name in ("kdim", "vdim") if (x := getattr(self, name)) != self.embed_dim}
        options |= {"add_bias_kv": self.bias_k is not None}
        shown = [f"{name}={x}" for name, x in options.items() if x]
        shown += ["bias=False"] if self.in_proj_bias is None else []
        return ", ".join((f"{self.embed_dim}, {self.num_heads}", *shown))

    def _sizes(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
        """Return the numbers of sequences, queries and keys, or raise an error if the inputs do not fit."""
        named = {"query": query, "key": key, "value": value}
        for name, x in named.items():
            if isinstance(x, Tensor) and x.is_nested:
                raise TypeError(
                    f"{name}: expected a strided tensor, got a nested one; nn.TransformerEncoder makes them "
                    "if its use_nested_tensor is True; attnlib.compat.mha.replace(model) sets it to False"
                )
            if not is_strided(x):
                refuse_tensor(name, x)
        tokens = ("s", "t") if query.dim() == 2 else ("bs", "bt") if self.batch_first else ("sb", "tb")
        dims = dict(zip(named, (f"{tokens[0]}m", f"{tokens[1]}k", f"{tokens[1]}v"), strict=True))
        known = {"m": self.embed_dim, "k": self.kdim, "v": self.vdim}
        sizes = bind(*((name, x, dims[name]) for name, x in named.items()), known=known)
        return sizes.get("b", 1), sizes["s"], sizes["t"]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = separate if weight is None else weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(F.linear(*one) for one in zip((query, key, value), weights, biases, strict=True))

    def _batched(self, x: Tensor, dims: int) -> Tensor:
        """Convert an input of ``dims`` dimensions to ``[b, s, m]``; with 3, the way back is the same."""
        return x.unsqueeze(0) if dims == 2 else x if self.batch_first else x.transpose(0, 1)

    def _causal(self, hidden: Tensor | None, s: int, t: int) -> AnyMask:
        """Return the mask for ``is_causal=True``, which aligns the first query with the first key."""
        if hidden is None:
            raise ValueError("attn_mask: expected a causal mask with is_causal=True, as in torch, got None")
        if self.bias_k is not None or self.add_zero_attn:
            raise NotImplementedError(
                "is_causal: expected False with add_bias_kv or add_zero_attn, for which torch hides the "
                "added key; pass only the causal attn_mask"
            )
        if are_checks_on(hidden):
            shown = ~hidden if hidden.dtype == torch.bool else hidden != -torch.inf
            if hidden[shown].any() or (shown != torch.ones_like(shown).tril()).any():
                raise ValueError("attn_mask: expected a causal mask with is_causal=True, got another mask")
        return CAUSAL if s == t else CAUSAL.shift(s - t)


@kind
def from_torch(module: nn.MultiheadAttention, *, backend: str | None = None) -> MultiheadAttention:
    """Return a drop-in replacement for an ``nn.MultiheadAttention``, with the same options and state dict.

    Both modules share their parameters, so an optimizer of the old module also trains the new one. Hooks are
    kept. To replace all attention of a model, such as ``nn.Transformer``, use :func:`replace`. ``backend``
    selects the backend, as in :func:`attnlib.attention`.

    Raises:
        TypeError: ``module`` is not an ``nn.MultiheadAttention``, or it is of a subclass.

    >>> theirs = nn.MultiheadAttention(64, 4, batch_first=True)
    >>> ours, x = from_torch(theirs), torch.randn(2, 9, 64)
    >>> out, _ = ours(x, x, x, need_weights=False)
    >>> torch.allclose(out, theirs(x, x, x, need_weights=False)[0], atol=1e-6)
    True
    """
    return MultiheadAttention(module, backend=backend)


@kind
def replace(model: nn.Module, *, backend: str | None = None) -> nn.Module:
    """Replace every ``nn.MultiheadAttention`` of a model by :func:`from_torch`, in place; return the model.

    Parameters and state dict stay the same. ``use_nested_tensor`` of an ``nn.TransformerEncoder`` becomes
    False, since it converts padded inputs to nested tensors; its outputs for padding are then not 0.

    Raises:
        ValueError: the model has no ``nn.MultiheadAttention``.
        TypeError: the model has a subclass of it.

    >>> model = replace(nn.Transformer(64, 4, batch_first=True))
    >>> model(torch.randn(2, 9, 64), torch.randn(2, 5, 64)).shape
    torch.Size([2, 5, 64])
    """
    theirs = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
    made = {x: from_torch(x, backend=backend) for x in theirs if type(x) is not MultiheadAttention}
    if not made:
        raise ValueError(f"model: expected one with nn.MultiheadAttention, got {type(model).__name__}")
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            parent._modules[name] = made.get(child, child)
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False
    return made.get(model, model)


def _shaped(
    padding: Tensor | None, hidden: Tensor | None, shape: tuple[int, int, int, int], dims: int
) -> tuple[Tensor | None, Tensor | None]:
    """Validate torch's two masks for a query of ``dims`` dimensions.

    Returns them as ``[b, t]`` and ``[1, 1, s, t]`` or ``[b, h, s, t]``; ``shape`` is ``(b, h, s, t)``.
    """
    b, h, s, t = shape
    for name, x, shapes in (
        ("key_padding_mask", padding, [(t,) if dims == 2 else (b, t)]),
        ("attn_mask", hidden, [(s, t), (b * h, s, t)]),
    ):
        if x is None:
            continue
        if not is_strided(x) or not (x.dtype == torch.bool or x.is_floating_point()):
            raise TypeError(f"{name}: expected a tensor of bools or floats, got {came(x)}")
        if tuple(x.shape) not in shapes:
            raise ValueError(f"{name}: expected {' or '.join(map(str, shapes))}, got {tuple(x.shape)}")
    if hidden is not None:
        hidden = hidden[None, None] if hidden.dim() == 2 else hidden.unflatten(0, (b, h))
    return padding[None] if padding is not None and dims == 2 else padding, hidden


def _visible(
    mask: AnyMask, padding: Tensor | None, hidden: Tensor | None
) -> tuple[AnyMask, Tensor | None, tuple[Tensor | None, Tensor | None]]:
    """Convert torch's masks to a mask, a bias that is added to the scores, and bounds of the keys."""
    bias = starts = ends = None
    if padding is not None and padding.is_floating_point():
        # nn.TransformerEncoderLayer converts bool masks to floats. Bounds are faster than a bias.
        is_hidden = padding == -torch.inf
        readable = is_readable(padding) and not padding.requires_grad
        if readable and (is_hidden | (padding == 0)).all():
            padding = is_hidden
        else:
            padding, bias = None, padding[:, None, None]
    if padding is not None:
        starts, ends, tokens = bounds_or_mask(~padding)
        mask = mask if tokens is None else mask & tokens
    if hidden is not None and hidden.dtype == torch.bool:
        mask = mask & mask_tensor(~hidden)
    elif hidden is not None:
        bias = hidden if bias is None else bias + hidden
    return mask, bias, (starts, ends)
