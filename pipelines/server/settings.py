"""Settings of the server: address, API keys and limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ragspec.errors import InputError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The address, API keys and limits of the server.

    Attributes:
        host, port: Address; beyond this machine only with keys.
        keys: API keys, one for each tenant; without any, all requests from this machine are served.
        admin_key: Key of /admin.
        max_batch_size: Texts decoded in one batch.
        max_queue_size: Requests that may wait.
        drain: Seconds that running texts have when the server stops.

    Raises:
        InputError: A value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    admin_key: str | None = None
    max_batch_size: int = 8
    max_queue_size: int = 32
    drain: float = 20.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise InputError(f"port is {self.port}; expected 0 to 65535.")
        for name, least in (("max_batch_size", 1), ("max_queue_size", 0), ("drain", 0)):
            if getattr(self, name) < least:
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

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
