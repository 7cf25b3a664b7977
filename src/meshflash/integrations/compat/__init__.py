"""Drop-in names of other implementations: the same argument names, order and returns."""
