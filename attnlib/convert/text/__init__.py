"""What a text does in a checkpoint's layers."""
