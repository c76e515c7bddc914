"""Simulates DualPath on the paper's cluster; other modes, models and traces work the same way."""

from dualpath.core.modes import Mode
from dualpath.workload.columns.generator import DATASETS, generate_agents
from dualpath_sim.catalog.costs import load_model_costs
from dualpath_sim.catalog.load import load_cluster
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup

cluster = load_cluster("paper-660b")
model = load_model_costs("ds-v3.2", "hopper", cluster)
agents = generate_agents(DATASETS["32K"], agents=16, seed=1)
run = simulate(Setup(cluster=cluster, model=model, mode=Mode.DUALPATH), agents)
print(f"simulated: JCT {run.jct_s:.0f} s, mean TTFT {run.ttft_s().mean():.2f} s")
