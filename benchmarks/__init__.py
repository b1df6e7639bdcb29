"""Speed and memory of a private step against an ordinary one. Not part of the package, not of the test suite."""

import os

# Before torch is imported. Threads that spin while they wait take the cores from the threads they wait for as soon as
# the machine has other work: an ordinary step was seen to take 15 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
