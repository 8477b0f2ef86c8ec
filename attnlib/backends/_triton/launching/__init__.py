"""Kernel launches: the first launch goes through Triton, and later ones start the compiled kernel directly.

Only this folder uses private parts of Triton, and it tries each of them first (``direct.py``). ``launch.py``
defines ``Launch``; the launch plans of the dense and decode folders consist of such launches.
"""
