"""Settings of the server: address, API keys and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from types import MappingProxyType

from ragspec.errors import InputError

LOCAL = ("localhost", "127.0.0.1", "::1")
LEAST = MappingProxyType(
    {"max_batch_size": 1, "max_queue_size": 0, "max_connections": 2, "keep_alive": 0, "drain": 0}
)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The address, API keys and limits of the server.

    Attributes:
        host, port: Address; beyond this machine only with keys.
        keys: API keys, one for each tenant; without any, all requests from this machine are served.
        admin_key: Key of /admin and /metrics.
        hosts: Accepted names of the server in requests, "*" for all; without any, those of this
            machine if there is no key, else all.
        max_batch_size: Texts decoded in one batch.
        max_queue_size: Requests that may wait.
        max_connections: Open connections, half of them from one address.
        keep_alive: Seconds that an idle connection stays open.
        drain: Seconds that running texts have when the server stops.
        access_log: Whether to log a line for each request.

    Raises:
        InputError: A value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    admin_key: str | None = None
    max_batch_size: int = 8
    max_queue_size: int = 32
    max_connections: int = 512
    keep_alive: float = 60.0
    drain: float = 20.0
    access_log: bool = True
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise InputError(f"port is {self.port}; expected 0 to 65535.")
        for name, least in LEAST.items():
            if not getattr(self, name) >= least:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least {least}.")
        # HTTP clients send keys without outer spaces.
        object.__setattr__(self, "keys", tuple(key.strip() for key in self.keys))
        if self.admin_key is not None:
            object.__setattr__(self, "admin_key", self.admin_key.strip())
        every = self.keys if self.admin_key is None else (*self.keys, self.admin_key)
        if any(not key or not key.isascii() for key in every):
            raise InputError("got an empty key, or one that is not ASCII; expected letters.")
        if not self.keys and not self.local:
            raise InputError(
                f"got host {self.host} and no key; expected a key where others can reach the "
                "server. Give one with --key or RAGSPEC_API_KEY, or listen on 127.0.0.1."
            )

    def accepts(self, host: str) -> bool:
        """Return whether the server goes by this name.

        Without a key a page in a browser must not reach the server by a name that its author lets
        lead to this machine (DNS rebinding).
        """
        names = self.hosts or (() if self.keys else (*LOCAL, self.host))
        return not names or "*" in names or host in names

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
