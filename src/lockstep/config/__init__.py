"""Level 0: typed configuration and the plan derived from it. Imports no torch."""
