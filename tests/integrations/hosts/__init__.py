"""What becomes of each name that a user of a host framework may override or give."""
