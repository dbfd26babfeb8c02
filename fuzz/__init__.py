"""Fuzz targets: what reads files that nobody vouches for."""
