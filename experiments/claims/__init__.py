"""Claims of the literature, a module each, whose CLAIM says how it is checked."""
