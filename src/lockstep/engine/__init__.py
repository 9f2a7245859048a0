"""Level 5: the story of a run. No Hydra, no builders."""
