"""Which TCP ports of processes other machines could reach, from Linux's own tables."""

import ipaddress
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_LISTEN = "0A"


def open_listeners(processes: Iterable[int]) -> list[str]:
    """Return "address:port" of the processes' listeners on other than loopback addresses."""
    owned = {inode for process in processes for inode in _sockets(process)}
    return sorted(
        f"{address}:{port}"
        for address, port, inode in _listeners()
        if inode in owned and not address.is_loopback
    )


def _sockets(process: int) -> Iterator[str]:
    try:
        descriptors = list(Path(f"/proc/{process}/fd").iterdir())
    except FileNotFoundError:
        return  # ended meanwhile
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _listeners() -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int, str]]:
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            place, state, inode = fields[1], fields[3], fields[9]
            if state == _LISTEN:
                address, port = place.split(":")
                yield _address(address), int(port, 16), inode


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address; the kernel writes each 32-bit word with its lowest byte first."""
    words = bytes.fromhex(text)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    address = ipaddress.ip_address(packed)
    return getattr(address, "ipv4_mapped", None) or address
