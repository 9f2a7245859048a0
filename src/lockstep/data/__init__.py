"""Level 2: from files to batches on the device.

``source`` lists files, ``decode`` makes RGB pixels of them, ``sampler`` says who takes which sample
when, ``augment`` (one image) and ``mixing`` (pairs) change them, ``loader`` puts it together;
``digits`` and ``download`` make data sets and ``check`` reads one through.
"""
