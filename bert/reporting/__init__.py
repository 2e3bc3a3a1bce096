"""Records of a run, and how a person sees them."""
