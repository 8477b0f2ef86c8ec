"""A table of model families: how their checkpoints store the weights and sizes of attention.

To support another family, add it to ``families.py``. ``own_form.py`` defines attnlib's own config.json.
"""
