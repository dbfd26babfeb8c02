"""The cache policies, one per file."""
