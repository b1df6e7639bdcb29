"""Speed and memory of a private step against an ordinary one. Not part of the package, not of the test suite."""
