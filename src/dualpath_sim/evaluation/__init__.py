"""The paper's evaluation (§7, §8.2) as commands: runs, numbers, tables, plots, comparison."""
