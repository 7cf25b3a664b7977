"""The pure room: masks, layouts and tiles as data. Standard library and numpy only."""
