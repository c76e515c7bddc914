"""The transfers of a prompt: their links, their order, and their bandwidth (paper §4, §5)."""
