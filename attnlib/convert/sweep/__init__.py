"""Try many sizes and stores of a model's cache, and show what each costs in quality."""
