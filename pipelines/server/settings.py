"""Settings of the server: address, API keys and limits."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ragspec.errors import InputError
from ragspec.pipelines.console.records import byte_count, check_limits, option, setting, split
from ragspec.storage.filesystem import read_input

LOCAL = ("localhost", "127.0.0.1", "::1")
SHAPES = {  # of settings, with an example
    "hosts": (re.compile(r"[^/\s]+"), "a.org"),
    "cors": (re.compile(r"null|\*|[a-z][a-z\d+.-]*://[^/\s]+"), "https://a.org"),
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The address, API keys and limits of the server.

    Each key is a tenant. A key "@FILE" stands for those in the file, one a line. Without keys all
    requests from this machine are served.
    """

    host: str = option("127.0.0.1", "Address to listen on; beyond this machine only with --key.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", min=0, max=65535)
    keys: list[str] | None = option(
        None,
        "API key, one for each tenant, or @FILE with one a line; repeatable.",
        "--key",
        envvar="RAGSPEC_API_KEY",
    )
    admin_key: str | None = option(
        None, "API key for /admin and /metrics, or @FILE.", envvar="RAGSPEC_ADMIN_KEY"
    )
    max_batch_size: int = setting(8, "Texts decoded in one batch.", least=1)
    max_queue_size: int = setting(32, "Requests that may wait; more get status 429.", least=0)
    max_model_len: int | None = setting(
        None, "Most tokens of prompt and text. Default: the model's context.", least=1
    )
    kv_memory: int | None = setting(
        None,
        "Most bytes of keys and values, such as 2GiB: of running requests, each with all "
        "tokens that it may have, and of the prefix cache. Others wait.",
        least=1,
        parse=byte_count,
    )
    max_connections: int = setting(512, "Open connections, half of them from one address.", least=2)
    keep_alive: float = setting(60.0, "Seconds that an idle connection stays open.", least=0)
    drain: float = setting(20.0, "Seconds that running texts have at a stop.", least=0)
    access_log: bool = setting(True, "Log a line for each request, without texts.")
    hosts: tuple[str, ...] = setting(
        (),
        "Names of the server that requests may use, comma-separated; * for all. Default: those "
        "of this machine without a key, else all.",
        parse=split,
    )
    cors: tuple[str, ...] = setting(
        (),
        "Origins whose pages in a browser may send requests, comma-separated; * for all.",
        parse=split,
    )

    def __post_init__(self) -> None:
        check_limits(self)
        for name in ("keys", "hosts", "cors"):
            if isinstance(value := getattr(self, name), str):
                raise InputError(f"{name} is {value!r}; expected a list of texts.")
        for name, (shape, example) in SHAPES.items():
            for value in getattr(self, name):
                if shape.fullmatch(value) is None:
                    raise InputError(f"{name} has {value!r}; expected values such as {example}.")
        read_keys([*(self.keys or ()), *([] if self.admin_key is None else [self.admin_key])])
        if not self.keys and not self.local:
            raise InputError(
                f"got host {self.host} and no key; expected a key where others can reach the "
                "server. Give one with --key or RAGSPEC_API_KEY, or listen on 127.0.0.1."
            )

    def listen(self) -> socket.socket:
        """Return a listening socket; raise InputError if the address is not available."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            result = socket.create_server((self.host, self.port), family=family, backlog=2048)
        except OSError as error:
            raise InputError(
                f"cannot listen on {self.host}:{self.port} ({error.strerror or error}); expected a "
                "free address of this machine. Choose another with --host or --port."
            ) from error
        result.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # which asyncio forgets here
        return result

    def accepts(self, host: str) -> bool:
        """Return whether the server goes by the name in a Host header.

        Without a key a page in a browser must not reach the server by a name that its author lets
        lead to this machine (DNS rebinding).
        """
        names = self.hosts or (() if self.keys else (*LOCAL, self.host))
        known = [_name_of(name) for name in names]
        return not names or "*" in known or _name_of(host) in known

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def _name_of(host: str) -> str:
    """Return a host without its port and brackets, "" if it is none."""
    address = f"[{host}]" if host.count(":") > 1 and "[" not in host else host
    try:
        return urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""


def read_keys(entries: Sequence[str]) -> list[str]:
    """Return API keys, those of each "@FILE" as it is now; raise InputError for an invalid one."""
    keys: list[str] = []
    for entry in map(str.strip, entries):  # HTTP clients send keys without outer spaces
        if entry.startswith("@"):
            text = read_input(Path(entry[1:]), "the file of API keys").strip()
            keys += [line for line in map(str.strip, text.split("\n")) if line or not text]
        else:
            keys.append(entry)
    if any(len(key.split()) != 1 or not key.isascii() or key.startswith("#") for key in keys):
        raise InputError("got an invalid key; expected ASCII letters, no blanks or comments.")
    return keys
