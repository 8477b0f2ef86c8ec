"""Model families: how their checkpoints store attention, as plain data for conversion, loading and sizes.

Add a family as a row of ``families.py``. ``own_form.py`` defines attnlib's own config.json.
"""
