"""Kernel launches: through Triton the first time, directly from then on.

This is the only room that uses private parts of Triton, each after a trial (``direct.py``). ``launch.py``
defines the launch record that dense and decode compute.
"""
