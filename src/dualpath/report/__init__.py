"""Reports of commands and measurements: a common model, and a writer for each medium.

Producers build the values of ``model``; ``text``, ``markdown``, ``html`` and ``pictures`` render
them, ``files`` writes them to a folder. ``style`` has the titles and colours of the modes.
"""
