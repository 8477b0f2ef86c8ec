"""Distill a converted language model back to the quality of the original: ``python -m attnlib finetune``.

``distillation`` defines the losses between student and teacher, ``training`` takes the optimizer steps, and
``state`` makes a run resumable. These three know nothing about folders and work with any language model that
has attention layers. ``run`` applies them to two folders of Hugging Face models and needs transformers.
"""
