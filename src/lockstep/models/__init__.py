"""Level 2: one door to timm, and what makes any model fit the lockstep law."""
