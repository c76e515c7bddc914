"""Commands of the simulator."""

#: Subcommands of `dualpath` with their one-line helps (``dualpath.cli.main``).
SUBCOMMANDS = {
    "simulate": "compare the modes on a simulated cluster, model and trace",
    "eval": "reproduce the paper's evaluation in the simulator",
    "plan": "find the best split of nodes into prefill and decode, and its capacity",
    "bounds": "print Eq. 1-9 for a cluster, the bottleneck-free P/D range and the bottleneck",
    "table1": "print the paper's Table 1 from model geometry, beside the paper's figures",
    "workingset": "print the KV bytes of prompts, agents and the working set, per model",
    "profile": "measure a model's costs on this machine for the simulator",
}
