"""Which of several pools a prompt goes to: where most of its beginning was read before.

Affinity to prefixes with a bound on how unevenly work may lie, as in SGLang's router (Zheng et al.,
arXiv 2312.07104, and its cache-aware load balancing). The choice never changes a text.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

BLOCK = 64  # characters or token ids that are told apart together
REMEMBERED_PROMPTS = 16_384  # beginnings that are remembered


class PrefixRoutes:
    """Remembers which pool read which beginning, and what each has to do.

    pools: how many there are. uneven: texts that a pool may have more than the least busy one and
    still be given what it knows.
    """

    def __init__(self, pools: int, uneven: int) -> None:
        self.busy = [0] * pools
        self._uneven = uneven
        self._known: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, prompt: Any, tenant: str = "", but: Collection[int] = ()) -> int:
        """Return the pool for a prompt and count the text there until `done`.

        prompt: text, token ids, or what else tells its beginning by `str`. What was read for one
        tenant never serves another, so it does not draw another's prompts either. but: pools that
        are left out, not all of them.
        """
        blocks = list(_beginnings(prompt, tenant))
        left = [pool for pool in range(len(self.busy)) if pool not in but]
        least = min(left, key=self.busy.__getitem__)
        result = next(
            (self._known[each] for each in reversed(blocks) if each in self._known), least
        )
        full = self.busy[result] - self.busy[least] > self._uneven
        pool = least if full or result in but else result
        for each in blocks:
            self._known[each] = pool
            self._known.move_to_end(each)
        while len(self._known) > REMEMBERED_PROMPTS:
            self._known.popitem(last=False)
        self.busy[pool] += 1
        return pool

    def done(self, pool: int) -> None:
        """Count one text less in a pool."""
        self.busy[pool] -= 1


def _beginnings(prompt: Any, tenant: str) -> Iterator[bytes]:
    """Yield a digest of each beginning of the prompt, by whole blocks, shortest first.

    What is shorter than a block is a block.
    """
    parts = prompt if isinstance(prompt, str | list | tuple) else str(prompt)
    digest = hashlib.blake2b(tenant.encode(), digest_size=16)
    for start in range(0, max(len(parts) - len(parts) % BLOCK, 1), BLOCK):
        digest.update(f"|{parts[start : start + BLOCK]}".encode())
        yield digest.digest()
