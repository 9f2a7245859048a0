"""Level 2: optimisers, the schedule as a pure function, and the moving average of weights."""
