"""Tree attention for any transformers model, by a registered pair of attention and mask functions.

The mask function receives the model's own `mask_function` (full, sliding, chunked), so one wrapper
serves all layer types. It maps slots to logical positions, applies the model's rule to these, and
combines that with the ancestor relation of the tree. Outside a `tree_view` both functions act like
sdpa. A model uses them only inside a `lease`, one forward or one draft. Then its configuration is
restored, so `generate` and other engines may share the model.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ragspec.models.device import thread_count, threads
from ragspec.verification.batch import Batch, TreeView
from ragspec.verification.kernels import AttentionForm, attend, behind, by_weights, joins

LARGE_MASK = 1 << 17  # entries (queries x slots) from which on a row's mask is large
NAME = "ragspec"
Configs = list[tuple[Any, bool]]
MaskFunction = Callable[..., Tensor]

_batch: ContextVar[Batch | None] = ContextVar("ragspec_batch", default=None)


@contextmanager
def tree_view(batch: Batch) -> Iterator[None]:
    """Apply the views of the batch to the forwards inside the block."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


def in_view() -> bool:
    """Return whether the calling code runs inside a `tree_view`."""
    return _batch.get() is not None


def tree_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction | None = None,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: object,
) -> Tensor | None:
    """Return the additive mask [B, 1, n, S] of the current view, None if none is needed.

    None is needed for plain causality and for separate attention to committed slots, see
    `by_weights`. The mask of a long chain under a window only covers the last slots, those visible.

    Without a view, and for masks over something other than the cache (cross attention), the full
    mask is returned, as for eager attention: a lease can end between another thread's mask and its
    attention. The full mask is also returned to models with their own attention code, which have no
    other source of it, and to models that forbid the skip because they modify the mask.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask

    mask_function = mask_function or causal_mask_function
    batch = _batch.get()
    bidirectional = "allow_is_bidirectional_skip" in kwargs  # some models' self-attention
    if batch is not None and bidirectional:
        batch = batch if kv_length == sum(view.slots for view in batch.views) else None
    if batch is not None:
        every = (mask_function, local_size, dtype, bidirectional, kwargs)
        masks = [_row_mask(view, *every) for view in batch.views]
        return batch.note(masks) if len(masks) > 1 else masks[0]
    kwargs |= {"mask_function": mask_function, "local_size": local_size, "dtype": dtype}
    kwargs |= {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    full: Tensor = eager_mask(**kwargs)
    return full


def _row_mask(
    view: TreeView,
    mask_function: MaskFunction,
    local_size: int | None,
    dtype: torch.dtype,
    bidirectional: bool,
    settings: Mapping[str, object],
) -> Tensor | None:
    """Return the mask of one sequence, see `tree_mask`."""
    from transformers.masking_utils import causal_mask_function

    q_length, kv_length = view.positions.shape[1], view.slots
    lent = _lent.get(id(settings.get("config")))
    required = lent is not None and lent.custom_attention
    required = required or not settings.get("allow_is_causal_skip", True)
    local = local_size is not None and kv_length > local_size
    windowed = local or (local_size is None and mask_function is not causal_mask_function)
    if not windowed and not required and _needs_none(view):
        return None
    first = 0
    if local_size is not None and local and not required and not bidirectional:
        first = _first_visible(view, mask_function, local_size, q_length * kv_length)
    if view.related is None:
        allowed = _model_allows(view, mask_function, first)
    else:
        allowed = _tree_allowed(view, view.related)
        if windowed:
            allowed &= _model_allows(view, mask_function)
    return _additive(allowed[:, None], dtype)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend with an optional mask, logit soft-cap and attention sinks.

    Shapes: query [B, heads, n, width], key and value [B, groups, S, width], mask [B, 1, n, S] or
    [B, heads, n, S] -> [B, n, heads, width]. A narrower mask covers the last slots. Queries that
    share a key head are folded into one longer query, so keys and values are never repeated.
    Sequences that are packed attend one after the other.

    Args:
        settings: Those of transformers: scaling, dropout, softcap, s_aux (sinks), is_causal.
    """
    causal, sinks = settings.get("is_causal"), settings.get("s_aux")
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # Another thread's lease began between this mask, which is that of sdpa, and the attention.
        attention_mask = _additive(attention_mask, query.dtype)
    form = AttentionForm(
        mask=attention_mask,
        causal=getattr(module, "is_causal", True) if causal is None else causal,
        scaling=settings.get("scaling"),
        dropout=settings.get("dropout", 0.0),
        softcap=settings.get("softcap"),
        sinks=getattr(module, "sinks", None) if sinks is None else sinks,
    )
    # Steps of fixed shape bring their masks; a compiler cannot trace context variables.
    batch = None if torch.compiler.is_compiling() else _batch.get()
    if batch is None or len(batch.views) == 1:
        view = None if batch is None else batch.views[0]
        return _attend_row(query, key, value, view, form).transpose(1, 2).contiguous(), None
    queries, masks = torch.split(query, batch.counts, 2), batch.masks(attention_mask)
    parts = zip(queries, batch.parts(key), masks, batch.views, strict=True)
    rows = [_attend_row(one, *kv, view, form._replace(mask=mask)) for one, kv, mask, view in parts]
    return torch.cat(rows, 2).transpose(1, 2).contiguous(), None


