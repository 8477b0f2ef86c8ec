"""A converted language model back to the quality of the original: ``python -m attnlib finetune``.

``distillation`` says what a student learns of its teacher, ``training`` takes the steps, ``state`` makes them
resumable; all three know nothing of folders, and any language model with attention layers will do. ``run``
does the same with two folders of Hugging Face models, for which it needs transformers.
"""
