"""Tells how fast a machine trains, and where the time goes. Level 8.

``bench`` measures cases, each in processes of its own; ``case`` is what runs there: the real worker
on synthetic images, or one of ``peers``. ``scaling`` asks for cases on one GPU and on several.
"""
