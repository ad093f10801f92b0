"""Routing of prompts to the replica that has read most of their beginning.

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
    """Remembers which replica read which beginning, and the load of each replica.

    Args:
        replicas: Number of replicas.
        uneven: A replica may run this many texts more than the least busy one and still be chosen
            for its beginnings.
    """

    def __init__(self, replicas: int, uneven: int) -> None:
        self.busy = [0] * replicas
        self._uneven = uneven
        self._replicas: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, prompt: Any, tenant: str = "", but: Collection[int] = ()) -> int:
        """Return the replica for a prompt and count the text there until `done`.

        Beginnings are remembered by tenant, since no tenant reuses the cache of another.

        Args:
            prompt: Text, token ids, or an object whose `str` has the beginning.
            but: Replicas to leave out, not all of them.
        """
        blocks = list(_beginnings(prompt, tenant))
        left = [replica for replica in range(len(self.busy)) if replica not in but]
        least = min(left, key=self.busy.__getitem__)
        replica = next(
            (self._replicas[each] for each in reversed(blocks) if each in self._replicas), least
        )
        if replica in but or self.busy[replica] - self.busy[least] > self._uneven:
            replica = least
        for each in blocks:
            self._replicas[each] = replica
            self._replicas.move_to_end(each)
        while len(self._replicas) > REMEMBERED_PROMPTS:
            self._replicas.popitem(last=False)
        self.busy[replica] += 1
        return replica

    def done(self, replica: int) -> None:
        """Count one text less in a replica."""
        self.busy[replica] -= 1


def _beginnings(prompt: Any, tenant: str) -> Iterator[bytes]:
    """Yield a digest of each beginning of the prompt, by whole blocks, shortest first.

    A prompt shorter than a block is one block.
    """
    parts = prompt if isinstance(prompt, str | list | tuple) else str(prompt)
    digest = hashlib.blake2b(tenant.encode(), digest_size=16)
    for start in range(0, max(len(parts) - len(parts) % BLOCK, 1), BLOCK):
        digest.update(f"|{parts[start : start + BLOCK]}".encode())
        yield digest.digest()