def _attend_row(
    query: Tensor, key: Tensor, value: Tensor, view: TreeView | None, form: AttentionForm
) -> Tensor:
    """Return the attention of one sequence: [C, heads, n, width], see `tree_attention`."""
    mask = form.mask
    form = form._replace(causal=form.causal and mask is None and query.shape[2] > 1)
    if (
        form.causal
        and view is not None
        and view.slots == key.shape[2]
        and (view.related is None or view.slots > view.positions.shape[1])
    ):
        return _unmasked(query, key, value, view, form)
    if mask is not None and mask.shape[-1] < key.shape[2]:
        last = slice(key.shape[2] - mask.shape[-1], None)
        key, value = key[:, :, last], value[:, :, last]
    plain = form.softcap is None and form.sinks is None
    return (attend if plain else by_weights)(query, key, value, form)


def _unmasked(
    query: Tensor, key: Tensor, value: Tensor, view: TreeView, form: AttentionForm
) -> Tensor:
    """Attend to the slots of a view whose full attention needs no mask, see `_needs_none`."""
    slots, related = key.shape[2], view.related
    plain = form.softcap is None and form.sinks is None
    if plain and related is None and slots == query.shape[2]:
        return attend(query, key, value, form)
    if plain and not joins(query, value):
        if related is None:
            return behind(query, key, value, form.scaling)
        whole = _additive(_tree_allowed(view, related)[:, None], query.dtype).to(query.device)
        return attend(query, key, value, form._replace(mask=whole, causal=False))
    mask = None if related is None else _additive(related[:, None], query.dtype).to(query.device)
    return by_weights(query, key, value, form._replace(mask=mask, causal=related is None))


@dataclass(slots=True)
class _Lent:
    """A leased configuration; the first lease sets it, the last restores it.

    Attributes:
        implementation: Its attention implementation before the lease.
        custom_attention: Whether a part of the model has attention code outside the registry.
    """

    implementation: Any
    custom_attention: bool
    leases: int = 0


# By the id of a configuration, not of a model: models may share one.
_lent: dict[int, _Lent] = {}
_lock = threading.Lock()


@cache
def _register() -> None:
    """Make transformers know the two functions; its models are then imported already."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, tree_mask)


@contextmanager
def lease(model: nn.Module, configs: Configs | None = None) -> Iterator[None]:
    """Make the model attend through this module inside the block; nests and is thread-safe.

    It has all threads, also in steps of a target on ONNX Runtime.

    Args:
        configs: `model_configs(model)`, for callers that lease the model for every step.
    """
    _register()
    configs = model_configs(model) if configs is None else configs
    with _lock:
        for config, custom in configs:
            lent = _lent.setdefault(id(config), _Lent(config._attn_implementation_internal, custom))
            lent.custom_attention |= custom
            lent.leases += 1
            config._attn_implementation_internal = NAME
    try:
        with threads(thread_count()):
            yield
    finally:
        with _lock:
            for config, _ in configs:
                lent = _lent[id(config)]
                lent.leases -= 1
                if not lent.leases:
                    config._attn_implementation_internal = lent.implementation
                    del _lent[id(config)]


def model_configs(model: nn.Module) -> Configs:
    """Return all configurations of the modules, each with its `_Lent.custom_attention`."""
    record: dict[int, tuple[Any, bool]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            custom = getattr(module, "_supports_attention_backend", None) is False
            _, before = record.get(id(config), (config, False))
            record[id(config)] = (config, custom or before)
    return list(record.values())


def _tree_allowed(view: TreeView, related: Tensor) -> Tensor:
    """Return the mask of committed slots and ancestors: bool [B, n, S]."""
    committed = related.new_ones(*related.shape[:2], view.length)
    if view.hidden is not None:
        columns = torch.arange(view.length, device=related.device)
        committed &= (columns >= view.hidden[:, None])[:, None]
    return torch.cat([committed, related], dim=-1)


def _model_allows(view: TreeView, mask_function: MaskFunction, first: int = 0) -> Tensor:
    """Apply the model's own rule to the slots from `first` on: bool [B, n, S]."""
    rows, n = view.positions.shape
    committed = torch.arange(view.length, device=view.positions.device).expand(rows, -1)
    logical = torch.cat([committed, view.slot_positions], 1)
    allowed = _apply_rule(mask_function, view.positions, logical[:, first:])
    return allowed.expand(rows, 1, n, view.slots - first)[:, 0]


def _apply_rule(rule: MaskFunction, queries: Tensor, slots: Tensor) -> Tensor:
    """Apply a model's rule to positions of queries [B, n] and slots [B, m]: bool [B, 1, n, m]."""
    row = torch.arange(len(queries), device=queries.device)[:, None, None, None]
    return rule(row, torch.zeros_like(row[:1]), queries[:, None, :, None], slots[:, None, None])


def _needs_none(view: TreeView) -> bool:
    """Return whether full attention needs no mask: for a chain, and where `by_weights` is cheaper.

    A mask is read entry by entry, while `by_weights` adds a fixed number of small operations. On a
    CPU with 48 folded queries the two break even between 2,000 and 8,000 slots.
    """
    if view.hidden is not None:
        return False
    if view.related is None:
        return True
    n = view.positions.shape[1]
    large = n > 1 and n * view.slots >= LARGE_MASK and view.length > 0
    return large and view.positions.device.type == "cpu"


def _first_visible(view: TreeView, rule: MaskFunction, local: int, entries: int) -> int:
    """Return how many first slots lie outside a window of `local` slots for a long chain.

    The result is 0 if `rule` allows farther slots, or if the mask has few `entries`.
    """
    if view.related is not None or view.hidden is not None or entries < LARGE_MASK:
        return 0
    first = max(0, int(view.positions.min()) - local + 1)
    slots = torch.arange(first, device=view.positions.device)[None]
    return 0 if bool(_apply_rule(rule, view.positions[:, [0, -1]], slots).any()) else first


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 for allowed slots, else minus infinity."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, float("-inf"))
