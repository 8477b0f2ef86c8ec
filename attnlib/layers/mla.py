"""The multi-head latent attention (MLA) layer, with an expanded and an absorbed form of the same weights."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..cache.kv_cache import LayerCache
from ..cache.sequences import Prompt
from ..call.selection import selection_of
from ..gate import Gate
from ..indexing import Chosen, IndexBranch, Indexer
from ..internal.checks import check_count, is_recorded
from ..internal.signatures import kind
from ..kv import KVLayout, KVView, StepInfo
from ..masks.band import AnyMask
from ..rope.rope import Angles, Rope, rotate
from ..rope.scaling import QueryTemperature
from ..scores import Score, ScoreFunction
from . import latent_forms
from .attending import AttentionCall, attention_call
from .captured import CapturedTensors, captured_by_mask, captured_by_score
from .choices import index_layout, index_sizes
from .context_parallel import ContextParallel
from .inputs import Inputs, check_latent_rope, check_options, check_stored, computed_dtype
from .latent_forms import attend_expanded, attend_mixed, cheaper_form, check_form, check_heads, source_of
from .parameters import check_counts, described, not_none, reset_children
from .positions import angles_of, positions_of
from .selecting import SelectingLayer
from .shared_keys import Keys, check_keys, refuse_own_keys
from .tensor_parallel import local_weight, plan_of, share_of

if TYPE_CHECKING:  # importing these modules takes longer than importing attnlib
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


@kind
class MultiHeadLatentAttention(SelectingLayer):
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434), with DeepSeek-V3's parameter names.

    A cache stores ``kv_lora_rank + qk_rope_head_dim`` values per token: a latent, and a rotary key that all
    heads share. There are two exact forms of attention, with the same weights:

    - The *expanded* form computes K and V of every head from the latents.
    - The *absorbed* form moves the key up-projection to the query and the value up-projection to the output,
      and attends over the latents themselves as one KV head.

    ``form`` forces one form, and ``"auto"`` takes the cheaper. ``q_lora_rank=None`` projects q directly.
    ``bias`` is for q_a_proj, kv_a_proj_with_mqa and o_proj. DeepSeek rotates interleaved pairs, which is
    ``rope=Rope(qk_rope_head_dim, interleaved=True)``; other pairs warn once (:class:`attnlib.LayoutWarning`).
    ``qk_rope_head_dim=0`` makes a layer without rope. ``temperature`` scales queries by their positions,
    and ``gate`` multiplies the heads' outputs before o_proj by factors that g_proj computes from the input.
    ``own_keys=False`` makes a layer that attends to the latents of another layer, given by ``keys=``. It has
    no kv_a_proj_with_mqa and kv_a_layernorm, and expands the latents with its own kv_b_proj. With ``select``,
    it stores index keys only.
    With YaRN, the layer multiplies ``scale`` by ``rope.latent_scale``, DeepSeek's factor ``mscale * mscale``:
    a ``scale`` that you pass must not contain it.
    ``select`` gives the layer an index branch, as in DeepSeek-V3.2. Calls over selected keys run absorbed.
    With ``context_parallel``, ranks send each other latents and expand the latents that they receive.

    Raises:
        ValueError: sizes do not fit, rotary channels have no rope, a number is out of range, or the form is
            unknown.
        TypeError: an argument has the wrong type, such as a mask that is not a Mask.
    """

    hidden_size: int
    num_heads: int
    mask: AnyMask
    rope: Rope | None
    q_lora_rank: int | None
    kv_lora_rank: int
    v_head_dim: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    temperature: QueryTemperature | None
    gate: Gate | None
    dropout_p: float
    form: str
    backend: str | None
    context_parallel: ContextParallel | None
    mask_tensors: CapturedTensors | None
    score: CapturedTensors | None
    select: Indexer | None
    indexer: IndexBranch | None
    q_gain: float  # multiplies the rotated channels of q, for YaRN
    scale: float
    q_proj: nn.Linear  # only without q_lora_rank
    q_a_proj: nn.Linear  # q_a_proj, q_a_layernorm and q_b_proj: only with q_lora_rank
    q_a_layernorm: nn.Module
    q_b_proj: nn.Linear
    own_keys: bool
    kv_a_proj_with_mqa: nn.Linear  # kv_a_proj_with_mqa and kv_a_layernorm: only with own_keys
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    o_proj: nn.Linear
    g_proj: nn.Linear | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        mask: AnyMask,
        q_lora_rank: int | None = None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        bias: bool = False,
        rope: Rope | None = None,
        temperature: QueryTemperature | None = None,
        norm_eps: float = 1e-6,
        gate: Gate | None = None,
        own_keys: bool = True,
        scale: float | None = None,
        score: ScoreFunction | None = None,
        select: Indexer | None = None,
        dropout_p: float = 0.0,
        context_parallel: ContextParallel | None = None,
        form: str = "auto",
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "kv_lora_rank": kv_lora_rank}
        sizes |= {"qk_nope_head_dim": qk_nope_head_dim, "v_head_dim": v_head_dim}
        check_counts(sizes | not_none(q_lora_rank=q_lora_rank))
        check_count("qk_rope_head_dim", qk_rope_head_dim)
        numbers = {"norm_eps": norm_eps} | not_none(scale=scale)
        flags = {"bias": bias, "own_keys": own_keys}
        check_options(mask, rope, temperature, gate, dropout_p, dtype, numbers=numbers, flags=flags)
        check_form(form, context_parallel)
        check_latent_rope(rope, qk_rope_head_dim)
        self.hidden_size, self.num_heads, self.mask, self.rope = hidden_size, num_heads, mask, rope
        self.q_lora_rank, self.kv_lora_rank, self.v_head_dim = q_lora_rank, kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.temperature, self.dropout_p, self.form = temperature, dropout_p, form
        self.backend, self.context_parallel, self.gate = backend, context_parallel, gate
        self.own_keys = own_keys
        self.mask_tensors, self.score = captured_by_mask(mask, num_heads), captured_by_score(score, num_heads)
        qk_head_dim, up_dim = qk_nope_head_dim + qk_rope_head_dim, num_heads * (qk_nope_head_dim + v_head_dim)
        # YaRN scales the rotated channels of q and k by its amplitude. We apply both factors to q.
        latent_scale, self.q_gain = (1.0, 1.0) if rope is None else (rope.latent_scale, rope.amplitude**2)
        self.scale = (qk_head_dim**-0.5 if scale is None else scale) * latent_scale
        linear = partial(nn.Linear, device=device, dtype=dtype)
        norm = partial(nn.RMSNorm, eps=norm_eps, device=device, dtype=dtype)
        if q_lora_rank is None:
            self.q_proj = linear(hidden_size, num_heads * qk_head_dim, bias=False)
        else:
            self.q_a_proj = linear(hidden_size, q_lora_rank, bias=bias)
            self.q_a_layernorm = norm(q_lora_rank)
            self.q_b_proj = linear(q_lora_rank, num_heads * qk_head_dim, bias=False)
        if own_keys:
            self.kv_a_proj_with_mqa = linear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias=bias)
            self.kv_a_layernorm = norm(kv_lora_rank)
        self.kv_b_proj = linear(kv_lora_rank, up_dim, bias=False)
        self.o_proj = linear(num_heads * v_head_dim, hidden_size, bias=bias)
        self.g_proj = gate and linear(hidden_size, gate.rows(num_heads, v_head_dim), bias=gate.bias)
        made = {"norm_eps": norm_eps, "device": device, "dtype": dtype}
        self._add_index_branch(select, q_lora_rank=q_lora_rank, **made)

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of this layer's KV cache, with autocast's dtype within torch.autocast."""
        if not self.own_keys:
            return index_layout(self)
        dtype = computed_dtype(self.kv_a_proj_with_mqa.weight)
        (window, first), widths = self.mask.kept, (self.kv_lora_rank, self.qk_rope_head_dim)
        kept = {"window": window, "first_tokens": first} | index_sizes(self.select)
        return KVLayout.latent(*widths, **kept, dtype=dtype)

    def kv_layout_as(self, dtype: torch.dtype) -> KVLayout:
        """Same as :meth:`attnlib.GroupedQueryAttention.kv_layout_as`."""
        return replace(self.kv_layout, dtype=dtype)

    def reset_parameters(self) -> None:
        """Same as :meth:`attnlib.GroupedQueryAttention.reset_parameters`."""
        reset_children(self)

    def parallel_plan(self, mesh: "DeviceMesh") -> "dict[str, ParallelStyle]":
        """Same as :meth:`attnlib.GroupedQueryAttention.parallel_plan`; every rank computes all latents."""
        query_name = "q_proj" if self.q_lora_rank is None else "q_b_proj"
        self._check_shardable()
        columns = (query_name, "kv_b_proj") if self.gate is None else (query_name, "kv_b_proj", "g_proj")
        return plan_of(mesh, self.num_heads, self.num_heads, columns)

    @property
    def query_projection(self) -> nn.Module:
        """The projection that computes the heads of q."""
        return self.q_proj if self.q_lora_rank is None else self.q_b_proj

    @property
    def first_projection(self) -> nn.Module:
        """The first module that the layer calls on x."""
        return self.q_proj if self.q_lora_rank is None else self.q_a_proj

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | KVView | None = None,
        kv: LayerCache | None = None,
        keys: Keys | None = None,
        positions: Tensor | None = None,
        angles: Angles | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_context: Tensor | None = None,
        key_starts: Tensor | None = None,
        key_ends: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mask: AnyMask | None = None,
        selected: Chosen | Tensor | None = None,
    ) -> Tensor:
        """Same as :meth:`attnlib.GroupedQueryAttention.forward`, but ``keys`` are ``latent(x, angles)``."""
        ranks = self.context_parallel
        offsets, bounds = (cu_seqlens, cu_seqlens_context), (key_starts, key_ends, attention_mask)
        given = Inputs(context, keys, kv, positions, angles, *offsets, *bounds, mask, selected, ranks)
        given = self._validated(x, given)
        if keys is not None or not self.own_keys:
            widths = self.kv_lora_rank, self.qk_rope_head_dim
            check_keys(keys, x, widths, own_keys=self.own_keys, is_latent=True, first=self.first_projection)
        angles = angles_of(self.rope, x, given)
        source = self.query_source(x)
        given, index = self._selecting(x, given, angles, source)
        q_nope, q_rope = self._query_of(
            source, angles, None if self.temperature is None else positions_of(self.rope, x, given)
        )
        share = share_of(self.query_projection, self.num_heads, q_nope.shape[-2])
        attention = attention_call(self, Score(self.scale), given, q_nope.shape[-2], share)
        if isinstance(context, KVView):
            form = self._allowed_form("absorbed", q_nope)
            out = self._attend_stored(q_nope, q_rope, context, form, attention=attention)
        elif isinstance(keys, KVView):
            out = self._attend_view(q_nope, q_rope, keys, attention)
        elif kv is not None:
            out = self._attend_step(q_nope, q_rope, x, kv, angles, index, attention)
        else:
            latent, k_rope = keys or self.latent(x if context is None else context, angles)
            out = self._attend_tokens(q_nope, q_rope, latent, k_rope, attention, given)
        out = out if self.gate is None else self.gate.apply(out, self.g_proj(x))
        return self.o_proj(out.flatten(-2))

    def extra_repr(self) -> str:
        return described(
            self, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        )

    def append_context(self, context: Tensor, kv: LayerCache) -> None:
        """Same as :meth:`attnlib.GroupedQueryAttention.append_context`."""
        refuse_own_keys(self.own_keys)
        check_stored(context, kv, self.hidden_size, self.kv_a_proj_with_mqa, self.rope)
        kv.append(*self.latent(context, None))

    def query(
        self, x: Tensor, angles: Angles | None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the unrotated channels ``[..., h, n]`` of q, and the rotated ones ``[..., h, p]``.

        A temperature needs integer ``positions``.
        """
        return self._query_of(self.query_source(x), angles, positions)

    def query_source(self, x: Tensor) -> Tensor:
        """Return what q is projected from: the normalized q latent, or x without ``q_lora_rank``."""
        return x if self.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))

    def _query_of(
        self, source: Tensor, angles: Angles | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        q = self.query_projection(source)
        widths = (self.qk_nope_head_dim, self.qk_rope_head_dim)
        q = q.unflatten(-1, (-1, sum(widths)))
        q = q if self.temperature is None else self.temperature.scaled(q, positions)
        q_nope, q_rope = q.split(widths, -1)
        if angles is not None:
            q_rope = rotate(q_rope, angles)
        return q_nope, q_rope if self.q_gain == 1 else q_rope * self.q_gain

    def latent(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor | None]:
        """Return the normalized latent ``[..., r]`` and the rotary key ``[..., p]``, None if p is 0."""
        refuse_own_keys(self.own_keys)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        if angles is not None:
            k_rope = rotate(k_rope.unsqueeze(-2), angles).squeeze(-2)
        return self.kv_a_layernorm(latent), k_rope if self.qk_rope_head_dim else None

    def _attend_step(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        x: Tensor,
        kv: LayerCache,
        angles: Angles | None,
        index: Tensor | None,
        attention: AttentionCall,
    ) -> Tensor:
        """Append the tokens of x to the cache and attend to all stored tokens.

        The first tokens of a sequence attend to each other directly, without reading the cache back.
        """
        latent, k_rope = self.latent(x, None)
        view = kv.append(latent, k_rope, angles=angles, index=index)
        if not kv.prefill or view.split_size or kv.history:
            return self._attend_view(q_nope, q_rope, view, attention)
        attention.check(q_nope, view)  # the call below would skip this check
        if angles is not None:
            k_rope = rotate(k_rope.unsqueeze(-2), angles).squeeze(-2)
        starts = view.starts if view.cu_seqlens_q is None else None
        of_step = Inputs(cu_seqlens=view.cu_seqlens_q, key_starts=starts)
        return self._attend_tokens(q_nope, q_rope, latent, k_rope, attention, of_step)

    def _attend_view(self, q_nope: Tensor, q_rope: Tensor, view: KVView, attention: AttentionCall) -> Tensor:
        """Attend over all tokens in the view of a cache step, in the cheaper form."""
        attention.check(q_nope, view)  # calls on chunks of the view would skip this check
        attend, step = partial(self._attend_stored, attention=attention), view.step
        # The absorbed form is required for results that do not depend on the batch (split_size), if other
        # ranks store some of the latents, and for lists, which would have to be split like the keys.
        must_absorb = view.split_size or view.is_partial or selection_of(attention.mask) is not None
        if step is None or not step.prefill or must_absorb:
            return attend(q_nope, q_rope, view, self._allowed_form("absorbed", q_nope))
        if prompts := self._expanded_prompts(step, view, q_nope.shape[-2]):
            return attend_mixed(attend, q_nope, q_rope, view, prompts)
        new = q_nope.shape[:-2].numel() // view.lengths.shape[0]  # mean number of new tokens per sequence
        form, longest = self._cheaper_step(new, step.history), step.history + q_nope.shape[-3]
        return attend(q_nope, q_rope, view, form, longest=longest)

    def _expanded_prompts(self, step: StepInfo, view: KVView, heads: int) -> list[Prompt]:
        """Return the prompts of a packed step that are much cheaper in the expanded form.

        The list is empty under torch.compile and in CUDA graphs, which must work for any prompts, and with
        shared prefixes, which are read once for all sequences.
        """
        if is_recorded(view.k) or view.route is not None or self._allowed_form("absorbed") == "expanded":
            return []
        least = latent_forms.WORTH // heads
        prompts = [x for x in step.prompts if self._cheaper_step(x.tokens, x.history, least) == "expanded"]
        return prompts if len(prompts) < view.lengths.shape[0] else []

    def _attend_tokens(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor | None,
        attention: AttentionCall,
        given: Inputs,
    ) -> Tensor:
        """Attend over latents ``[..., t, r]`` and rotated keys ``[..., t, p]``, in the cheaper form."""
        if attention.context_parallel is not None:
            check_form(self.form, attention.context_parallel)
            q = torch.cat((q_nope, q_rope), -1)
            source = source_of(self.expand, q, latent, k_rope, tuple(self.kv_b_proj.parameters()))
            return attention.over_tokens(q, None, None, given, source)
        has_lists = selection_of(attention.mask) is not None  # to be gathered once, not for each head
        form = "absorbed" if has_lists else self._cheaper(q_nope.shape[-3], latent.shape[-2])
        if self._allowed_form(form) == "expanded":
            k, v = self.expand(latent, k_rope)
            check_heads(q_nope, k)
            return attention.over_tokens(torch.cat((q_nope, q_rope), -1), k, v, given)
        k = (latent if k_rope is None else torch.cat((latent, k_rope), -1)).unsqueeze(-2)
        out = attention.over_tokens(self._absorb(q_nope, q_rope), k, k[..., : self.kv_lora_rank], given)
        return self._unabsorb(out)

    def _attend_stored(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        view: KVView,
        form: str,
        *,
        attention: AttentionCall,
        **limits: int,
    ) -> Tensor:
        """Attend over a latent cache in the given ``form``; for ``limits`` see :func:`attend_expanded`."""
        if form == "absorbed":
            return self._unabsorb(attention.over_view(self._absorb(q_nope, q_rope), view))
        return attend_expanded(
            torch.cat((q_nope, q_rope), -1),
            view,
            self.expand,
            **limits,
            mask=attention.mask,
            scale=self.scale,
            score=attention.score.function,
            head=attention.head,
            backend=attention.backend,
        )

    def _cheaper(self, queries: int, keys: int, least: int = 0) -> str:
        """Return the form with fewer multiplications for this layer's sizes; see :func:`cheaper_form`."""
        nope, rope, value = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        return cheaper_form(
            queries, keys, rank=self.kv_lora_rank, nope=nope, rope=rope, value=value, least=least
        )

    def _cheaper_step(self, queries: int, history: int, least: int = 0) -> str:
        """Return the cheaper allowed form for ``queries`` new tokens after ``history`` stored ones."""
        reach = self.mask.band.reach
        seen = history if reach is None else min(history, reach)
        return self._allowed_form(self._cheaper(queries, seen + queries, least))

    def _absorb(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        """Map the query to the space of latents and rotary keys, and return it, ``[..., h, r + p]``."""
        k_up, _ = self._up_projections()
        return torch.cat((torch.einsum("...hn,hnr->...hr", q_nope, k_up), q_rope), -1)

    def _unabsorb(self, out: Tensor) -> Tensor:
        """Project weighted sums of latents ``[..., h, r]`` to outputs ``[..., h, e]``."""
        _, v_up = self._up_projections()
        return torch.einsum("...hr,her->...he", out, v_up)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Return the key and value up-projections ``[h, n, r]`` and ``[h, e, r]``, as views of the weight."""
        sizes = (self.qk_nope_head_dim, self.v_head_dim)
        return local_weight(self.kv_b_proj).unflatten(0, (-1, sum(sizes))).split(sizes, 1)

    def expand(self, latent: Tensor, k_rope: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return K ``[..., h, n + p]`` and V ``[..., h, e]`` of latents ``[..., r]`` and keys ``[..., p]``.

        The rotary keys are already rotated. ``k_rope`` is None if p is 0.
        """
        sizes = (self.qk_nope_head_dim, self.v_head_dim)
        k, v = self.kv_b_proj(latent).unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        if k_rope is None:
            return k, v
        k_rope = share_of(self.kv_b_proj, self.num_heads, k.shape[-2]).sum_gradients(k_rope)
        return torch.cat((k, k_rope.unsqueeze(-2).expand(*k.shape[:-1], -1)), -1), v

    def _allowed_form(self, form: str, stored_for: Tensor | None = None) -> str:
        """Return ``form`` if the constructor and the weights allow it, otherwise the allowed form.

        ``stored_for`` is q ``[..., h, n]`` of attention over a cache; see :func:`is_plain_matmul`.

        Raises:
            NotImplementedError: the absorbed form is forced, but kv_b_proj is not a plain linear layer.
        """
        plain = latent_forms.is_plain_matmul(self.kv_b_proj, stored_for, self.num_heads)
        if self.form == "absorbed" and not plain:
            raise NotImplementedError(
                "kv_b_proj: absorbing needs a plain nn.Linear without bias, hooks and adapters, "
                f"got {type(self.kv_b_proj).__name__}; use form='expanded'"
            )
        if self.form != "auto":
            return self.form
        return form if plain else "expanded"
