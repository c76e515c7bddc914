"""What moves, over which link, in what order (paper §4, §5)."""
