"""The options of `serve`: where the server listens, and how much it does at the same time."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Annotated

import typer

from mlx_engine.commands.options.run import CONTEXT_LEN
from mlx_engine.errors import OptionError, require

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
# Addresses that mean all networks of this machine, and where a client on it finds the server.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class AddressOptions:
    """Where the server listens, and who may use it."""

    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8080
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="MLX_ENGINE_API_KEY",
            help="Key that requests must send; /, /health and /openapi.json need none.",
            show_default="no key",
            show_envvar=True,
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="Serve requests to this host name, too; may be given several times. Without it, a server on this "
            "machine alone has the names localhost, 127.0.0.1, [::1] and --host; on other addresses, every name.",
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Let web pages of this origin use the API, such as https://example.org; may be given several times.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the model in the API.", show_default="from the file or hub id"),
    ] = None

    def check(self) -> None:
        """Check the key and the hosts.

        Raises:
            OptionError: the key is empty or a header cannot carry it, or a host is none.
        """
        from mlx_engine.serve.origins import host_name  # takes the time of importing Starlette

        key = self.api_key
        sound = key is None or (key != "" and key.isascii() and key.isprintable() and key == key.strip())
        found = f"{len(key or '')} characters, or others"  # a key is not printed
        expected = "at least one character, all printable ASCII, without spaces at its ends"
        require(sound, option="--api-key", expected=expected, found=found)
        for name in self.allow_host or ():
            expected = "a host name or an IP address, without a scheme and a port"
            require(host_name(name) is not None, option="--allow-host", expected=expected, found=name)

    def hosts(self, host: str) -> frozenset[str] | None:
        """Return the hosts that clients may name, or None for any; `host` is the address as numbers."""
        from mlx_engine.serve.origins import LOOPBACK, host_names

        if not is_local(host) and not self.allow_host:
            return None
        return host_names((*LOOPBACK, host, self.host, *(self.allow_host or ())))

    def url(self, listener: socket.socket) -> str:
        """Return the server's address for a client on this machine."""
        host, port = listener.getsockname()[:2]
        host = EVERYWHERE.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def page(self, url: str) -> str:
        """Return the line about the chat page; `url` is the server's address on this machine."""
        others = ", on other machines with this one's name or address" if self.host in EVERYWHERE else ""
        return f"Chat in a browser: {url}/{others}{' (it asks for the key)' if self.api_key is not None else ''}"

    def warnings(self, host: str) -> list[str]:
        """Return a warning if others can reach the server and need no key; `host` is the address as numbers."""
        if self.api_key is not None or is_local(host):
            return []
        pages = "" if self.allow_host else ", and web pages that they open; --allow-host NAME keeps these out"
        return [f"warning: anyone who can reach {self.host} can use this server (--api-key KEY restricts it){pages}"]


@dataclass(frozen=True)
class CapacityOptions:
    """How much the server does at the same time."""

    slots: Annotated[int, typer.Option("--slots", help="Generate at most N answers at the same time.", min=1)] = 4
    context_len: Annotated[
        int | None,
        typer.Option(
            *CONTEXT_LEN,
            help="Limit the prompt and the answer of a request together to N tokens.",
            min=1,
            show_default="the model's",
        ),
    ] = None
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory",
            metavar="SIZE",
            help="Memory for keys and values, such as 2GiB.",
            show_default="half of what is free, at most a full context, or --context-len, per slot",
        ),
    ] = None
    queue: Annotated[
        int, typer.Option("--queue", help="Let at most N answers wait for a slot; more are refused (429).", min=0)
    ] = 64
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt from its first token.")
    ] = False
    explain_cache: Annotated[
        bool,
        typer.Option(
            "--explain-cache",
            help="Reuse prompts to the token, not in whole pages, and show in replies and on the page what is cached: "
            "for a server that nobody else uses, because it tells clients about each other's prompts.",
        ),
    ] = False
    max_body: Annotated[str, typer.Option("--max-body", metavar="SIZE", help="Refuse larger requests (413).")] = "4MiB"
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that running answers get to end when the server stops.", min=0)
    ] = 30.0

    def check(self) -> None:
        """Check the sizes; raise OptionError if one is no size."""
        _ = self.kv_bytes, self.max_body_bytes

    @property
    def kv_bytes(self) -> int | None:
        """Bytes for keys and values; None for what the machine can spare. Raise OptionError if it is no size."""
        return None if self.kv_memory is None else bytes_of("--kv-memory", self.kv_memory)

    @property
    def max_body_bytes(self) -> int:
        """The largest body in bytes. Raise OptionError if it is no size."""
        return bytes_of("--max-body", self.max_body)


def bytes_of(option: str, text: str) -> int:
    """Parse a size: 2GiB (or 2G) is 2 * 1024**3 bytes, 2GB is 2 * 1000**3.

    Raises:
        OptionError: the text is no size.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(option=option, expected="a size such as 2GiB, 500MB or 1000000", found=text)
    is_decimal = text.strip().upper().endswith("B") and not match[3]
    return int(float(match[1]) * (1000 if is_decimal else 1024) ** POWERS[match[2].upper()])


def is_local(host: str) -> bool:
    """Return whether an address, given as numbers, can be reached from this machine alone."""
    return ipaddress.ip_address(host).is_loopback
