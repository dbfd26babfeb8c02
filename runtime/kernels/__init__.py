"""The arithmetic over weights that stay in their stored blocks: one protocol, one file per implementation."""
