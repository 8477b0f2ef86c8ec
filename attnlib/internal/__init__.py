"""What every room may use and no user calls: checks of arguments, error messages, probes of torch, files, Philox.

Nothing here knows of attention. A helper belongs here once two rooms need it.
"""
