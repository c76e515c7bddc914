"""The `dualpath` command: one module per subcommand, imported only when it is used."""
