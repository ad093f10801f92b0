"""Routing of prompts to the pool that has read most of their beginning.

Prefix affinity with a bound on the imbalance of load, as in SGLang's router (Zheng et al.,
arXiv 2312.07104, and its cache-aware load balancing). The choice never changes a text.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

BLOCK = 64  # characters or token ids of one step between beginnings
REMEMBERED_PROMPTS = 16_384  # most beginnings to remember


class PrefixRoutes:
    """Remembers which pool read which beginning, and the load of each pool.

    Args:
        pools: Number of pools.
        uneven: A pool may run this many texts more than the least busy one and still be chosen for
            its beginnings.
    """

    def __init__(self, pools: int, uneven: int) -> None:
        self.busy = [0] * pools
        self._uneven = uneven
        self._pools: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, prompt: Any, tenant: str = "", but: Collection[int] = ()) -> int:
        """Return the pool for a prompt and count the text there until `done`.

        Beginnings are remembered by tenant, since no tenant reuses the cache of another.

        Args:
            prompt: Text, token ids, or an object whose `str` has the beginning.
            but: Pools to leave out, not all of them.
        """
        blocks = list(_beginnings(prompt, tenant))
        left = [pool for pool in range(len(self.busy)) if pool not in but]
        least = min(left, key=self.busy.__getitem__)
        pool = next((self._pools[each] for each in reversed(blocks) if each in self._pools), least)
        if pool in but or self.busy[pool] - self.busy[least] > self._uneven:
            pool = least
        for each in blocks:
            self._pools[each] = pool
            self._pools.move_to_end(each)
        while len(self._pools) > REMEMBERED_PROMPTS:
            self._pools.popitem(last=False)
        self.busy[pool] += 1
        return pool

    def done(self, pool: int) -> None:
        """Count one text less in a pool."""
        self.busy[pool] -= 1


def _beginnings(prompt: Any, tenant: str) -> Iterator[bytes]:
    """Yield a digest of each beginning of the prompt, by whole blocks, shortest first.

    A prompt shorter than a block is one block.
    """
    parts = prompt if isinstance(prompt, str | list | tuple) else str(prompt)
    digest = hashlib.blake2b(tenant.encode(), digest_size=16)
    for start in range(0, max(len(parts) - len(parts) % BLOCK, 1), BLOCK):
        digest.update(f"|{parts[start : start + BLOCK]}".encode())
        yield digest.digest()
