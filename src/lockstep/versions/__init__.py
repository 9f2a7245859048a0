"""Versions of data, weights and pipeline: seen, compared, restored, verified. Level 8.

A version is a commit. Git holds what is small (recipe, ``*.dvc``, ``dvc.lock``, the card and the
figures in ``checkpoints/``), DVC's cache and remotes hold what is large. ``repository`` asks Git,
``outputs`` asks DVC, ``swap`` exchanges files so that a crash leaves nothing half done,
``rollback`` puts them together; ``history`` lists and compares, ``verify`` evaluates again.
"""
