"""lockstep: the same image-classification run on one process or many GPUs."""

__version__ = "0.1.0"
