"""Programs that make samples from text, from the standard library's prose, or from a data set of another layout."""
