"""One file per model family; each declares what its layers are made of."""
