"""README's commands, typed by a script; see ``__main__``."""
