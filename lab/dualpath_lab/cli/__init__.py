"""Commands of the lab."""

#: Subcommands of `dualpath` with their one-line helps (``dualpath.cli.main``).
SUBCOMMANDS = {
    "demo": "compare Basic, DualPath and Oracle on real sessions, on this machine",
    "emulate": "start an emulated engine, or a router for emulated engines",
    "model": "prepare a small model: SmolLM2 from its package, or a random tiny one",
    "lab": "emulate a cluster on this machine: nodes with shaped compute and storage NICs",
    "gpu-check": "check and measure a machine with GPUs, phase by phase",
    "chaos": "inject faults and check that nothing is lost, late or wrong",
}

#: Those that read settings; each has a function ``checked_layers``.
CONFIGURED = ("emulate",)

EMULATED = "emulated"
LAB = "lab"

#: Sections of a settings file that these commands add (``dualpath.cli.settings``).
SECTIONS = {
    EMULATED: "dualpath_lab.emulated.settings:EmulatedOptions",
    LAB: "dualpath_lab.nodes.settings:LabSettings",
}
