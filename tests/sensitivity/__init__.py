"""A search for models and data on which one example moves the clipped sum by more than C."""
