"""Conversion of grouped-query to latent attention: exact, truncated to a rank, or in DeepSeek-V3's form."""
