"""Checks of a converted folder: do stock loaders load it, and do its logits match the source?"""
