"""Latent attention from grouped-query attention: exactly, cut to a rank, and in the form of DeepSeek-V3."""
