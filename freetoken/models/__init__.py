"""Models as data: a spec, one forward pass, and one small file for each architecture."""
