"""Programs that make samples: from text, from the standard library, from a data set of another layout."""
