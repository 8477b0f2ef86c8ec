"""Check a converted folder: stock transformers must load it, and its logits must match the source."""
