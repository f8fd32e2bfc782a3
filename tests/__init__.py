"""The tests. Python keeps what it has compiled of each module, also where the environment says otherwise."""

import os
import sys

# Tests start hundreds of processes, and each would compile every module again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
