"""What a model makes of a text that is there already."""
