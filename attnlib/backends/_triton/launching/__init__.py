"""Kernel launches: the first through Triton, cached launches directly from then on.

No other folder uses private parts of Triton. Each is used only after a trial (``direct.py``). ``launch.py``
defines ``Launch``, which the launch plans of the dense and decode folders contain.
"""
