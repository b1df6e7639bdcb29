"""`python -m privgrad` is `privgrad`."""

from privgrad.cli import main

main()
