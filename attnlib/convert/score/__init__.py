"""Score a result against its source: perplexity and KL divergence by text, also over a small cache."""
