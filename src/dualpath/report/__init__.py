"""Reports: what a command or measurement has to say as values, and one writer for each medium.

Producers build the values of ``model``; ``text``, ``markdown``, ``html`` and ``pictures`` write
them, ``files`` puts them into a folder. ``style`` has the names and colours of the modes.
"""
