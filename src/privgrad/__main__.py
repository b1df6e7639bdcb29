"""Let `python -m privgrad` do the same as the command `privgrad`."""

from privgrad.cli import main

main()
