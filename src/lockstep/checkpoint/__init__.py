"""Level 4: what a run remembers: save, verify, resume, retain and export."""
