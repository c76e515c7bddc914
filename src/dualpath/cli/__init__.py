"""The `dualpath` command: one module per subcommand, loaded only when it is chosen."""
