"""Models whose linear layers are stored in 8 or 4 bits; see `BlockLinear`.

In 8 bits most models have blocks of 64, which take less time than those of 32. An input that is far
larger than its neighbours would leave them few of the 255 steps, so those that a norm returns are
evened out first. In 4 bits rounding alone would spoil small models: inputs are evened out in every
layer, as in AWQ (arXiv 2306.00978), and the output head stays in 8 bits.
"""

from collections.abc import Callable, Container, Iterable
from contextlib import ExitStack
from typing import TypeGuard

import torch
from torch import Tensor, nn

from ragspec.errors import ModelError
from ragspec.models.block_linear import BLOCK, BlockEmbedding, BlockLinear
from ragspec.models.onnx_session import missing_package
from ragspec.registry import for_extra
from ragspec.types import PreTrainedModel

WIDE = 64  # weights of one scale where they need not be those of a file
INT8, INT4 = SMALL = ("int8", "int4")
LEAST = 100_000_000  # weights of a model that `stored_small` quantizes
Group = tuple[Tensor, list[nn.Linear]]  # inputs [.., K], and the layers that read them


def quantized(model: PreTrainedModel, dtype: str = INT8) -> PreTrainedModel:
    """Return the model with linear weights in 8 or 4 bits, and an embedding tied to one of them.

    It is another model with other tokens. Speculative decoding is as exact for it as for any.

    Args:
        dtype: One of `SMALL`.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelError: The model cannot be quantized, or lies on an accelerator.
    """
    if model.device.type != "cpu":
        raise ModelError(
            f"got dtype={dtype!r} on {model.device}; expected a CPU. Pass a model to the engine "
            "that transformers has quantized there (quantization_config=)."
        )
    if package := missing_package():
        raise for_extra(ModuleNotFoundError(name=package))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    floating, groups = all(each.is_floating_point() for each in model.parameters()), list[Group]()
    every = [each for each in model.modules() if floating and _fits(each)]
    wider = head, *(x for x in every if x.weight is embedding.weight)
    small = {x for x in every if dtype == INT4 and x not in wider}
    wide = {x for x in every if x not in small and _fits(x, WIDE)}
    wide = {x for x in wide if not torch.equal(BlockLinear.of(x).weight, x.weight)}  # off the grid
    try:
        groups = input_groups(model, dtype == INT4) if wide or small else []
    except Exception:  # its forward asks for other inputs; small blocks bear inputs as they are
        wide = set()
    factors = input_factors(groups, wide | small, 0.3 if small else 0.5)
    sizes = {each: x.float().square().flatten(0, -2).mean(0) for x, of in groups for each in of}

    def store(linear: nn.Linear) -> BlockLinear:
        block, shape = WIDE if linear in wide else BLOCK, linear.in_features
        measured = sizes.get(linear, torch.ones(shape)) if linear in small else None
        return BlockLinear.of(linear, block, factors.get(linear), measured)

    linears = replace_linears(model, store) if small or (every and dtype == INT8) else {}
    if not linears:
        layers = model.named_modules() if floating else ()
        odd = (f"{n} with {x.in_features}" for n, x in layers if _fits(x, 1) and not _fits(x))
        raise ModelError(
            f"{type(model).__name__} cannot be quantized; expected floating weights, and linear "
            f"layers whose inputs are a multiple of {BLOCK}, got "
            f"{next(odd, 'none of these')}. Leave dtype={dtype!r} out."
        )
    for linear, block in linears.items():
        if linear.weight is embedding.weight:
            scale = getattr(embedding, "embed_scale", 1.0)  # a buffer in Gemma
            factor = float(getattr(embedding, "scalar_embed_scale", scale))
            model.set_input_embeddings(BlockEmbedding(block, factor))
    for weight in model.parameters():
        weight.data = weight.data.clone()  # others lie in the mapped file, which is let go
    return model


def input_factors(
    groups: Iterable[Group], linears: Container[nn.Linear], alpha: float
) -> dict[nn.Linear, Tensor]:
    """Return powers of two that even out the inputs of linear layers, [K] each.

    The mean sizes of inputs and weights are brought together, as in SmoothQuant (arXiv 2211.10438).
    Powers of two commute with rounding, so that a norm's own weight may have them. The layers of a
    group share them.
    """
    factors = dict[nn.Linear, Tensor]()
    for inputs, readers in groups:
        if readers and all(each in linears for each in readers):
            weights = torch.cat([each.weight.detach() for each in readers]).float()
            ratio = weights.square().mean(0).sqrt() / inputs.float().abs().flatten(0, -2).mean(0)
            exponents = ratio.nan_to_num(1.0).clamp(1e-8, 1e8).log2()  # a dead channel has 0 / 0
            evened = exponents.mul(alpha).round().exp2().to(inputs.dtype)
            factors |= dict.fromkeys(readers, evened)
    return factors


def input_groups(model: PreTrainedModel, every: bool) -> list[Group]:
    """Return what norms return for some random tokens, and the linear layers that read it.

    Args:
        every: Return all other inputs of linear layers, too.
    """
    vocab_size, seed = len(model.get_input_embeddings().weight), torch.Generator().manual_seed(0)
    most = 256 if every else 64
    length = min(most, getattr(model.config, "max_position_embeddings", None) or most)
    ids = torch.randint(vocab_size, (1, length), generator=seed, device="cpu")
    groups = dict[int, Group]()  # by address, which views share
    recall = groups.setdefault if every else groups.get

    def note(_norm: nn.Module, _args: object, out: object) -> None:
        if isinstance(out, Tensor):
            groups[out.data_ptr()] = out, []

    def read(linear: nn.Linear, args: tuple[Tensor, ...]) -> None:
        for x in args:
            inputs, readers = recall(x.data_ptr(), (x if every else x[..., :0], []))
            if x.numel() and x.shape[-1] == inputs.shape[-1]:  # not by heads; idle experts get none
                readers.append(linear)

    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            stack.callback(vars(module).update, training=module.training)
            if type(module) is nn.Linear:
                stack.enter_context(module.register_forward_pre_hook(read))
            elif getattr(getattr(module, "weight", None), "ndim", 0) == 1:
                stack.enter_context(module.register_forward_hook(note))
        model.eval()(input_ids=ids, use_cache=False)
    return [*groups.values()]


def replace_linears(
    module: nn.Module, store: Callable[[nn.Linear], BlockLinear] = BlockLinear.of
) -> dict[nn.Linear, BlockLinear]:
    """Store linear layers in blocks where their inputs allow it; return the new ones by the old."""
    linears = {
        name: (linear, store(linear)) for name, linear in module.named_modules() if _fits(linear)
    }
    for name, (_, block) in linears.items():
        module.set_submodule(name, block)
    return dict(linears.values())


def _fits(module: nn.Module, block: int = BLOCK) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer whose inputs are so many whole blocks."""
    return type(module) is nn.Linear and module.in_features % block == 0


def stored_small(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model in 8 bits if it is large and in float32 on a CPU."""
    weights = [*model.parameters()]
    unfit = (
        sum(each.numel() for each in weights) < LEAST
        or any(each.device.type != "cpu" or each.dtype != torch.float32 for each in weights)
        or missing_package()
    )
    return model if unfit else quantized(model)
