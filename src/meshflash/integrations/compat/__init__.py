"""Drop-in names of other libraries, with their argument names, argument order and return values."""
