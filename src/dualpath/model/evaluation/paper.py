"""Every number that the text of §7 and §8.2 quotes, and exactly what it is.

The paper's figures are pictures that its text does not carry, so nothing is read off a curve.
"""

from typing import Literal

import msgspec

Relation = Literal["equals", "at most", "comparable"]


class Quoted(msgspec.Struct, frozen=True):
    """One number of the paper.

    ``relation`` says how to compare: the model should equal the value; stay below it; or, where
    the paper only calls two systems comparable, their ratio should be near 1.  ``offline`` is
    the part whose target is 5 %.
    """

    key: str
    figure: str
    section: str
    what: str
    value: float
    unit: str
    offline: bool
    relation: Relation = "equals"


def _ratio(key: str, section: str, what: str, value: float, *, offline: bool = True) -> Quoted:
    return Quoted(key, key.split(".")[0], section, what, value, "x", offline)


def _comparable(key: str, section: str, what: str) -> Quoted:
    return Quoted(key, key.split(".")[0], section, what, 1.0, "x", True, "comparable")


def _seconds(key: str, section: str, what: str, value: float, *, offline: bool) -> Quoted:
    return Quoted(key, key.split(".")[0], section, what, value, "s", offline)


def _percent(key: str, what: str, value: float) -> Quoted:
    return Quoted(key, "fig12", "§7.5", what, value, "%", True)


_QUOTED = (
    _ratio("fig7.660b.speedup_max", "§7.3", "DS 660B, largest speed-up over Basic", 1.87),
    _comparable("fig7.660b.to_oracle", "§7.3", "DS 660B, mean DualPath JCT to Oracle's"),
    _ratio("fig7.27b.speedup_max", "§7.3", "DS 27B, largest speed-up over Basic", 1.78),
    _ratio("fig7.27b.to_oracle_low", "§7.3", "DS 27B, least DualPath JCT to Oracle's", 1.09),
    _ratio("fig7.27b.to_oracle_high", "§7.3", "DS 27B, largest DualPath JCT to Oracle's", 1.85),
    _ratio("fig8.speedup_mean", "§7.3", "DS 27B, mean speed-up over P:D ratios", 1.64),
    _ratio("fig8.speedup_max", "§7.3", "DS 27B, largest speed-up over P:D ratios", 2.46),
    _comparable("fig8.basic_1p1d_1p2d", "§7.3", "Basic 1P1D to Basic 1P2D"),
    _comparable("fig8.dualpath_1p1d_basic_2p1d", "§7.3", "DualPath 1P1D to Basic 2P1D"),
    _comparable("fig8.dualpath_2p1d_1p2d", "§7.3", "DualPath 2P1D to DualPath 1P2D"),
    _ratio("fig9.append_speedup_low", "§7.3", "append scales, least speed-up", 1.82),
    _ratio("fig9.append_speedup_high", "§7.3", "append scales, largest speed-up", 1.99),
    _ratio("fig10.27b.capacity", "§7.4", "DS 27B, APS DualPath to Basic", 1.67, offline=False),
    _ratio("fig10.660b.capacity", "§7.4", "DS 660B, APS DualPath to Basic", 2.25, offline=False),
    _ratio("fig10.capacity_mean", "abstract", "mean of both models' ratios", 1.96, offline=False),
    Quoted(
        "fig11.working_set_low",
        "fig11",
        "§8.2",
        "DS 660B, working set at 0.1 APS",
        69.0,
        "GB",
        False,
    ),
    Quoted(
        "fig11.working_set_high",
        "fig11",
        "§8.2",
        "DS 660B, working set at 0.45 APS",
        681.0,
        "GB",
        False,
    ),
    _percent("fig12.layerwise", "JCT below Basic: layerwise prefill", 17.21),
    _percent("fig12.round_robin", "JCT below Basic: and dual-path loading", 38.19),
    _percent("fig12.dualpath", "JCT below Basic: and scheduling", 45.62),
    _ratio("fig13.round_robin", "§7.5", "SNIC traffic max/avg, round robin", 1.53),
    _ratio("fig13.dualpath", "§7.5", "SNIC traffic max/avg, DualPath", 1.18),
    _ratio("fig14.dualpath", "§7.5", "attention time max/avg, first 5 %", 1.06),
    _seconds("table3.2p4d.jct", "§7.6", "2P4D, 2K agents, JCT", 3167.0, offline=True),
    _seconds("table3.48p96d.jct", "§7.6", "48P96D, 48K agents, JCT", 3201.0, offline=True),
    _seconds("table3.2p4d.ttft", "§7.6", "2P4D, 0.4 APS, TTFT", 1.739, offline=False),
    _seconds("table3.2p4d.ttst", "§7.6", "2P4D, 0.4 APS, TTST", 0.228, offline=False),
    _seconds("table3.2p4d.tpot", "§7.6", "2P4D, 0.4 APS, TPOT", 0.039, offline=False),
    _seconds("table3.44p88d.ttft", "§7.6", "44P88D, 8.8 APS, TTFT", 1.847, offline=False),
    _seconds("table3.44p88d.ttst", "§7.6", "44P88D, 8.8 APS, TTST", 0.194, offline=False),
    _seconds("table3.44p88d.tpot", "§7.6", "44P88D, 8.8 APS, TPOT", 0.036, offline=False),
    Quoted(
        "table3.scheduler_cores",
        "table3",
        "§7.6",
        "CPU cores of the scheduler",
        10.0,
        "cores",
        False,
        "at most",
    ),
)

#: The paper's numbers by key, in the order of its text.
QUOTED = {quoted.key: quoted for quoted in _QUOTED}

#: What the model's parameters were fitted to, as the catalog's files say; every other number is a
#: prediction.  Kernel rates, the overhead of a pass, the cap of a batch and what a CNIC reaches:
#: five numbers of DS 660B on 2P4D, 64K, offline.  DS 27B's efficiency: one of Fig. 7.  Admission to
#: decode: the TTST of 2P4D.  The cost of one more request in a decode step: both TPOT of Table 3.
FITTED = frozenset(
    {
        "fig7.660b.speedup_max",
        "fig7.27b.speedup_max",
        "fig12.layerwise",
        "fig12.round_robin",
        "fig12.dualpath",
        "table3.2p4d.jct",
        "table3.2p4d.ttst",
        "table3.2p4d.tpot",
        "table3.44p88d.tpot",
    }
)

#: Largest relative error meant to remain, for offline and online numbers.
OFFLINE_TARGET = 0.05
ONLINE_TARGET = 0.15
