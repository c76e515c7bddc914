"""The recorded comparisons with other stacks, replayed in the simulator with other settings.

    python -m dualpath_lab.benchmarks.peers.in_simulator FOLDER [--handover hbm] …

``FOLDER`` has the runs of ``matrix``, such as ``docs/evaluation/peers/cells``.  Flags are those of
``dualpath simulate`` that belong to the cluster.  A row is a regime on one processor: the fastest
other stack and DualPath (``split``) as measured, DualPath as simulated without and with the flags,
and both over the other stack, the simulated one as the measured one times the simulated ratio.

Costs of computation were fitted to the measured runs of ``split``.  The simulator charges copies
within an engine to its compute NIC, which the lab's do not use.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dualpath.cli.settings import add_settings, given_settings
from dualpath.core.modes import Mode
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_lab.benchmarks.peers.comparison import MIB, PeersSettings, session, stacks
from dualpath_lab.benchmarks.peers.matrix import Raw, read_regimes
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import (
    ClusterSettings,
    DecodeCosts,
    ModelCosts,
    PrefillCosts,
    Setup,
)
