"""What checkpoints of model families store of attention: plain data, read by conversion, loading and sizes.

A new family is a row of ``families.py``. ``own_form.py`` is attnlib's own form of a model's config.json.
"""
