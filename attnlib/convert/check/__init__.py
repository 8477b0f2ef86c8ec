"""Whether stock loaders load a converted folder, and whether it still says the same."""
