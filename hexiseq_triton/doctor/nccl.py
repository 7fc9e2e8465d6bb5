"""What NCCL says it uses, from its own log: the network, the interface, the ways between GPUs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

NCCL_SETTINGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,P2P"}
"""Environment under which NCCL writes what is read here."""

_NETWORK = re.compile(r"Using network (\S+)")
_INTERFACE = re.compile(r"NET/(\w+)\s*: Using (.+)")
_BOOTSTRAP = re.compile(r"Bootstrap\s*:? ?Using (\S+)")
_WAY = re.compile(r"\bvia ((?:P2P|SHM|NET)\S*)")


@dataclass(frozen=True)
class NcclLog:
    """What one rank's NCCL uses; "" where its log doesn't say."""

    network: str = ""
    interface: str = ""
    ways: str = ""


def read_nccl_log(path: Path) -> NcclLog:
    """Return what stands in a log; nothing if there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return NcclLog()
    network = _NETWORK.search(text)
    name = network.group(1) if network else ""
    interfaces = dict(_INTERFACE.findall(text))
    bootstrap = _BOOTSTRAP.search(text)
    interface = interfaces.get(name) or (bootstrap.group(1) if bootstrap else "")
    ways = Counter(_WAY.findall(text))
    return NcclLog(name, interface.strip(), ", ".join(way for way, _ in ways.most_common()))
