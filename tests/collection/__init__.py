"""Metal kernels of other projects, run unmodified in the emulator and compared with a reference.

`python -m tests.collection fetch FOLDER` clones the projects at fixed commits; `python -m tests.collection run FOLDER`
runs the cases and prints a table. The projects' code is never part of this repository: a case says which of their
functions to call, with which data, and what the result must be.
"""
