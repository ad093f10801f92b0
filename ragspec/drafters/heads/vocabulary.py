"""The tokens that a draft head may draft, and the rows of an output head for them."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice

from torch import Tensor, nn

from ragspec.errors import UnsupportedModelError
from ragspec.models.block_linear import BlockLinear
from ragspec.models.checks import check_head_vocabulary
from ragspec.verification.causal import CausalTarget


def frequent_tokens(texts: Sequence[Sequence[int]], size: int, vocab_size: int) -> tuple[int, ...]:
    """Return the `size` most frequent tokens of texts, in the order of their ids.

    If texts have fewer, the lowest other ids are added: they are the merges that were frequent when
    the tokenizer was trained. Ids from `vocab_size` on, which the model cannot emit, are ignored.

    Raises:
        InputError: `size` is below 1 or above `vocab_size`.
    """
    check_head_vocabulary(size, vocab_size)
    counts = Counter(token for token in chain.from_iterable(texts) if token < vocab_size)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    fill = (token for token in range(vocab_size) if token not in counts)
    return tuple(sorted(islice(chain(ranked, fill), size)))


def output_rows(target: CausalTarget, tokens: Tensor) -> nn.Module:
    """Return the map from states [..., H] to the logits of some tokens [..., v].

    Args:
        tokens: Their ids, i64 [v].

    Raises:
        UnsupportedModelError: The output head is not one linear map, or the target combines several
            rows of states (guidance).
    """
    output = target.output_head
    if not isinstance(output, nn.Linear | BlockLinear) or target.copies > 1:
        raise UnsupportedModelError(
            f"the output head of {type(target.model).__name__} is no single linear map "
            f"({type(output).__name__}, {target.copies} row(s) a text); expected one for a "
            "reduced vocabulary. Train the head without vocabulary."
        )
    tokens = tokens.to(target.device)
    if isinstance(output, BlockLinear):
        return output.rows(tokens)
    return linear_of(output.weight[tokens], None if output.bias is None else output.bias[tokens])


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with these weights, which do not learn."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer
