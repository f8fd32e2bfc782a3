"""Bugs planted in sound kernels, third-party ones and our own: `python -m tests.collection plant FOLDER`.

A bug is described by what it replaces, as a regular expression, and by what comes instead: the text of the kernels is
not part of this repository. Each bug is looked for as `kernels.check` does, with its default settings.
"""
