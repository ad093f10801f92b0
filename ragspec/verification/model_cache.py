"""Our buffers as caches of transformers, whose import takes a second."""

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ragspec.verification.batch import Batch
from ragspec.verification.static.buffers import Arena


class ModelCache(Cache):  # type: ignore[misc, unused-ignore]
    """The caches of a batch, as one transformers cache."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(layers=[])
        self._batch = batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new slots of layer `layer_idx`; see `Batch.update`."""
        return self._batch.update(key_states, value_states, layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of slots that the queries read, and their offset 0."""
        return self._batch.extent + query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the slots in use."""
        return self._batch.extent


class StepLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer of a step of fixed shape.

    Args:
        keys, values: Views of the buffers [B, heads, S, width].
        columns: The slots that the step writes, i64 [B, n], one tensor for all layers.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.columns = keys, values, columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers already exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the n new slots in place, and return all S: two views [B, heads, S, width]."""
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if len(buffer) == 1:
                buffer.index_copy_(2, self.columns[0], states)
            else:
                buffer.scatter_(2, self.columns[:, None, :, None].expand_as(states), states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots S, and their offset 0."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return 0: callers always pass positions."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of slots S."""
        return int(self.keys.shape[2])


def step_cache(arena: Arena, rows: int, slots: int, columns: Tensor) -> Cache:
    """Return the cache of a step: the first rows and slots of the buffers."""
    cut = slice(rows), slice(None), slice(slots)
    layers = [StepLayer(keys[cut], values[cut], columns) for keys, values in arena.pairs()]
    return Cache(layers=layers)
