"""The pure layer: masks, layouts, tiles, programs and their verifier as data. Standard library and numpy only."""
