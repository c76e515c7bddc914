"""README as a stranger types it; see ``__main__``."""
